"""Attention maps of a text: which tokens each head of each layer looks at, as numbers and as heat maps."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.report.charts import Chart, heat_map
from benchmarks.report.text import Table
from sportsllm.console import table
from sportsllm.errors import UsageError
from sportsllm.text.token_counts import token_pieces, visible_piece
from sportsllm.text.tokenizer import load_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from sportsllm.models.language_model import SportsLLM

MOST_TOKENS = 64
"""Of a map, whose labels are then still read."""
_TOP = 3
_GAP = 2  # cells between two heads
_WIDTH, _WIDEST_HEAD, _CELL = 900, 150, 15  # pixels: of the grid, of a head in it, of a token in the large map


def measure_attention(model: SportsLLM, directory: Path, text: str) -> tuple[dict[str, Any], list[Tensor | None]]:
    """Run a model on a text and look at its attention.

    Returns:
        `tokens` and `ids` (the begin token is the first), and `layers`: of each `layer` its `kind`, `window` and
        `shape` (heads, tokens, tokens), and by head the mean `entropy_bits` of a token's weights, `distance_tokens`,
        the shares that go to the `first_token` and to the token `itself`, `top_tokens` by their mean weight, and
        `looks_at`, the position of each token's largest weight. Then the weights of each layer, (H, T, T), or None for
        one without attention, which is not among the `layers`.

    Raises:
        UsageError: the text is empty, too long for a map or the context, or not valid.
        ArtifactError: the tokenizer is missing or damaged.
    """
    from sportsllm.inference.attention_weights import attention_weights

    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("--attention is not valid UTF-8") from None
    words = load_tokenizer(directory, model.config)
    ids = [words.begin_id, *words.encode(text)]
    most = min(MOST_TOKENS, model.config.max_position_embeddings)
    if len(ids) < 2 or len(ids) > most:
        raise UsageError(
            f"--attention: the text has {len(ids) - 1} tokens; a map shows between 1 and {most - 1} beside the begin "
            "token, give a text of that length"
        )
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    begin = tokenizer.id_to_token(words.begin_id) or "<begin>"
    tokens = [begin, *token_pieces(tokenizer, text, len(ids))]
    weights = attention_weights(model, ids)
    layers = []
    for layer, weights_HTT in enumerate(weights):
        if weights_HTT is not None:
            layers.append(
                {
                    "layer": layer,
                    "kind": model.config.attention_kind,
                    "window": model.config.window(layer),
                    "shape": list(weights_HTT.shape),
                    "heads": _heads(weights_HTT, tokens),
                }
            )
    if not layers:
        raise UsageError(
            f"--attention: no layer of {directory} has attention over tokens; --draw alone shows its parts"
        )
    return {"text": text, "tokens": tokens, "ids": ids, "layers": layers}, weights


def _heads(weights_HTT: Tensor, tokens: Sequence[str]) -> list[dict[str, Any]]:
    from sportsllm.inference.attention_weights import distance_tokens, entropy_bits

    entropy, distance = entropy_bits(weights_HTT), distance_tokens(weights_HTT)
    received_HT = weights_HTT.mean(dim=1)
    best = received_HT.topk(min(_TOP, len(tokens)))
    found = []
    for head in range(len(weights_HTT)):
        tops = zip(best.indices[head].tolist(), best.values[head].tolist(), strict=True)
        found.append(
            {
                "head": head,
                "entropy_bits": float(entropy[head]),
                "distance_tokens": float(distance[head]),
                "first_token": float(received_HT[head, 0]),
                "itself": float(weights_HTT[head].diagonal().mean()),
                "top_tokens": [{"position": at, "token": tokens[at], "share": share} for at, share in tops],
                "looks_at": weights_HTT[head].argmax(-1).tolist(),
            }
        )
    return found


def attention_charts(result: dict[str, Any], weights: Sequence[Tensor | None]) -> list[Chart]:
    """All heads in a grid of small maps, layers down and heads across; and the map of one head with its tokens."""
    tokens = [visible(token) for token in result["tokens"]]
    size, step = len(tokens), len(tokens) + _GAP
    known = [(layer, one) for layer, one in enumerate(weights) if one is not None]
    heads = max(len(one) for _, one in known)
    blank: list[float | None] = [None] * (heads * step - _GAP)
    rows: list[list[float | None]] = []
    for _, one in known:
        rows += [_grid_row(one[:, row, : row + 1].tolist(), step) for row in range(size)] + [blank] * _GAP
    width = min(_WIDTH / heads, _WIDEST_HEAD)
    grid_axes = {"showgrid": False, "showline": False, "ticks": ""}
    across = {"tickvals": [head * step + size / 2 for head in range(heads)], "ticktext": list(range(heads))}
    down = {"tickvals": [place * step + size / 2 for place in range(len(known))]}
    grid = {
        "data": [heat_map(rows[:-_GAP], "", showscale=False, hoverinfo="none")],
        "layout": {
            "height": round(len(known) * width) + 70,
            "xaxis": {**grid_axes, **across, "side": "top", "title": {"text": "head"}},
            "yaxis": {
                **grid_axes,
                **down,
                **{"ticktext": [layer for layer, _ in known], "autorange": "reversed", "title": {"text": "layer"}},
            },
            "meta": {"size": size, "step": step, "heads": heads, "layers": [layer for layer, _ in known]},
        },
    }
    first = [row[:size] for row in rows[:size]]
    labels = [[html.escape(f"{row} \u2192 {column}") for column in tokens] for row in tokens]
    names = {"tickvals": list(range(size)), "ticktext": [html.escape(token) for token in tokens], **grid_axes}
    hover = "%{text}: %{z:.1%}<extra></extra>"
    one_head = {
        "data": [heat_map(first, hover, text=labels, xgap=1, ygap=1)],
        "layout": {
            "height": _CELL * size + 170,
            "xaxis": {**names, "side": "top", "tickangle": -90, "title": {"text": "looks at"}},
            "yaxis": {**names, "autorange": "reversed", "title": {"text": "token"}},
        },
    }
    caption = "Weights of each token (down) on the tokens before it and on itself (across). Click a map to enlarge it."
    return [
        Chart("attention-grid", "All heads", caption, grid),
        Chart("attention-map", "One head", "Each row adds up to 100%.", one_head),
    ]


def _grid_row(weights_HL: Sequence[Sequence[float]], step: int) -> list[float | None]:
    """One token's weights in every head; what it cannot see is left blank."""
    row: list[float | None] = []
    for weights in weights_HL:
        row += [*(round(weight, 3) for weight in weights), *[None] * (step - len(weights))]
    return row[:-_GAP]


