"""A match simulator: invented clubs play, and their matches become text whose facts can be checked."""

from sportsllm.simulator.asking import questions
from sportsllm.simulator.corpus import simulate, write_corpus
from sportsllm.simulator.records import Document, Question

__all__ = ["Document", "Question", "questions", "simulate", "write_corpus"]
