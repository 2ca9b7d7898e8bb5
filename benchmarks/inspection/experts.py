"""Use of experts by kind of text: the share of a text's choices that falls on each expert of each layer."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.charts import Chart, even_map
from sportsllm.errors import UsageError
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from sportsllm.models.language_model import SportsLLM

MOST_TOKENS = 65_536
"""Of each kind of text."""
_ROW = 24  # pixels
_MOST_LABELED = 16  # experts, whose shares then fit into their cells


def parse_kinds(given: Sequence[str]) -> dict[str, list[Path]]:
    """Files by the name of their kind of text: KIND=FILE, or a file whose name is the kind's.

    Raises:
        UsageError: a name or a file is empty.
    """
    found: dict[str, list[Path]] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).name.partition(".")[0], text
        if not name or not path:
            raise UsageError(f"--experts {text!r}: write KIND=FILE, for example tennis=tennis.txt")
        found.setdefault(name, []).append(Path(path))
    return found


def measure_experts(model: SportsLLM, directory: Path, kinds: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Run a mixture on texts of several kinds and count what its routers choose.

    Returns:
        `kinds`: `kind`, `files` and `tokens` that were read; `layers`: of each `layer` with experts their number
        `experts`, how many are `active` for a token, `shares` by kind, which add up to 1, and `never_used`.

    Raises:
        UsageError: the model has no experts.
        ArtifactError: a file or the tokenizer is missing or damaged, or a text is empty.
    """
    from sportsllm.inference.expert_use import count_choices, mixtures

    found, tokenizer = mixtures(model), load_tokenizer(directory, model.config)
    counts, read = {}, []
    for kind, files in kinds.items():
        counts[kind], tokens = count_choices(model, tokenizer, read_documents(files), MOST_TOKENS, kind)
        read.append({"kind": kind, "files": [str(path) for path in files], "tokens": tokens})
    layers = []
    for layer, mixture in found.items():
        used = [counts[kind][layer].tolist() for kind in kinds]
        layers.append(
            {
                "layer": layer,
                "experts": mixture.config.chosen_experts.count,
                "active": mixture.config.chosen_experts.active,
                "shares": {kind: (counts[kind][layer] / counts[kind][layer].sum()).tolist() for kind in kinds},
                "never_used": [expert for expert, each in enumerate(zip(*used, strict=True)) if not any(each)],
            }
        )
    return {"kinds": read, "layers": layers}


def expert_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """For each layer and kind of text the most and the least used expert."""
    rows: list[tuple[str, ...]] = []
    for layer in result["layers"]:
        for one in result["kinds"]:
            shares = layer["shares"][one["kind"]]
            most, least = (pick(range(len(shares)), key=shares.__getitem__) for pick in (max, min))
            ends = (f"{most} ({shares[most]:.1%})", f"{least} ({shares[least]:.1%})")
            rows.append((str(layer["layer"]), one["kind"], f"{one['tokens']:,}", f"{1 / len(shares):.1%}", *ends))
    return rows


def expert_chart(result: Mapping[str, Any]) -> Chart:
    """A row for each kind of text and layer, a column for each expert."""
    most = max(layer["experts"] for layer in result["layers"])
    relative: list[list[float | None]] = []
    shares: list[list[str]] = []
    labels: dict[int, str] = {}
    for layer in result["layers"]:
        for one in result["kinds"]:
            own, rest = layer["shares"][one["kind"]], most - layer["experts"]
            labels[len(relative)] = f"layer {layer['layer']}, {html.escape(one['kind'])}"
            relative.append([*(round(share * layer["experts"], 3) for share in own), *[None] * rest])
            shares.append([*(f"{share:.1%}" for share in own), *[""] * rest])
        relative.append([None] * most)
        shares.append([""] * most)
    shown = {"texttemplate": "%{text}"} if most <= _MOST_LABELED else {}
    hover = "%{hovertext}, expert %{x}: %{text}<extra></extra>"
    named = [[labels.get(at, "")] * most for at in range(len(shares) - 1)]
    trace = even_map(relative[:-1], hover, text=shares[:-1], hovertext=named, xgap=1, ygap=1, **shown)
    rows = {"tickvals": list(labels), "ticktext": list(labels.values()), "autorange": "reversed", "showgrid": False}
    columns = {"title": {"text": "expert"}, "side": "top", "showgrid": False, "tickformat": "d", "dtick": 1}
    layout = {"height": _ROW * len(relative) + 80, "xaxis": columns, "yaxis": rows}
    even = ", ".join(sorted({f"{1 / layer['experts']:.1%}" for layer in result["layers"]}))
    caption = f"Shares of a text's choices in a layer, which add up to 100%; colors are multiples of an even {even}."
    return Chart("experts", "Experts' use by kind of text", caption, {"data": [trace], "layout": layout})
