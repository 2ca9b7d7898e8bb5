"""Quantization: grids, GPTQ, channel scaling, mixed precision, quantization-aware training. Imports the fit of layers
and distillation's recovery.
"""
