"""Builds the ONNX graph of a checkpoint. Imports of the other modules here only paths, metadata and cache scales.

Within: decoder -> kinds -> selected -> grouped_query, feed_forward -> half -> layer -> matmul ->
builder, weights.
"""
