"""Quality against bytes and against decode speed: formats of one model, ours beside others, as a table and a chart.

    python -m benchmarks.studies.quality_chart MODEL --text HELD-OUT --calibration TEXT --work DIR \
        --out benchmarks/results/quality/NAME.csv [--llama-cpp bench=PATH/llama-bench,fa=1] \
        [--peer llama.cpp+Q4_K_M=FILE.gguf,bench=PATH/llama-bench,fa=1 --peer openvino+INT4=DIR ...]
    python -m benchmarks.studies.quality_chart --out benchmarks/results/quality/NAME.csv

The first makes every format of `ONNX` and `GGUF` (kept in DIR), scores each as `eval --against MODEL` does, and times
all in turns on two threads as `bench --against` does. Models of other programs, `--peer`, and our GGUF files, in
llama.cpp, are scored and timed by the runtime itself. Peers are written as in `--against`, labelled by their format.
Rows of the same tool and format are replaced, others kept, so that a row may come from anywhere. Both draw NAME.svg
beside the table, the second from what is there.
"""

from __future__ import annotations

import argparse
import html
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.labels import csv_text, read_csv
from benchmarks.measure.bench import round_checks
from benchmarks.measure.machine import choose_cpus, machine
from benchmarks.reporting.charts import COLORS, Plot
from benchmarks.reporting.plots import log_axis
from benchmarks.runtimes.compare import Runtime, measure_against, parse_runtimes, turn_depths
from benchmarks.runtimes.logits import READERS, RuntimeLogits
from benchmarks.runtimes.worker import OTHER, OURS
from sportsllm.commands import load_command
from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.files import atomic_write_text
from sportsllm.formats.manifest import directory_bytes
from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.divergence import LogitSource, compare_documents
from sportsllm.models.config import ModelConfig
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import load_tokenizer

TOOL, THREADS, MOST_CONTEXT = "sportsllm-compress", 2, 2_048
ONNX: dict[str, dict[str, Any]] = {
    **{"INT8": {"bits": 8}, "INT4": {"bits": 4}},
    **{"INT4 uniform": {"settings": {"uniform": True}}, "INT4/8": {"settings": {"bits_per_weight": 5.5}}},
}
"""Settings of `quantize`."""
GGUF = ("q4_0", "iq4_xs", "q4_k_m", "q8_0")
TITLES = {"genai": "onnxruntime-genai", "openvino": "OpenVINO"}
COLUMNS = ("tool", "format", "file_bytes", "kl", "kl_error", "perplexity", "tokens_per_s", "depth", "machine", "date")
PANELS = {"file_bytes": ("file, MB", 1e6), "tokens_per_s": (f"tokens per second, {THREADS} threads", 1)}
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 890, 300, 60, 60, 90  # of all panels, in pixels

Row = Mapping[str, str]
"""A line of the table by `COLUMNS`. KL is from the unquantized model in nats a token; a speed may be missing."""


class Made(NamedTuple):
    """A finished export, GGUF file or directory of another program, and what runs it."""

    tool: str
    format: str
    runtime: Runtime

    @property
    def file_bytes(self) -> int:
        """Of the weight files."""
        if (path := self.runtime.directory).is_file():
            return path.stat().st_size
        return directory_bytes(path) or sum(each.stat().st_size for each in path.glob("openvino_model.*"))


def make(model: Path, calibration: Sequence[Path], work: Path, llama_cpp: str) -> list[Made]:
    """Every format of ours; what `work` holds already is kept. GGUF files run in llama.cpp with its options."""
    quantize, export, text = load_command("quantize"), load_command("export"), list(calibration) or None
    made = []
    for name, settings in ONNX.items():
        packed, out = (work / f"{re.sub(r'[ /]', '-', name.lower())}{part}" for part in ("-packed", "-onnx"))
        quantize(model, out=packed, calibration=text, threads=THREADS, **settings)
        export(packed, out=out, threads=THREADS)
        made.append(Made(TOOL, name, Runtime(OTHER, sys.executable, out)))
    for dtype in GGUF:
        export(model, out=work / dtype, format="gguf", dtype=dtype, calibration=text, threads=THREADS)
        own = peers([f"llama.cpp+{dtype.upper()}={work / dtype / 'model.gguf'}{llama_cpp and f',{llama_cpp}'}"])
        made += [each._replace(tool=TOOL) for each in own]
    return made


