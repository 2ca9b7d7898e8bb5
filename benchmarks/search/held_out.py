"""Two parts of the text that is never trained on: a search chooses by one, its result is reported on the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.search.stages import Source
from sportsllm.files import atomic_write_text
from sportsllm.text.documents import load_corpus


class HeldOut(NamedTuple):
    """Files of documents."""

    choosing: Path
    reporting: Path


def held_out_text(source: Source, directory: Path) -> HeldOut:
    """Write the parts of `source.valid`, or of what every training from the corpus holds out by hash.

    Raises:
        ArtifactError: the corpus is empty or a single document.
    """
    from sportsllm.text.provenance import held_out_files

    choosing, reporting = load_corpus(source.corpus, source.valid, held_out_files(source.teacher)).parts()
    return HeldOut(_write(directory / "choosing.jsonl", choosing), _write(directory / "reporting.jsonl", reporting))


def _write(path: Path, documents: Sequence[str]) -> Path:
    atomic_write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path
