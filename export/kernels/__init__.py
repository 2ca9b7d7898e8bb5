"""This project's kernels for ONNX Runtime: a C++ library that computes a decoder layer in one call; see `build`."""
