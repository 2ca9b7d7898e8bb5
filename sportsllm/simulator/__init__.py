"""A match simulator: invented clubs play, and their matches become text whose facts can be checked.

`corpus` writes documents and `asking` asks about them; `sports/` has one module a sport; the sentences are in
`templates/` and the names in `words/`, for people to edit. Imports run from corpus to table and sports, to scene, to
world, to vocabulary and grammar.
"""

from sportsllm.simulator.asking import questions
from sportsllm.simulator.corpus import simulate, write_corpus
from sportsllm.simulator.records import Document, Question

__all__ = ["Document", "Question", "questions", "simulate", "write_corpus"]
