"""Studies that developers run from the repository: the gauntlet, the error of predictions, and the chart of quality
against bytes and speed. Not in the wheel."""
