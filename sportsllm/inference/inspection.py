"""Which tokens each head of a model attends to, and how far away they are.

Weights are made again from what the model itself hands to `scaled_dot_product_attention`, through which every kind of
attention goes: keys of a group, latent ones, windows and scales are in its arguments. A run without this costs nothing.
Shape suffixes: B sequences, T tokens, L tokens that can be seen, H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sportsllm.models.language_model import SportsLLM, first_positions


def softmax_weights(
    q_BHTE: Tensor,
    k_BKLE: Tensor,
    v_BKLE: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k^T * scale + mask), (B, H, T, L) float32, by the arguments of `scaled_dot_product_attention`."""
    scale = q_BHTE.shape[-1] ** -0.5 if scale is None else scale
    if enable_gqa:
        k_BKLE = k_BKLE.repeat_interleave(q_BHTE.shape[1] // k_BKLE.shape[1], dim=1)
    scores_BHTL = (q_BHTE.float() * scale) @ k_BKLE.float().transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores_BHTL.shape[-2:], dtype=torch.bool, device=scores_BHTL.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores_BHTL = scores_BHTL.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores_BHTL = scores_BHTL + attn_mask
    return scores_BHTL.softmax(-1)


class _Watch(TorchFunctionMode):
    """Inside, the weights of every attention are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.seen.append(softmax_weights(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def attention_weights(model: SportsLLM, ids: Sequence[int]) -> list[Tensor | None]:
    """The weights of every layer's attention on one text.

    Args:
        model: in evaluation mode; read, never changed.
        ids: T token ids, the begin token included.

    Returns:
        For each layer (H, T, T) float32, row t the weights that token t gives to all, which add up to 1; None for a
        layer that has no attention over tokens.
    """
    x_BTD, found = model.embedded(torch.tensor([list(ids)], device=model.head_weight.device)), list[Tensor | None]()
    for block in model.model.layers:
        with _Watch() as watch:
            x_BTD = block(x_BTD, first_positions(model.rope, x_BTD))
        whole = [weights[0].cpu() for weights in watch.seen if weights.shape[-2:] == (len(ids), len(ids))]
        found.append(whole[-1] if whole else None)
    return found


def entropy_bits(weights_HTL: Tensor) -> Tensor:
    """For each head the mean entropy of a token's weights, (H,): 0 if each attends to a single token."""
    nats_H: Tensor = torch.special.entr(weights_HTL).sum(-1).mean(-1)
    return nats_H / math.log(2)


def distance_tokens(weights_HTT: Tensor) -> Tensor:
    """For each head how many tokens back it attends, (H,): the weighted mean, then the mean over tokens."""
    places = torch.arange(weights_HTT.shape[-1], dtype=weights_HTT.dtype)
    return (weights_HTT * (places[:, None] - places)).sum(-1).mean(-1)
