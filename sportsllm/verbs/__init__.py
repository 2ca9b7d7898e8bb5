"""One module per command of this package: `train`, `eval`, `generate`, `serve`, `data`, `run`, `verify`."""
