"""The part of the gate for the latency profile: the graph that reads prompts against PyTorch.

Shape suffixes: N rows (outputs), K columns (inputs), V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from export.cache_scales import CacheScales, RoundedCache
from export.parity.comparison import Comparison, compare, merge
from export.runtime.decoder import OnnxDecoder
from sportsllm.models.attention import KVCache
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.quantized_layers import QuantizedLinear

_STEPS_A_SIDE = 63  # of the 7 bits that a row's numbers have, the same to both sides


@torch.inference_mode()
def compare_prompts(
    model: SportsLLM, decoder: OnnxDecoder, tokens: Sequence[int], steps: int, scales: CacheScales | None
) -> Comparison:
    """Logits after a prompt and of some steps behind it.

    Args:
        model: what the export was made from.
        decoder: both graphs in float32.
        tokens: prompt and steps.
        steps: tokens behind the prompt.
        scales: of an INT8 cache.
    """
    prompt, rest = list(tokens[: len(tokens) - steps - 1]), list(tokens[len(tokens) - steps - 1 :])
    cache = KVCache(model.config, 1, len(tokens)) if scales is None else RoundedCache(model.config, len(tokens), scales)
    rounded_to_rows(model).hidden(torch.tensor([prompt]), cache=cache)
    expected_SV = model(torch.tensor([rest]), cache)[0].numpy()
    found = [decoder.prefill([tokens[: len(tokens) - steps]], max_length=len(tokens))[0]]
    found += [decoder.step([token])[0] for token in tokens[len(tokens) - steps :]]
    return merge("prompt", [compare(expected_SV, np.stack(found))])


def rounded_to_rows(model: SportsLLM) -> SportsLLM:
    """A copy whose layers' packed matrices are rounded to nearest in rows, as `export.graph.prefill_graph` does it."""
    changed = copy.deepcopy(model)
    for module in changed.model.layers.modules():
        if isinstance(module, QuantizedLinear):
            scale_N1 = module.weight.abs().amax(dim=1, keepdim=True) / _STEPS_A_SIDE
            safe_N1 = torch.where(scale_N1 == 0, torch.ones_like(scale_N1), scale_N1)
            module.weight = torch.round(module.weight / safe_N1) * scale_N1
    return changed
