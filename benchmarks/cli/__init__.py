"""Commands of this package with more flags than fit into `benchmarks.commands`: `plan`."""
