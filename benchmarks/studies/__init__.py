"""Studies that developers run from the repository: the gauntlet and the error of predictions. Not in the wheel."""
