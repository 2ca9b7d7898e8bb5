"""Attention weights against `transformers`' own, and against the formula in float64."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.inspection import attention_weights, count_choices, distance_tokens, entropy_bits, mixtures
from sportsllm.models.config import Experts
from sportsllm.models.language_model import ATTENTION_MODULES
from sportsllm.models.parts import ATTENTION, HIDDEN, Kept, Matrix, Sublayer
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support import families
from tests.support.models import tiny_model

IDS = torch.randint(0, 384, (40,), generator=torch.Generator().manual_seed(2)).tolist()
TOLERANCE = 2e-6
"""Of float32 weights of at most 1: scores of order 10 are off by some 1e-6, which an exponential passes on."""


@pytest.mark.parametrize("name", families.CONFIGS)
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


def _mean(config: Any) -> Sublayer:
    """A token's output is a matrix times the mean of what came before: no softmax anywhere."""
    size = config.hidden_size
    matrices = (Matrix("mix", size, size, HIDDEN, HIDDEN, HIDDEN, True),)
    return Sublayer(matrices, matrices, (), Kept())


class _MeanLayer(torch.nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Any, *_: Any) -> Any:
        return self.mix(x_BTD.cumsum(1) / torch.arange(1, x_BTD.shape[1] + 1)[None, :, None])


def test_a_layer_without_attention_has_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION, "mean", _mean)
    monkeypatch.setitem(ATTENTION_MODULES, "mean", _MeanLayer)
    assert attention_weights(tiny_model(attention_kind="mean"), IDS) == [None, None]


def mixture(**changes: Any) -> Any:
    return tiny_model(mlp_kind="experts", experts=Experts(**{"count": 4, "active": 2} | changes))


@pytest.fixture
def words(tokenizer_directory: Path) -> TextTokenizer:
    return load_tokenizer(tokenizer_directory)


def test_counts_are_the_two_highest_scores_of_each_token(texts: list[str], words: TextTokenizer) -> None:
    """Whole texts, longer than the context of 128, from a begin token in each piece."""
    model, seen = mixture(), {0: list[Any](), 1: list[Any]()}
    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.register_forward_hook(lambda m, i, out, layer=layer: seen[layer].append(out.double().numpy()))
    counts, read = count_choices(model, words, texts[:3], 10**6, "texts")
    lengths = [len(words.encode(text)) for text in texts[:3]]
    assert read == sum(length + -(-length // 127) for length in lengths)
    for layer, found in counts.items():
        logits = np.concatenate(seen[layer])
        assert len(logits) == 2 * read  # the hook routes once more
        chosen = np.argsort(logits, axis=1)[:, -2:]
        assert found.tolist() == (np.bincount(chosen.ravel(), minlength=4) // 2).tolist()
        assert int(found.sum()) == 2 * read
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_reading_stops_at_the_most_tokens(texts: list[str], words: TextTokenizer) -> None:
    counts, read = count_choices(mixture(), words, texts, 200, "texts")
    assert read == 200 and {int(found.sum()) for found in counts.values()} == {400}


def test_groups_and_biases_choose_as_in_the_model(texts: list[str], words: TextTokenizer) -> None:
    """With two groups of which one is open, and a bias that closes the second."""
    model = mixture(count=4, active=2, groups=2, active_groups=1, router="sigmoid", choice_bias=True)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.bias.copy_(torch.tensor([5.0, 5.0, 0.0, 0.0]))
    counts, read = count_choices(model, words, texts[:1], 100, "texts")
    assert counts[0].tolist() == [read, read, 0, 0]


def test_what_cannot_be_counted_is_refused(words: TextTokenizer) -> None:
    with pytest.raises(UsageError, match="--experts: the model has none"):
        mixtures(tiny_model())
    with pytest.raises(ArtifactError, match="tennis: the text is empty"):
        count_choices(mixture(), words, [""], 100, "tennis")
