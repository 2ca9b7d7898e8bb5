"""Runs an export with ONNX Runtime: sessions, key/value caches, the decoder. Needs neither torch nor onnx."""

from export.runtime.decoder import open

__all__ = ["open"]
