"""benchmarks: measuring what export wrote, and the device budgets it is held to."""
