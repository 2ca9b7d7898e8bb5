"""The training loop and what it needs: settings, optimizers, chunked losses, LoRA, several processes. Imports models,
formats, text and inference.
"""
