"""Text and tokens: documents, the held-out split, tokenizer, packed batches, calibration samples. Imports
models and storage.
"""
