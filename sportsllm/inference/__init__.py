"""Using a model, in PyTorch or ONNX: the decoder protocol, sampling, scoring, calibration samples. Imports models,
formats and text.
"""
