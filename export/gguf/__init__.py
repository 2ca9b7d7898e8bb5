"""A checkpoint as a GGUF file for llama.cpp: its matrices, tokenizer and metadata."""
