"""Quantization: grids, rounding, GPTQ, channel scaling, mixed precision, quantization-aware training."""
