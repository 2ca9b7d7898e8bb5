"""What lies on disk: artifact directories, manifests, checkpoints, packed weights. Imports models and text."""