def attention_table(result: dict[str, Any]) -> Table:
    """A row for each head."""
    headers = ("layer", "head", "entropy, bits", "distance, tokens", "on the first", "on itself", "looks most at")
    rows = []
    for layer in result["layers"]:
        for head in layer["heads"]:
            figures = (f"{head['entropy_bits']:.2f}", f"{head['distance_tokens']:.1f}")
            shares = (f"{head[key]:.0%}" for key in ("first_token", "itself"))
            rows.append([str(layer["layer"]), str(head["head"]), *figures, *shares, _tops(head["top_tokens"])])
    return Table("Heads", headers, rows, texts=(6,))


def print_attention(console: Console, result: dict[str, Any]) -> None:
    """A row for each layer, of its heads together, and the heads in the result alone."""
    rows = []
    for layer in result["layers"]:
        heads = layer["heads"]
        means = [sum(head[key] for head in heads) / len(heads) for key in ("entropy_bits", "distance_tokens")]
        shares = [sum(head[key] for head in heads) / len(heads) for key in ("first_token", "itself")]
        window = "" if layer["window"] is None else f"last {layer['window']:,}"
        figures = (f"{means[0]:.2f}", f"{means[1]:.1f}", *(f"{share:.0%}" for share in shares))
        rows.append((str(layer["layer"]), window, str(len(heads)), *figures, _tops(_together(heads))))
    headers = ("layer", "sees", "heads", "entropy bits", "distance", "on the first", "on itself", "looks most at")
    title = f"attention on {len(result['tokens'])} tokens, mean of heads (--json has every head)"
    console.print(table(headers, rows, (1, 7), title))


def _together(heads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tokens that most heads look at, with the mean of their shares over all heads."""
    found: dict[int, dict[str, Any]] = {}
    for head in heads:
        for top in head["top_tokens"]:
            one = found.setdefault(top["position"], {**top, "share": 0.0})
            one["share"] += top["share"] / len(heads)
    return sorted(found.values(), key=lambda one: -one["share"])[:_TOP]


def _tops(tops: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{visible(top['token'])} {top['share']:.0%}" for top in tops)


def visible(piece: str) -> str:
    """A token with its spaces marked and line breaks escaped."""
    return visible_piece(piece).replace(" ", "\u2423")
