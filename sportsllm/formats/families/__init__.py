"""Families of models on the Hugging Face hub: what the config.json of each has beyond LLaMA's, one record a family."""
