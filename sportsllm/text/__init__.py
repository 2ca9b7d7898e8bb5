"""Text and tokens: documents, the held-out split, tokenizer, packed batches. Imports models and formats."""
