"""Texts sampled side by side with PyTorch.

Shape suffixes: B sequences, T tokens of the longest text.
"""

from collections.abc import Sequence
from threading import Event
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sportsllm.inference.sampling import Sampling, draw
from sportsllm.models.attention import KVCache
from sportsllm.models.language_model import SportsLLM


class SampledText(NamedTuple):
    """Token ids of a prompt and its continuation, and whether a stop token, which is left out, ended them."""

    tokens: list[int]
    ended: bool


@torch.inference_mode()
def sample_texts(
    model: SportsLLM,
    prompts: Sequence[Sequence[int]],
    stop_tokens: Sequence[int],
    sampling: Sampling,
    uniform_BT: npt.NDArray[np.float64],
    cancelled: Event | None = None,
) -> list[SampledText]:
    """Continue each prompt to a stop token or to T tokens.

    All rows are at one position: attention needs no mask and reads what is filled. Prompts of other lengths than the
    shortest are read token by token, in place of drawn ones. A row that has ended leaves the batch and the cache.

    Args:
        model: in evaluation mode.
        prompts: each of 1 to T tokens.
        sampling: temperature, top k and top p; there is no repetition penalty.
        uniform_BT: in [0, 1); number (b, t) chooses the token at place t of text b, whatever the other rows are.
        cancelled: once set, the texts are returned as far as they are.
    """
    device = model.head_weight.device
    tokens_BT = np.zeros((len(prompts), uniform_BT.shape[-1]), dtype=np.int64)
    starts = np.array([len(prompt) for prompt in prompts])
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = prompt
    longest = uniform_BT.shape[-1]
    ends, live = np.full(len(prompts), longest), np.arange(len(prompts))
    cache = KVCache(model.config, len(prompts), longest, device=device)
    first = 0
    for place in range(starts.min(), longest):
        if cancelled is not None and cancelled.is_set():
            ends[live] = place
            break
        read = torch.from_numpy(tokens_BT[live, first:place]).to(device)
        logits_BV = model.logits(model.hidden(read, cache=cache)[:, -1]).float().cpu().numpy()
        first = place
        drawn = place >= starts[live]
        chosen = np.where(drawn, draw(logits_BV, sampling, uniform_BT[live, place]), tokens_BT[live, place])
        tokens_BT[live, place] = chosen
        stopped = drawn & np.isin(chosen, stop_tokens)
        if stopped.any():
            ends[live[stopped]] = place
            kept = _filled_up(stopped)
            if not len(kept):
                break
            live = live[kept]
            cache.keep(torch.from_numpy(kept).to(device))
    return [SampledText(tokens_BT[row, :end].tolist(), bool(end < longest)) for row, end in enumerate(ends)]


def _filled_up(stopped_B: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The rows that go on, the last ones in the places of those that stopped, so that few move."""
    going = np.flatnonzero(~stopped_B)
    count = len(going)
    rows = np.arange(count)
    rows[stopped_B[:count]] = going[going >= count]
    return rows
