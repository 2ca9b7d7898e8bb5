"""The training loop and what it needs: optimizers, schedules, chunked losses, LoRA, pretraining. Imports
every room but cli.
"""
