"""What `inspect` shows: the parts of a model, and attention maps."""
