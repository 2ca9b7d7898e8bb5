"""The same measurements of other runtimes, in turns with ours. Imports measure."""
