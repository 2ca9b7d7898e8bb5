"""Training methods against each other at equal cost. Imports report's charts, tables and pages, never the reverse."""
