"""Training methods against each other at equal cost: table and plot. Imports report's charts."""
