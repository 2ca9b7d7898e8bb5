"""Studies that developers run by hand: prediction error, cost of losses and teachers. Imports every room."""
