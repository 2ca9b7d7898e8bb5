"""Builds the ONNX graph of a checkpoint. Does not import the runtime."""
