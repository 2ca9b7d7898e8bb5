"""One module per command of this package: `train`, `eval`, `generate`, `data`, `run`, `verify`."""
