"""What `inspect` shows: the parts of a model, attention maps, the use of experts, the tensors of a run."""
