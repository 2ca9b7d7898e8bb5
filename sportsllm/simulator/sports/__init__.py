"""One module a sport, each with `play(rng)`, which returns the text of one contest and its facts.

Imports run from a sport to `report` (the parts of a document), to `fixture` (who meets whom) and to the folder above.
"""