def peers(texts: Sequence[str] | None) -> list[Made]:
    """Models of other programs, each with its format as label."""
    found = parse_runtimes(texts, Path())
    if wrong := [one.name for one in found if one.kind not in (*READERS, OTHER) or "+" not in one.name]:
        raise UsageError(f"peer {wrong[0]}: write RUNTIME+FORMAT=PATH with one of {', '.join(READERS)}")
    return [Made(TITLES.get(one.kind, one.kind), one.name.partition("+")[2], one) for one in found]


def measure(model: Path, made: Sequence[Made], text: Sequence[Path], rounds: int) -> list[Row]:
    """A row for each, with the speeds measured in turns if there are `rounds`."""
    base, here, rows = open_decoder(model, THREADS), machine(), list[Row]()
    longest = min(base.config.max_position_embeddings, MOST_CONTEXT)
    base.config = config = base.config.with_changes(max_position_embeddings=longest)
    tokenizer, documents = load_tokenizer(model, config), list(read_documents(text))
    depth = turn_depths(longest)[-1]
    rates = speeds(made, config, rounds, str(depth)) if rounds else [None] * len(made)
    for each, rate in zip(made, rates, strict=True):
        own: LogitSource = (
            open_decoder(each.runtime.directory, THREADS)
            if each.runtime.kind == OTHER
            else RuntimeLogits(each.runtime.kind, each.runtime.directory, config, THREADS)
        )
        score, found = compare_documents(own, base, tokenizer, tokenizer, documents)
        log(f"{each.tool} {each.format}: {found}")
        quality = (f"{value:.6g}" for value in (found.kl, found.kl_error, score.perplexity))
        speed = "" if rate is None else f"{rate:.4g}"
        line = (each.tool, each.format, str(each.file_bytes), *quality, speed, str(depth), here["processor"])
        rows.append(dict(zip(COLUMNS, (*line, here["measured_at"][:10]), strict=True)))
    return rows


def speeds(made: Sequence[Made], config: ModelConfig, rounds: int, depth: str) -> list[float | None]:
    """Greedy tokens per second of each at a depth, None if it failed."""
    first = next(place for place, each in enumerate(made) if each.runtime.kind == OTHER)
    names = [f"{each.runtime.kind}+{place}" for place, each in enumerate(made)]
    runtimes = [replace(each.runtime, name=name) for name, each in zip(names, made, strict=True)]
    names[first] = OURS
    settings = {"threads": THREADS, "cpus": choose_cpus(THREADS)}
    others = runtimes[:first] + runtimes[first + 1 :]
    checks = round_checks(rounds, None)
    found = measure_against(made[first].runtime.directory, config, others, settings, checks)["against"]
    for each, name in zip(made, names, strict=True):
        if found[name]["status"] != "measured":
            log(f"{each.tool} {each.format}: {found[name]['status']}")
    return [found[name].get("generated_tokens_per_s", {}).get(depth) for name in names]


def draw(rows: Sequence[Row], name: str) -> str:
    """Two panels as SVG: KL over megabytes and over tokens per second; a tool has a color, a point its format."""
    tools = dict(zip(dict.fromkeys(row["tool"] for row in rows), cycle(COLORS), strict=False))
    width, height = _LEFT + _WIDTH + 60, _TOP + _HEIGHT + 70
    shown = [figure for figure in PANELS if any(row[figure] for row in rows)]
    wide = (_WIDTH - _GAP * (len(shown) - 1)) / len(shown)
    title = f"{name}: KL from the unquantized model, nats per token; lower is better"
    parts = [
        f'<svg class="drawing quality" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
        "<style>.quality { color: #222 } @media (prefers-color-scheme: dark) { .quality { color: #ddd } }</style>",
        _text(_LEFT, 20, title),
    ]
    for place, (tool, color) in enumerate(tools.items()):
        x = _LEFT + 190 * place
        parts += [f'<circle cx="{x + 5}" cy="36" r="5" fill="{color}"/>', _text(x + 16, 40, tool)]
    known = [row for row in rows if float(row["kl"]) > 0]
    losses = [float(row["kl"]) for row in known] or [1.0]
    up = log_axis("", min(losses), max(losses))
    for place, figure in enumerate(shown):
        title, scale = PANELS[figure]
        points = [(float(row[figure]) / scale, row) for row in known if row[figure]]
        parts += _panel(_LEFT + place * (wide + _GAP), wide, title, up, points, tools) if points else []
    where = "; ".join(dict.fromkeys(f"{row['machine']}, {row['date']}" for row in rows))
    return "\n".join([*parts, _text(_LEFT, height - 10, where), "</svg>"]) + "\n"


