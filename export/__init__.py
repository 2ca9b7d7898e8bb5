"""export: the ONNX graph, its runtime, and the proof that both equal the PyTorch model."""
