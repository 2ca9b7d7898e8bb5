"""Attention to selected tokens against a float64 loop over tokens and blocks, and against full attention."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sportsllm.formats.huggingface import config_from_hf, to_hf
from sportsllm.models import selection
from sportsllm.models.config import Selection
from sportsllm.models.description import mixing_macs
from sportsllm.models.kinds import INDEX
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.layers import KVCache
from sportsllm.models.memory import kv_cache_bytes_per_token
from tests.support.models import tiny_config, tiny_model

SELECTION = Selection(tokens=24, block=4, heads=3, parts=2, pairs=4)
LENGTH = 75  # the last block is a part of one
Array = npt.NDArray[np.float64]


def selected_model(**changes: Any) -> SportsLLM:
    return tiny_model(attention_kind="selected", selection=SELECTION, **changes)


def tokens_of(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 384, (batch, length), generator=torch.Generator().manual_seed(5))


def parts_of(attention: Any, x_BTD: torch.Tensor, rope: Any) -> list[Array]:
    """q, k, v, index q and index k of the first sequence, rotated by a formula of the test's own."""
    with torch.inference_mode():
        size, steps = attention.config.head_dim, x_BTD.shape[1]
        heads = [part[0].double().numpy() for part in attention.heads(x_BTD, rope)]
        index_q, index_k = (attention.get_submodule(name)(x_BTD)[0].double().numpy() for name in INDEX)
    slower = 10_000.0 ** (-np.arange(size // 2, size, 2) / size)
    angles = np.arange(steps)[:, None] * slower

    def turned(x_TJE: Array) -> Array:
        pairs = x_TJE[..., : size // 4] + 1j * x_TJE[..., size // 4 :]
        pairs = pairs * np.exp(1j * angles)[:, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    return [*heads, *(turned(x.reshape(steps, -1, size // 2)).reshape(steps, -1, size) for x in (index_q, index_k))]


def scores_of(parts: list[Array], t: int) -> list[float]:
    """share(t, b) of the blocks up to t's own, by loops."""
    index_q, index_k = parts[3], parts[4][:, 0]
    found = [0.0] * (t // SELECTION.block + 1)
    for q in index_q[t]:
        weights = [math.exp(q @ index_k[s] / math.sqrt(16)) for s in range(t + 1)]
        for s, weight in enumerate(weights):
            found[s // SELECTION.block] += weight / sum(weights) / len(index_q[t])
    return found


def chosen_by_loops(parts: list[Array], t: int) -> list[int]:
    """Tokens that t attends to."""
    scores = scores_of(parts, t)
    own = len(scores) - 1
    kept = {0, *range(max(0, own - SELECTION.newest + 1), own + 1)}
    others = sorted(set(range(own + 1)) - kept, key=lambda b: -scores[b])
    kept |= set(others[: SELECTION.blocks - len(kept)])
    return [s for b in sorted(kept) for s in range(b * SELECTION.block, (b + 1) * SELECTION.block) if s <= t]


def attended_by_loops(parts: list[Array], t: int) -> Array:
    q, k, v = parts[:3]
    seen, shared = chosen_by_loops(parts, t), q.shape[1] // k.shape[1]
    rows = []
    for head in range(q.shape[1]):
        scores = k[seen, head // shared] @ q[t, head] / math.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max())
        rows.append(weights / weights.sum() @ v[seen, head // shared])
    return np.stack(rows)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_is_that_of_a_loop(qk_norm: bool) -> None:
    """Float32 beside float64: 1e-5 of outputs near 1; a wrong block moves them by a tenth."""
    model = selected_model(qk_norm=qk_norm)
    attention, rope = model.model.layers[0].self_attn, tuple(table[:LENGTH] for table in model.rope)
    x_BTD = torch.randn(1, LENGTH, 64, generator=torch.Generator().manual_seed(2))
    parts, seen = parts_of(attention, x_BTD, rope), []
    attention.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.inference_mode():
        attention(x_BTD, rope)
    expected = np.stack([attended_by_loops(parts, t).ravel() for t in range(LENGTH)])
    np.testing.assert_allclose(seen[0][0].numpy(), expected, atol=1e-5 * np.abs(expected).max())
    far = [t for t in range(LENGTH) if len(chosen_by_loops(parts, t)) < t + 1]
    assert len(far) == LENGTH - SELECTION.tokens, "the rest is chosen for"


def test_tokens_one_by_one_in_pieces_and_as_documents_see_the_same() -> None:
    model, tokens = selected_model(), tokens_of(2, LENGTH)
    with torch.inference_mode():
        whole = model(tokens)
        cache = KVCache(model.config, 2, LENGTH)
        pieces = [model(tokens[:, :40], cache), model(tokens[:, 40:50], cache)]
        pieces += [model(tokens[:, t : t + 1], cache) for t in range(50, LENGTH)]
        packed = model(tokens, documents=(30, LENGTH, 2 * LENGTH))
        alone = model(tokens[:1, :30]), model(tokens[:1, 30:])
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=0)
    torch.testing.assert_close(packed[1], whole[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(packed[0], torch.cat(alone, dim=1)[0], atol=1e-4, rtol=0)


def test_no_more_than_is_selected_is_full_attention_to_the_bit() -> None:
    model, full = selected_model(), SportsLLM(tiny_config()).eval()
    full.load_state_dict({name: x for name, x in model.state_dict().items() if name.split(".")[-2] not in INDEX})
    tokens = tokens_of(2, SELECTION.tokens + 1)
    with torch.inference_mode():
        assert torch.equal(model(tokens[:, :-1]), full(tokens[:, :-1]))
        caches = [KVCache(m.config, 2, 40) for m in (model, full)]
        for t in range(SELECTION.tokens):
            ours, theirs = (m(tokens[:, t : t + 1], c) for m, c in zip((model, full), caches, strict=True))
            assert torch.equal(ours, theirs)
        assert not torch.allclose(model(tokens)[:, -1], full(tokens)[:, -1], atol=1e-6), "one more and a block is out"


def shares_of(parts: list[Array], t: int) -> Array:
    """The share of query t's full attention, mean over heads, that falls on each block up to its own."""
    weights = np.zeros((t // SELECTION.block + 1) * SELECTION.block)
    for head in range(4):
        logits = parts[1][: t + 1, head // 2] @ parts[0][t, head] / 4
        weights[: t + 1] += np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum() / 4
    return weights.reshape(-1, SELECTION.block).sum(axis=1)


def test_the_loss_is_the_divergence_by_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LOSS_ROWS", LENGTH)  # all queries
    model = selected_model()
    attention, rope = model.model.layers[0].self_attn.train(), tuple(table[:LENGTH] for table in model.rope)
    x_BTD = torch.randn(1, LENGTH, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    attention(x_BTD, rope)
    total, parts = 0.0, parts_of(attention, x_BTD, rope)
    for t in range(LENGTH):
        scores = np.array(scores_of(parts, t))
        free = np.arange(1, len(scores) - SELECTION.newest)
        if not len(free):
            continue
        share = shares_of(parts, t)[free]
        wanted = scores[free] / scores[free].sum()
        total += float((share * np.log(share / share.sum() / wanted)).sum())
    loss = attention.auxiliary_loss
    assert float(loss.detach()) == pytest.approx(total / LENGTH, rel=1e-4) and total > 0
    loss.backward()
    given = {name for name, parameter in attention.named_parameters() if parameter.grad is not None}
    assert given == {f"{name}.weight" for name in INDEX} and x_BTD.grad is None


def test_the_model_gets_no_gradient_from_the_indexer_nor_it_from_the_model() -> None:
    model, tokens = selected_model().train(), tokens_of(1, LENGTH)
    model.hidden(tokens).square().sum().backward()
    index = {n for n, p in model.named_parameters() if n.split(".")[-2] in INDEX}
    assert {n for n, p in model.named_parameters() if p.grad is None} == index
    assert model.auxiliary_loss() is not None and model.auxiliary_loss() is None
    model.eval().hidden(tokens)
    assert model.auxiliary_loss() is None


def test_what_it_counts_and_how_its_config_is_written() -> None:
    config = selected_model().config
    full, size = tiny_config(), config.head_dim
    assert config.parameters - tiny_config().parameters == 2 * 64 * (3 * size + size)
    assert kv_cache_bytes_per_token(config)["fp32"] == 4 * 2 * (2 * 2 * size + size)
    assert mixing_macs(config, 24) == mixing_macs(full, 24)
    index = 3 * (size + 1) * 1_000
    assert mixing_macs(config, 1_000) == mixing_macs(full, 24) + index
    assert mixing_macs(config, 1_000, prompt=True) == mixing_macs(full, 1_000) + index
    data = to_hf(config)
    assert data["model_type"] == "sportsllm" and data["selection"] == asdict(SELECTION)
    assert config_from_hf(data) == config