def _panel(
    left: float, wide: float, title: str, up: Plot, points: Sequence[tuple[float, Row]], tools: Mapping[str, str]
) -> list[str]:
    values, bottom = [value for value, _ in points], _TOP + _HEIGHT
    across = log_axis(title, min(values), max(values))
    parts = [_text(left + wide / 2, bottom + 36, across["title"], "middle")]
    for tick, text in zip(across["tickvals"], across["ticktext"], strict=True):
        if 0 <= (x := _share(tick, across)) <= 1:
            parts.append(f'<path d="M{left + x * wide:.1f} {bottom}v-{_HEIGHT}" {_LINE}/>')
            parts.append(_text(left + x * wide, bottom + 16, text, "middle"))
    for tick, text in zip(up["tickvals"], up["ticktext"], strict=True):
        if 0 <= (y := _share(tick, up)) <= 1:
            parts.append(f'<path d="M{left} {bottom - y * _HEIGHT:.1f}h{wide}" {_LINE}/>')
            parts.append(_text(left - 6, bottom - y * _HEIGHT + 4, text, "end"))
    dots = [
        (left + wide * _share(value, across), bottom - _HEIGHT * _share(float(row["kl"]), up)) for value, row in points
    ]
    taken = [(x - 5, y + 4, 10.0) for x, y in dots]  # left end, base line and width of what a label must not cover
    for (x, y), (_, row) in zip(dots, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{tools[row["tool"]]}"/>')
        width, label = 7.0 * len(row["format"]), (x, y, 0.0)
        for right, down in _LABEL_PLACES:
            label = (x + (8 if right else -8 - width), y + 4 + down, width)
            if not any(_covers(label, other) for other in taken):
                break
        taken.append(label)
        parts.append(_text(*label[:2], row["format"]))
    return parts


_LINE = 'stroke="currentColor" stroke-opacity="0.15"'
_LABEL_PLACES = [(right, down) for down in (0, -9, 9, -18, 18, -27, 27) for right in (True, False)]
"""Beside a point: to its right or its left, and how many pixels lower."""


def _covers(first: tuple[float, float, float], second: tuple[float, float, float]) -> bool:
    apart = first[0] >= second[0] + second[2] or second[0] >= first[0] + first[2]
    return not apart and abs(first[1] - second[1]) < 11


def _share(value: float, axis: Plot) -> float:
    low, high = axis["range"]
    return float((math.log10(value) - low) / (high - low))


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def main() -> None:
    """Measure if a model is given, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, required=True, help="The table, NAME.csv.")
    parser.add_argument("--text", type=Path, action="append", help="Held-out text.")
    parser.add_argument("--calibration", type=Path, action="append", default=[])
    parser.add_argument("--work", type=Path, help="Directory of the formats that are made.")
    parser.add_argument("--llama-cpp", default="", metavar="KEY=VALUE,...", help="Options for our GGUF files.")
    parser.add_argument("--peer", action="append", metavar="RUNTIME+FORMAT=PATH,...", help="Another's model.")
    parser.add_argument("--rounds", type=int, default=5, help="Of the timing; 0 leaves the speeds out.")
    given = parser.parse_args()
    rows: list[Row] = [*read_csv(given.out)]
    if given.model is not None:
        if not given.text or given.work is None:
            parser.error("a model needs --text and --work")
        try:
            others = peers(given.peer)
        except UsageError as error:
            parser.error(str(error))
        made = make(given.model, given.calibration, given.work, given.llama_cpp) + others
        rows += measure(given.model, made, given.text, given.rounds)
    latest = {(row["tool"], row["format"]): row for row in rows}
    rows = sorted(latest.values(), key=lambda row: float(row["file_bytes"]))
    atomic_write_text(given.out, csv_text(COLUMNS, rows))
    atomic_write_text(given.out.with_suffix(".svg"), draw(rows, given.out.stem))


if __name__ == "__main__":
    main()
