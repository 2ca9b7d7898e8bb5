"""Using a model: the decoder protocol, sampling, scoring; one code for PyTorch and ONNX. Imports models,
storage and text.
"""
