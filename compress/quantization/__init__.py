"""Quantization: grids, GPTQ, channel scaling, mixed precision, quantization-aware training. Imports pruning's refit and
distillation's recovery.
"""
