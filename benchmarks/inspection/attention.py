"""Attention maps of a text: which tokens each head of each layer attends to, as figures and as heat maps."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.charts import Chart, heat_map
from sportsllm.errors import UsageError
from sportsllm.text.tokenizer import load_tokenizer, read_tokenizer, token_pieces, visible_piece

if TYPE_CHECKING:
    from torch import Tensor

    from sportsllm.models.language_model import SportsLLM

MOST_TOKENS = 64
"""Of a map, whose labels are then still read."""
FIGURES = {
    "entropy_bits": ("entropy, bits", ".2f"),
    "seen_tokens": ("sees, tokens", ".1f"),
    "distance_tokens": ("distance", ".1f"),
    "first_token": ("on the first", ".0%"),
    "itself": ("on itself", ".0%"),
}
"""Figures of a head, with their header and format."""
_TOP = 3
_MOST_CELLS = 4_000_000  # of a page, about 30 MB
_GAP, _WIDTH, _WIDEST_HEAD, _CELL = 2, 900, 150, 15  # cells between heads; pixels of the grid, of a head, of a token


def measure_attention(model: SportsLLM, directory: Path, text: str) -> tuple[dict[str, Any], list[Tensor | None]]:
    """Run a model on a text and record its attention.

    Returns:
        `text`, `tokens` and `ids` (the begin token is the first), and `layers`: of each `layer` its `window` and by
        head the means over tokens of `FIGURES`, the `top_tokens` by their mean weight, and `looks_at`, the position of
        each token's largest weight; `layers_without_attention` are the others. Then the weights of each layer,
        (H, T, T), or None.

    Raises:
        UsageError: the text is empty, too long for a map or the context, or no layer has attention.
        ArtifactError: the tokenizer is missing or damaged.
    """
    from sportsllm.inference.attention_weights import attention_weights

    tokenizer = load_tokenizer(directory, model.config)
    ids = [tokenizer.begin_id, *tokenizer.encode(text)]
    most = min(MOST_TOKENS, model.config.max_position_embeddings)
    if len(ids) < 2 or len(ids) > most:
        raise UsageError(
            f"--text has {len(ids) - 1} tokens; a map shows between 1 and {most - 1}, give a text of that length"
        )
    read = read_tokenizer(directory / "tokenizer.json")
    tokens = [read.id_to_token(tokenizer.begin_id) or "<begin>", *token_pieces(read, text, len(ids))]
    weights = attention_weights(model, ids)
    layers = [
        {"layer": layer, "window": model.config.window(layer), "heads": _heads(one, tokens)}
        for layer, one in enumerate(weights)
        if one is not None
    ]
    without = [layer for layer, one in enumerate(weights) if one is None]
    if not layers:
        raise UsageError(f"--text: no layer of {directory} has attention over tokens; leave it out")
    found = {"text": text, "tokens": tokens, "ids": ids, "layers": layers, "layers_without_attention": without}
    return found, weights


def _heads(weights_HTT: Tensor, tokens: Sequence[str]) -> list[dict[str, Any]]:
    from sportsllm.inference.attention_weights import distance_tokens, entropy_bits

    entropy, distance = entropy_bits(weights_HTT), distance_tokens(weights_HTT)
    found = []
    for head, weights_TT in enumerate(weights_HTT):
        best = weights_TT.mean(dim=0).topk(min(_TOP, len(tokens)))
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.append(
            {
                "head": head,
                "entropy_bits": float(entropy[head]),
                "distance_tokens": float(distance[head]),
                "seen_tokens": float((weights_TT > 0).sum(-1).float().mean()),
                "first_token": float(weights_TT[:, 0].mean()),
                "itself": float(weights_TT.diagonal().mean()),
                "top_tokens": [{"position": at, "token": tokens[at], "share": share} for at, share in tops],
                "looks_at": weights_TT.argmax(-1).tolist(),
            }
        )
    return found


def attention_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each head: layer, head, the figures and the tokens that get most."""
    return [
        (
            str(layer["layer"]),
            str(head["head"]),
            *(format(head[key], style) for key, (_, style) in FIGURES.items()),
            ", ".join(f"{visible(top['token'])} {top['share']:.0%}" for top in head["top_tokens"]),
        )
        for layer in result["layers"]
        for head in layer["heads"]
    ]


def attention_charts(result: dict[str, Any], weights: Sequence[Tensor | None]) -> list[Chart]:
    """All heads in a grid of small maps, layers down and heads across; and the map of one head with its tokens.

    Raises:
        UsageError: the page would have more cells than a browser shows.
    """
    tokens = [visible(token) for token in result["tokens"]]
    size, step = len(tokens), len(tokens) + _GAP
    known = [(layer, one) for layer, one in enumerate(weights) if one is not None]
    heads = max(len(one) for _, one in known)
    if heads * len(known) * size**2 > _MOST_CELLS:
        fit = math.isqrt(_MOST_CELLS // (heads * len(known)))
        raise UsageError(
            f"--text: {heads * len(known):,} heads of {size} tokens are too much for a page; give a text of at most "
            f"{fit - 1} tokens"
        )
    rows: list[list[float | None]] = []
    for _, one in known:
        rows += [_grid_row(one[:, row, : row + 1].tolist(), step) for row in range(size)]
        rows += [[None] * (heads * step - _GAP)] * _GAP
    plain = {"showgrid": False, "showline": False, "ticks": ""}
    across = {"tickvals": [head * step + size / 2 for head in range(heads)], "ticktext": list(range(heads))}
    down = {"tickvals": [at * step + size / 2 for at in range(len(known))], "ticktext": [layer for layer, _ in known]}
    grid = {
        "data": [heat_map(rows[:-_GAP], "", showscale=False, hoverinfo="none")],
        "layout": {
            "height": round(len(known) * min(_WIDTH / heads, _WIDEST_HEAD)) + 70,
            "xaxis": {**plain, **across, "side": "top", "title": {"text": "head"}},
            "yaxis": {**plain, **down, "autorange": "reversed", "title": {"text": "layer"}},
            "meta": {"size": size, "step": step, "heads": heads, "layers": [layer for layer, _ in known]},
        },
    }
    labels = [[html.escape(f"{row} \u2192 {column}") for column in tokens] for row in tokens]
    names = {"tickvals": list(range(size)), "ticktext": [html.escape(token) for token in tokens], **plain}
    hover = "%{text}: %{z:.1%}<extra></extra>"
    one_head = {
        "data": [heat_map([row[:size] for row in rows[:size]], hover, text=labels, xgap=1, ygap=1)],
        "layout": {
            "height": _CELL * size + 170,
            "xaxis": {**names, "side": "top", "tickangle": -90, "title": {"text": "attends to"}},
            "yaxis": {**names, "autorange": "reversed", "title": {"text": "token"}},
        },
    }
    caption = "Weights of each token (down) on the tokens before it and on itself (across). Click a map to enlarge it."
    return [
        Chart("attention-grid", "All heads", caption, grid),
        Chart("attention-map", "One head", "Each row adds up to 100%.", one_head),
    ]


def _grid_row(weights_HL: Sequence[Sequence[float]], step: int) -> list[float | None]:
    """One token's weights in every head; a token that it cannot attend to, whose weight is exactly 0, is blank."""
    row: list[float | None] = []
    for weights in weights_HL:
        row += [*(round(weight, 3) if weight else None for weight in weights), *[None] * (step - len(weights))]
    return row[:-_GAP]


def visible(piece: str) -> str:
    """A token with its spaces marked and line breaks escaped."""
    return visible_piece(piece).replace(" ", "\u2423")
