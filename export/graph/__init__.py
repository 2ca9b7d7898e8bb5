"""Builds the ONNX graph of a checkpoint. Other modules here import only layout, kernels and cache scales.

Within: decoder -> kernel_layers, feed_forward, attention of each kind -> layer -> weights -> calls -> builder.
"""
