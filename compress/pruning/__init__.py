"""Pruning of width, depth, heads, experts and vocabulary.

`shapes` says what a size can be, `scores` what matters. `hidden`, `heads`, `experts` and `vocabulary` change what is no
choice among units. `cut` puts them together, slices and refits, `search` finds a shape.
"""
