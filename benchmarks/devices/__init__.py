"""Device files, recognising this machine, and judging limits. Imports no other room."""
