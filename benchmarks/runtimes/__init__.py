"""Other inference runtimes on the same weights, in turns with ours. Imports measure.

`worker.py` runs as a file, so no file here may have the name of a package that a runtime imports.
"""
