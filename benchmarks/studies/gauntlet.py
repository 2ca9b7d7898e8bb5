"""What defaults give on several teachers: the table of recipes/gauntlet.toml.

    python -m benchmarks.studies.gauntlet runs/gauntlet --out benchmarks/results/gauntlet

Every finished model is scored in PyTorch on the half of its teacher's held-out text that no choice looked at. Rows say
by how many percent bits per byte (perplexity for rounded ones) lie above the teacher's.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Mapping
from pathlib import Path

from sportsllm.console import output
from sportsllm.files import atomic_write_text
from sportsllm.inference.evaluate import TextScore, score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.storage.artifact import MANIFEST, read_manifest
from sportsllm.storage.checkpoint import load_checkpoint
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer

KINDS = ("two-thirds", "half", "narrowed", "narrowed-fresh", "int8", "int4", "int4-trained")
ROUNDED = ("int8", "int4", "int4-trained")
_TOKENS = 65_536


def teachers(directory: Path) -> list[str]:
    """The teachers of a finished gauntlet: directories that others are named after."""
    names = sorted(path.parent.name for path in directory.glob(f"*/{MANIFEST}"))
    return [name for name in names if any(f"{name}-{kind}" in names for kind in KINDS)]


def measure(directory: Path, teacher: str) -> dict[str, TextScore]:
    """Scores of a teacher and of what was made from it, by kind; the teacher's own under ""."""
    settings = read_manifest(directory / teacher)["settings"]
    split = load_corpus(*([Path(name) for name in settings[key]] for key in ("corpus", "valid")))
    found: dict[str, TextScore] = {}
    for kind in ("", *KINDS):
        path = directory / (f"{teacher}-{kind}" if kind else teacher)
        if not (path / MANIFEST).exists():
            continue
        model = load_checkpoint(path)
        words = load_tokenizer(path, model.config)
        found[kind] = score_documents(TorchDecoder(model), words, split.parts()[1], max_tokens=_TOKENS)
    return found


def rise(scores: Mapping[str, TextScore], kind: str) -> float | None:
    """Percent above the teacher: of perplexity for rounded models, else of bits per byte; None where it is missing."""
    if kind not in scores:
        return None
    whole, made = scores[""], scores[kind]
    if kind in ROUNDED:
        return 100 * math.expm1(made.nats / made.tokens - whole.nats / whole.tokens)
    return 100 * (made.bits_per_byte / whole.bits_per_byte - 1)


def main() -> None:
    """Read the finished models of a gauntlet, print the table and write it as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows: dict[str, dict[str, float | None]] = {}
    for teacher in teachers(arguments.directory):
        scores = measure(arguments.directory, teacher)
        rows[teacher] = {kind: rise(scores, kind) for kind in KINDS}
        rows[teacher]["bits_per_byte"] = scores[""].bits_per_byte
    columns = ["bits_per_byte", *KINDS]
    known = {kind: [value for row in rows.values() if (value := row[kind]) is not None] for kind in KINDS}
    rows["median"] = {kind: statistics.median(values) if values else None for kind, values in known.items()}
    rows["worst"] = {kind: max(values, default=None) for kind, values in known.items()}
    lines = [["teacher", *columns]]
    for name, row in rows.items():
        lines.append([name, *("" if (value := row.get(key)) is None else f"{value:.4g}" for key in columns)])
    atomic_write_text(arguments.out / "gauntlet.csv", "".join(",".join(line) + "\n" for line in lines))
    writer = csv.writer(output().file)
    writer.writerows(lines)


if __name__ == "__main__":
    main()
