"""Attention maps of a text: which tokens each head of each layer looks at, as numbers and as heat maps."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.report.charts import Chart, heat_map
from benchmarks.report.text import Table
from sportsllm.console import table
from sportsllm.errors import UsageError
from sportsllm.text.tokenizer import load_tokenizer, read_tokenizer, token_pieces, visible_piece

if TYPE_CHECKING:
    from torch import Tensor

    from sportsllm.models.language_model import SportsLLM

MOST_TOKENS = 64
"""Of a map, whose labels are then still read."""
_TOP = 3
_MOST_CELLS = 4_000_000  # of a page, about 30 MB
_GAP = 2  # cells between two heads
_WIDTH, _WIDEST_HEAD, _CELL = 900, 150, 15  # pixels: of the grid, of a head in it, of a token in the large map


def measure_attention(model: SportsLLM, directory: Path, text: str) -> tuple[dict[str, Any], list[Tensor | None]]:
    """Run a model on a text and look at its attention.

    Returns:
        `tokens` and `ids` (the begin token is the first), and `layers`: of each `layer` its `window` and `shape`
        (heads, tokens, tokens), the `top_tokens` by their mean weight, and by head the means over tokens of
        `entropy_bits`, `distance_tokens`, `seen_tokens` (those with a weight above 0) and of the weights of the
        `first_token` and of the token `itself`; `top_tokens`; and `looks_at`, the position of each token's largest
        weight; and `layers_without_attention` over all tokens, which are not among the `layers`. Then the weights of
        each layer, (H, T, T), or None for one of these.

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
                    "window": model.config.window(layer),
                    "shape": list(weights_HTT.shape),
                    "top_tokens": _top_tokens(weights_HTT.mean(dim=(0, 1)), tokens),
                    "heads": _heads(weights_HTT, tokens),
                }
            )
    if not layers:
        raise UsageError(
            f"--attention: no layer of {directory} has attention over tokens; --draw alone shows its parts"
        )
    without = [layer for layer, one in enumerate(weights) if one is None]
    found = {"text": text, "tokens": tokens, "ids": ids, "layers": layers, "layers_without_attention": without}
    return found, weights


def _heads(weights_HTT: Tensor, tokens: Sequence[str]) -> list[dict[str, Any]]:
    from sportsllm.inference.attention_weights import distance_tokens, entropy_bits

    entropy, distance = entropy_bits(weights_HTT), distance_tokens(weights_HTT)
    return [
        {
            "head": head,
            "entropy_bits": float(entropy[head]),
            "distance_tokens": float(distance[head]),
            "seen_tokens": float((weights_TT > 0).sum(-1).float().mean()),
            "first_token": float(weights_TT[:, 0].mean()),
            "itself": float(weights_TT.diagonal().mean()),
            "top_tokens": _top_tokens(weights_TT.mean(dim=0), tokens),
            "looks_at": weights_TT.argmax(-1).tolist(),
        }
        for head, weights_TT in enumerate(weights_HTT)
    ]


def _top_tokens(received_T: Tensor, tokens: Sequence[str]) -> list[dict[str, Any]]:
    best = received_T.topk(min(_TOP, len(tokens)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"position": place, "token": tokens[place], "share": share} for place, share in pairs]


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
            f"--attention: {heads * len(known):,} heads of {size} tokens are too much for a page; give a text of at "
            f"most {fit - 1} tokens, or --json without --draw"
        )
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
    """One token's weights in every head; what it cannot see, whose weight is exactly 0, is left blank."""
    row: list[float | None] = []
    for weights in weights_HL:
        row += [*(round(weight, 3) if weight else None for weight in weights), *[None] * (step - len(weights))]
    return row[:-_GAP]


def attention_table(result: dict[str, Any]) -> Table:
    """A row for each head."""
    rows = [
        [str(layer["layer"]), str(head["head"]), *_cells([head]), _tops(head["top_tokens"])]
        for layer in result["layers"]
        for head in layer["heads"]
    ]
    return Table("Heads", ("layer", "head", *_HEADERS), rows, texts=(2 + len(_HEADERS) - 1,))


def print_attention(console: Console, result: dict[str, Any]) -> None:
    """A row for each layer, the mean of its heads; each head is in the result alone."""
    rows = [
        (str(layer["layer"]), str(len(layer["heads"])), *_cells(layer["heads"]), _tops(layer["top_tokens"]))
        for layer in result["layers"]
    ]
    title = f"attention on {len(result['tokens'])} tokens, mean of heads (--json has every head)"
    console.print(table(("layer", "heads", *_HEADERS), rows, (2 + len(_HEADERS) - 1,), title))
    line = without_line(result)
    if line is not None:
        console.print(line, markup=False)


def without_line(result: dict[str, Any]) -> str | None:
    """The layers that have no map, in a line; None where all have one."""
    layers = ", ".join(map(str, result["layers_without_attention"]))
    return f"layers without attention over all tokens: {layers}" if layers else None


_HEADERS = ("entropy, bits", "sees, tokens", "distance", "on the first", "on itself", "looks most at")


def _cells(heads: Sequence[dict[str, Any]]) -> list[str]:
    """The mean figures of some heads under `_HEADERS`, without the tokens."""
    styles = {
        "entropy_bits": ".2f",
        "seen_tokens": ".1f",
        "distance_tokens": ".1f",
        "first_token": ".0%",
        "itself": ".0%",
    }
    return [format(sum(head[key] for head in heads) / len(heads), style) for key, style in styles.items()]


def _tops(tops: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{visible(top['token'])} {top['share']:.0%}" for top in tops)


def visible(piece: str) -> str:
    """A token with its spaces marked and line breaks escaped."""
    return visible_piece(piece).replace(" ", "\u2423")
