"""Pruning of width, depth, heads, experts, key/value cache and vocabulary.

A cut goes through `shapes` (what is left), `scores` (what matters), `units` (what stays) and `refit`; `heads`,
`experts`, `latent` and `hidden` make what is no choice among units. `cut` puts them together in memory, `search` finds
a shape for a size, and `compress.prune` is the verb.
"""
