"""The parity gate: an export against its PyTorch model. Imports graph and runtime."""
