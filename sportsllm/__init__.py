"""sportsllm: the language model, what it reads, how it is trained, sampled and scored."""

__version__ = "0.1.0"
