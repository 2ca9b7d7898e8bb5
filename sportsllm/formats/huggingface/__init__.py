"""config.json of Hugging Face's families: which of them are known, and how their fields become ours and back."""
