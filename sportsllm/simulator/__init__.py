"""A match simulator: invented clubs and players meet, and their matches become text whose facts can be checked.

`corpus` writes documents and questions; `football` and `tennis` play and tell a match; `telling` turns templates
into sentences; `world` is the fixed world. Sentences and names are TOML files beside them, for people to edit.
"""

from sportsllm.simulator.corpus import Document, simulate, write_corpus

__all__ = ["Document", "simulate", "write_corpus"]
