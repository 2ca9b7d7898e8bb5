"""Attention weights against `transformers`' own, and against the formula in float64."""

import math
from pathlib import Path

import pytest
import torch

from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.inspection import attention_weights, distance_tokens, entropy_bits
from tests.support import families
from tests.support.lstm_models import LSTM
from tests.support.models import tiny_model

IDS = torch.randint(0, 384, (40,), generator=torch.Generator().manual_seed(2)).tolist()
TOLERANCE = 2e-6
"""Of float32 weights of at most 1: scores of order 10 are off by some 1e-6, which an exponential passes on."""


FAMILIES = ["gemma3", "gemma2", "gpt2", "opt", "gpt-neox", "olmo2", "granite", "deepseek-v3", "deepseek-v3-yarn"]
"""Each calls attention, embeds tokens or joins its sublayers in another way; the other families do as one of these."""


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    peer = families.save(name, tmp_path)
    model = load_checkpoint(tmp_path)
    with torch.inference_mode():
        before = model(torch.tensor([IDS]))
        wanted = peer(torch.tensor([IDS]), output_attentions=True).attentions
        found = attention_weights(model, IDS)
        assert torch.equal(model(torch.tensor([IDS])), before)  # nothing stays behind
    assert not any(module._forward_pre_hooks for module in model.modules())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours is not None and ours.shape == (4, len(IDS), len(IDS))
        torch.testing.assert_close(ours, theirs[0], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(ours.sum(-1), torch.ones(ours.shape[:2]), rtol=0, atol=TOLERANCE)


def test_entropy_and_distance_are_their_sums() -> None:
    weights = torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(0)).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    for head in range(3):
        entropy = distance = 0.0
        for row in range(6):
            for column in range(row + 1):
                w = float(weights[head, row, column])
                entropy -= w * math.log2(w) / 6
                distance += w * (row - column) / 6
        assert float(entropy_bits(weights)[head]) == pytest.approx(entropy, abs=1e-6)
        assert float(distance_tokens(weights)[head]) == pytest.approx(distance, abs=1e-6)
    assert float(entropy_bits(torch.eye(4)[None])[0]) == 0.0
    assert float(entropy_bits(torch.full((1, 8, 8), 1 / 8))[0]) == pytest.approx(3.0)


def test_a_layer_without_attention_has_no_weights() -> None:
    assert attention_weights(tiny_model(**LSTM), IDS) == [None, None]
