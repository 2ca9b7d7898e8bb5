"""Our model against itself: caches, documents, memory; `transformers` is the oracle in test_families.py."""

import pytest
import torch

from sportsllm.models.layers import KVCache
from sportsllm.text.packing import Batch
from sportsllm.training.loop import language_model_loss
from tests.support.models import fresh, tiny_model

# float32 sums in another order: about 1e-6 of a logit near 1 to 10.
TOLERANCE = 1e-5


def test_rows_that_stay_in_a_growing_cache_go_on_as_before() -> None:
    model = tiny_model()
    tokens = torch.randint(0, 384, (5, 100), generator=torch.Generator().manual_seed(2))
    cache, kept = KVCache(model.config, 5, 100), torch.tensor([0, 4, 2])
    with torch.inference_mode():
        whole = model(tokens)[kept, 60:]
        model(tokens[:, :60], cache)
        cache.keep(kept)
        assert cache.tensors[0].shape[1] == 3 and cache.tensors[0].shape[-2] < 100
        parts = [model(tokens[kept, i : i + 1], cache) for i in range(60, 90)] + [model(tokens[kept, 90:], cache)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=TOLERANCE, rtol=TOLERANCE)


def test_full_cache_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="cache holds 4"):
        model(torch.zeros(1, 5, dtype=torch.long), KVCache(model.config, 1, 4))


def test_a_document_that_goes_on_in_the_next_row_starts_anew_there() -> None:
    """Documents in one row are compared with each alone in test_families.py."""
    first, second = (torch.randint(3, 384, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 8))
    rows = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
    with torch.inference_mode():
        batch = tiny_model()(rows, documents=(9, 17, 25, 34))
    assert torch.allclose(batch[0, 9:], batch[1, :8], atol=TOLERANCE, rtol=TOLERANCE)


def test_training_never_holds_all_logits_nor_all_attention() -> None:
    model = fresh(vocab_size=2048, num_attention_heads=4, max_position_embeddings=512)
    tokens = torch.randint(3, 2048, (4, 512))
    largest = 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    batch = Batch(tokens, tokens, tuple(range(512, 2049, 512)))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        language_model_loss(model.train(), batch).backward()
    attention, logits = 4 * 4 * 512 * 512, 4 * 512 * 2048
    assert largest < min(attention, logits) // 4


def test_activation_checkpointing_changes_no_gradient() -> None:
    tokens = torch.randint(3, 384, (2, 32))
    batch = Batch(tokens, tokens, (32, 64))
    gradients = []
    for switch in (False, True):
        model = tiny_model().train()
        model.checkpoint_activations = switch
        language_model_loss(model, batch).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


def test_dropout_acts_in_training_only() -> None:
    model = tiny_model(dropout=0.5)
    tokens = torch.randint(0, 384, (1, 8))
    with torch.no_grad():
        assert torch.equal(model(tokens), model(tokens))
        model.train()
        assert not torch.equal(model(tokens), model(tokens))
