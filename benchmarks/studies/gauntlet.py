"""What the defaults reach on several teachers: the table of recipes/gauntlet.toml.

    python -m benchmarks.studies.gauntlet runs/gauntlet --out benchmarks/results/gauntlet

Every finished model is scored in PyTorch on the report split of its teacher's held-out text. Rows say by how many
percent bits per byte (perplexity for rounded models) lie above the teacher's; by how many percent a student that starts
from its teacher has fewer bits per byte than a fresh one; and how many percent of INT4's damage training as rounded
takes away. What `fit` made is scored as its export, by its own bench on that split.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks.labels import csv_text
from benchmarks.reporting.fits import read_fit
from sportsllm.console import output
from sportsllm.files import atomic_write_text
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.manifest import MANIFEST, read_manifest
from sportsllm.inference.scoring import TextScore, score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer

KINDS = ("two-thirds", "half", "narrowed", "narrowed-fresh", "int8", "int4", "int4-trained")
ROUNDED = ("int8", "int4", "int4-trained")
GAINS = ("cut_against_fresh", "damage_gone")
COLUMNS = ("bits_per_byte", *KINDS, "fit", *GAINS)
_TOKENS = 65_536

Row = dict[str, float | None]


def measure(directory: Path, teacher: str) -> dict[str, TextScore]:
    """Scores of a teacher and of what was made from it, by kind; the teacher's own under ""."""
    settings = read_manifest(directory / teacher).settings
    corpus, valid = ([Path(name) for name in settings[key]] for key in ("corpus", "valid"))
    split = load_corpus(corpus, valid, checkpoints=[directory / teacher])
    found: dict[str, TextScore] = {}
    for kind in ("", *KINDS):
        path = directory / (f"{teacher}-{kind}" if kind else teacher)
        if (path / MANIFEST).exists():
            model = load_checkpoint(path)
            tokenizer = load_tokenizer(path, model.config)
            found[kind] = score_documents(TorchDecoder(model), tokenizer, split.parts()[1], max_tokens=_TOKENS)
    return found


def rise(scores: Mapping[str, TextScore], kind: str) -> float | None:
    """Percent above the teacher: of perplexity for rounded models, else of bits per byte; None if it is missing."""
    if kind not in scores:
        return None
    whole, made = scores[""], scores[kind]
    if kind in ROUNDED:
        return 100 * math.expm1(made.nats / made.tokens - whole.nats / whole.tokens)
    return 100 * (made.bits_per_byte / whole.bits_per_byte - 1)


def row(scores: Mapping[str, TextScore], fit: Path) -> Row:
    """A teacher's figures by `COLUMNS`, None if what they compare is missing; `fit` is the directory of its search."""
    found: Row = {"bits_per_byte": scores[""].bits_per_byte, **{kind: rise(scores, kind) for kind in KINDS}}
    cut, fresh = scores.get("narrowed"), scores.get("narrowed-fresh")
    whole, trained = found["int4"], found["int4-trained"]
    found["fit"] = read_fit(fit).bench.quality_loss_percent if fit.exists() else None
    found["cut_against_fresh"] = 100 * (1 - cut.bits_per_byte / fresh.bits_per_byte) if cut and fresh else None
    found["damage_gone"] = 100 * (1 - trained / whole) if whole and trained is not None else None
    return found


def summary(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Median and worst of every column: the largest rise, the smallest gain."""
    found: dict[str, Row] = {"median": {}, "worst": {}}
    for column in COLUMNS[1:]:
        known = [value for each in rows.values() if (value := each.get(column)) is not None]
        found["median"][column] = statistics.median(known) if known else None
        found["worst"][column] = (min if column in GAINS else max)(known) if known else None
    return found


def main() -> None:
    """Read the finished models of a gauntlet, print the table and write it as CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    names = sorted(path.parent.name for path in given.directory.glob(f"*/{MANIFEST}"))
    teachers = [name for name in names if any(f"{name}-{kind}" in names for kind in KINDS)]
    rows = {name: row(measure(given.directory, name), given.directory / f"{name}-fit") for name in teachers}
    lines = [
        {"teacher": name} | {column: f"{value:.4g}" for column, value in each.items() if value is not None}
        for name, each in (rows | summary(rows)).items()
    ]
    table = csv_text(("teacher", *COLUMNS), lines)
    atomic_write_text(given.out / "gauntlet.csv", table)
    output().file.write(table)


if __name__ == "__main__":
    main()
