"""Pruning of width, depth, key/value heads and vocabulary.

A cut goes through `shapes` (what is left), `scores` and `output_selection` (what matters), `kept_units` (what stays),
`slicing` and `refit`; `run` and `vocabulary_run` make a checkpoint, `search` tries shapes, `plan` starts from flags.
Imports `compress.distillation` for the recovery after the cut.
"""
