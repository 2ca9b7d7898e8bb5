"""Builds the ONNX graph of a checkpoint. Other modules here import only paths, metadata, kernels and cache scales.

Within: decoder -> kernel_layers, kinds -> selected -> grouped_query, feed_forward -> half -> layer -> matmul -> calls,
weights -> builder.
"""
