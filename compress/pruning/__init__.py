"""Pruning of width, depth, key/value heads and vocabulary: scores, shapes, slicing, refit. Imports
distillation through recovery.
"""
