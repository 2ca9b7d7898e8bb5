"""What defaults give on several teachers: the table of recipes/gauntlet.toml.

    python -m benchmarks.studies.gauntlet runs/gauntlet --out benchmarks/results/gauntlet

Every finished model is scored in PyTorch on the half of its teacher's held-out text that no choice looked at. Rows say
by how many percent bits per byte (perplexity for rounded ones) lie above the teacher's; by how many percent a student
that starts from its teacher has fewer bits per byte than a fresh one; and how many percent of INT4's damage training as
rounded takes away. What `fit` made is scored as its export, by its own bench on that half. The plot is gauntlet.html.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks.fit import RESULT
from benchmarks.reporting.charts import Chart, chart, color, log_axis, marks, render_page
from sportsllm.console import output
from sportsllm.files import atomic_write_text
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.manifest import MANIFEST, read_manifest
from sportsllm.inference.scoring import TextScore, score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.text.documents import load_corpus
from sportsllm.text.tokenizer import load_tokenizer

KINDS = ("two-thirds", "half", "narrowed", "narrowed-fresh", "int8", "int4", "int4-trained")
ROUNDED = ("int8", "int4", "int4-trained")
FIT = "fit"
RISES = (*KINDS, FIT)
GAINS = ("cut_against_fresh", "damage_gone")
_TOKENS = 65_536


def teachers(directory: Path) -> list[str]:
    """The teachers of a finished gauntlet: directories that others are named after."""
    names = sorted(path.parent.name for path in directory.glob(f"*/{MANIFEST}"))
    return [name for name in names if any(f"{name}-{kind}" in names for kind in KINDS)]


def measure(directory: Path, teacher: str) -> dict[str, TextScore]:
    """Scores of a teacher and of what was made from it, by kind; the teacher's own under ""."""
    settings = read_manifest(directory / teacher).settings
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


def fit_rise(directory: Path, teacher: str) -> float | None:
    """Percent that the bits per byte of what `fit` made lie above the teacher's; None where it is missing."""
    path = directory / f"{teacher}-{FIT}" / RESULT
    if not path.exists():
        return None
    loss = json.loads(path.read_text(encoding="utf-8"))["bench"]["quality_loss_percent"]
    return None if loss is None else float(loss)


def gains(scores: Mapping[str, TextScore]) -> dict[str, float | None]:
    """The figures of `GAINS`, where what they compare is there."""
    cut, fresh = (scores.get(kind) for kind in ("narrowed", "narrowed-fresh"))
    whole, trained = (rise(scores, kind) for kind in ("int4", "int4-trained"))
    return {
        "cut_against_fresh": 100 * (1 - cut.bits_per_byte / fresh.bits_per_byte) if cut and fresh else None,
        "damage_gone": 100 * (1 - trained / whole) if whole and trained is not None else None,
    }


def summary(rows: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """Median and worst of every column: the largest rise, the smallest gain."""
    found: dict[str, dict[str, float | None]] = {"median": {}, "worst": {}}
    for column in (*RISES, *GAINS):
        known = [value for row in rows.values() if (value := row.get(column)) is not None]
        worst = min if column in GAINS else max
        found["median"][column] = statistics.median(known) if known else None
        found["worst"][column] = worst(known) if known else None
    return found


def plot(rows: Mapping[str, Mapping[str, float | None]]) -> Chart:
    """Rises by kind, a symbol for each teacher."""
    known = [value for row in rows.values() for kind in RISES if (value := row.get(kind)) is not None and value > 0]
    traces = []
    for index, (teacher, row) in enumerate(rows.items()):
        found = {kind: value for kind in RISES if (value := row.get(kind)) is not None and value > 0}
        points = [(0.0, value, teacher) for value in found.values()]
        hover = "%{text}, %{x}: %{y:.2f}%<extra></extra>"
        traces.append({**marks(points, teacher, color(index), "circle", hover), "x": list(found)})
    caption = "Percent above the teacher: perplexity of rounded models, bits per byte of the others."
    vertical = log_axis("above the teacher, %", min(known), max(known))
    return chart("gauntlet", "What defaults give", caption, traces, {"title": "", "type": "category"}, vertical)


def main() -> None:
    """Read the finished models of a gauntlet, print the table, write it as CSV and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows: dict[str, dict[str, float | None]] = {}
    for teacher in teachers(arguments.directory):
        scores = measure(arguments.directory, teacher)
        rows[teacher] = {"bits_per_byte": scores[""].bits_per_byte, **{kind: rise(scores, kind) for kind in KINDS}}
        rows[teacher] |= {FIT: fit_rise(arguments.directory, teacher), **gains(scores)}
    columns = ["bits_per_byte", *RISES, *GAINS]
    lines = [["teacher", *columns]]
    for name, row in (rows | summary(rows)).items():
        lines.append([name, *("" if (value := row.get(key)) is None else f"{value:.4g}" for key in columns)])
    atomic_write_text(arguments.out / "gauntlet.csv", "".join(",".join(line) + "\n" for line in lines))
    figure = plot(rows)
    page = render_page("gauntlet.html", [figure], title=figure.title, caption=figure.caption, rows=lines)
    atomic_write_text(arguments.out / "gauntlet.html", page)
    csv.writer(output().file).writerows(lines)


if __name__ == "__main__":
    main()
