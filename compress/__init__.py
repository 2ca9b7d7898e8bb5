"""compress: distillation, pruning and quantization of a checkpoint directory."""
