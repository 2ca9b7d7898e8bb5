"""GGUF files (llama.cpp's format) as ordinary checkpoints. Imports models, formats and text.
The package `gguf` reads the file and its number formats; the files here give it Hugging Face's names and meaning.
"""
