"""Studies that developers run from the repository; not in the wheel."""
