"""A model's speed and memory on this machine, each figure in a fresh process. Imports devices."""
