"""Which tokens of a text each head of a checkpoint attends to: figures, and a chart."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.reporting.charts import Chart
from sportsllm.errors import UsageError
from sportsllm.text.token_counts import token_pieces, visible_piece
from sportsllm.text.tokenizer import load_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from sportsllm.models.language_model import SportsLLM

MOST_TOKENS = 64
"""Most tokens of a map whose labels can still be read."""
_TOP = 3
_MOST_CELLS = 4_000_000  # of a page, about 30 MB
_CELL = 15  # pixels


def measure_attention(model: SportsLLM, directory: Path, text: str) -> tuple[dict[str, Any], list[Tensor | None]]:
    """Run a model on a text and record its attention.

    Returns:
        `text`, `tokens` (the begin token is the first), and `layers`: of each `layer` its `window`, and for each head
        means over tokens and the `top_tokens` by their mean weight; `layers_without_attention` are the others. Then
        the weights of each layer, (H, T, T), or None.

    Raises:
        UsageError: the text is empty, too long for a map or the context, or no layer has attention.
        ArtifactError: the tokenizer is missing or damaged.
    """
    from sportsllm.inference.inspection import attention_weights

    tokenizer = load_tokenizer(directory, model.config)
    ids = [tokenizer.begin_id, *tokenizer.encode(text)]
    most = min(MOST_TOKENS, model.config.max_position_embeddings)
    if len(ids) < 2 or len(ids) > most:
        raise UsageError(f"--text has {len(ids) - 1} tokens, and a map shows 1 to {most - 1}; give that many")
    read = read_tokenizer(directory / "tokenizer.json")
    tokens = [read.id_to_token(tokenizer.begin_id) or "<begin>", *token_pieces(read, text, len(ids))]
    weights = attention_weights(model, ids)
    layers = [
        {"layer": layer, "window": model.config.window(layer), "heads": _heads(one, tokens)}
        for layer, one in enumerate(weights)
        if one is not None
    ]
    if not layers:
        raise UsageError(f"--text: no layer of {directory} has attention over tokens; leave it out")
    without = [layer for layer, one in enumerate(weights) if one is None]
    return {"text": text, "tokens": tokens, "layers": layers, "layers_without_attention": without}, weights


def _heads(weights_HTT: Tensor, tokens: Sequence[str]) -> list[dict[str, Any]]:
    from sportsllm.inference.inspection import distance_tokens, entropy_bits

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
                "first_token": float(weights_TT[:, 0].mean()),
                "itself": float(weights_TT.diagonal().mean()),
                "top_tokens": [{"position": at, "token": tokens[at], "share": share} for at, share in tops],
            }
        )
    return found


def attention_chart(attention: Mapping[str, Any], weights: Sequence[Tensor | None]) -> Chart:
    """The map of one head, with a menu of all.

    Raises:
        UsageError: the page would have more cells than a browser shows.
    """
    known = [(layer, one) for layer, one in enumerate(weights) if one is not None]
    tokens = [visible_piece(token).replace(" ", "\u2423") for token in attention["tokens"]]
    heads = sum(len(one) for _, one in known)
    if heads * len(tokens) ** 2 > _MOST_CELLS:
        raise UsageError(f"--text: {heads:,} heads of {len(tokens)} tokens are too much for a page; shorten the text")
    maps = {
        f"layer {layer}, head {head}": [[round(cell, 3) if cell else None for cell in row] for row in one.tolist()]
        for layer, weights_HTT in known
        for head, one in enumerate(weights_HTT)
    }
    labels = [[html.escape(f"{row} \u2192 {column}") for column in tokens] for row in tokens]
    trace = {
        "type": "heatmap",
        "z": next(iter(maps.values())),
        "zmin": 0,
        "zmax": 1,
        # Pale up to a quarter, so that small weights are seen.
        "colorscale": [[0, "theme:panel"], [0.25, "theme:c0"], [1, "theme:ink"]],
        "colorbar": {"thickness": 12, "outlinewidth": 0, "tickformat": ".0%"},
        "xgap": 1,
        "ygap": 1,
        "text": labels,
        "hovertemplate": "%{text}: %{z:.1%}<extra></extra>",
    }
    names = {"tickvals": list(range(len(tokens))), "ticktext": [html.escape(token) for token in tokens]}
    names |= {"showgrid": False, "showline": False, "ticks": ""}
    buttons = [{"label": name, "method": "restyle", "args": [{"z": [cells]}]} for name, cells in maps.items()]
    layout = {
        "height": _CELL * len(tokens) + 200,
        "xaxis": {**names, "tickangle": -90, "title": {"text": "attends to"}},
        "yaxis": {**names, "autorange": "reversed", "title": {"text": "token"}},
        "updatemenus": [{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}],
    }
    caption = "Weights of each token (down) on the tokens before it and on itself (across). Each row adds up to 100%."
    return Chart("attention", "Attention", caption, {"data": [trace], "layout": layout})
