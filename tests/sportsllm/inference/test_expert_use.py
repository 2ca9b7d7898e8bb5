"""Counts of chosen experts against the router's own outputs, sorted in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.inference.expert_use import count_choices, mixtures
from sportsllm.models.config_records import Experts
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.models import tiny_model


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
