"""What `inspect` shows: the parts of a model, attention maps and the use of experts."""
