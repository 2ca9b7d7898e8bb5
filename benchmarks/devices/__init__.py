"""Device files: their schema, reading and writing them, recognising a machine, judging limits."""
