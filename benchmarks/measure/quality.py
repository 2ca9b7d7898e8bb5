"""Quality of a directory on held-out text, for the budget's quality limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.evaluate import score_documents
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import load_tokenizer


def bits_per_byte(directory: Path, text: Sequence[Path], threads: int | None = None) -> float:
    """Bits per byte of `directory` on the documents of `text`, as `eval` computes it.

    Raises:
        ArtifactError: the directory or a file is missing or damaged, or there is no text.
    """
    decoder = open_decoder(directory, threads)
    tokenizer = load_tokenizer(directory, decoder.config)
    documents = list(read_documents(text))
    return score_documents(decoder, tokenizer, documents, description=f"score {directory.name}").bits_per_byte
