"""Our model against `transformers` on the same tiny weights, both ways, and against itself."""

from pathlib import Path

import pytest
import torch
import transformers

from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.layers import KVCache
from sportsllm.text.packing import Batch
from sportsllm.training.loop import language_model_loss
from tests.support.models import tiny_config, tiny_model

# float32 sums in another order: about 1e-6 of a logit near 1 to 10.
TOLERANCE = 1e-5

COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**COMMON, head_dim=16),
    "llama-tied": transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama-bias": transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama-theta": transformers.LlamaConfig(**COMMON, rope_theta=500_000.0, rms_norm_eps=1e-5),
    "llama-linear": transformers.LlamaConfig(**COMMON, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "llama3-scaling": transformers.LlamaConfig(**COMMON, rope_scaling=LLAMA3),
    "qwen2": transformers.Qwen2Config(**COMMON),
    "qwen3": transformers.Qwen3Config(**COMMON, head_dim=16),
}


def random_peer(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    peer = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return peer


@pytest.mark.parametrize("family", FAMILIES)
def test_their_checkpoint_gives_their_logits(family: str, tmp_path: Path) -> None:
    peer = random_peer(FAMILIES[family])
    peer.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.allclose(ours(tokens), peer(tokens).logits, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {"attention_bias": True},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
        {"qk_norm": True, "head_dim": 32},
    ],
    ids=str,
)
def test_our_checkpoint_gives_our_logits_there(changes: dict[str, object], tmp_path: Path) -> None:
    ours = tiny_model(**changes)
    save_checkpoint(tmp_path, ours)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = torch.randint(0, 384, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.allclose(ours(tokens), peer(tokens).logits, atol=5 * TOLERANCE, rtol=TOLERANCE)


def test_cached_steps_equal_one_pass() -> None:
    model = tiny_model()
    tokens = torch.randint(0, 384, (2, 24))
    cache = KVCache(model.config, 2, 24)
    with torch.inference_mode():
        whole = model(tokens)
        parts = [model(tokens[:, :7], cache), model(tokens[:, 7:12], cache)]
        parts += [model(tokens[:, i : i + 1], cache) for i in range(12, 24)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=TOLERANCE, rtol=TOLERANCE)


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


def test_packed_documents_do_not_see_each_other() -> None:
    model = tiny_model()
    first, other, second = (
        torch.randint(3, 384, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 14, 17)
    )
    with torch.inference_mode():
        alone = model(second[None])[0]
        for before in (first, other):
            row = torch.cat([before, second])
            packed = model(row[None], documents=(len(before), len(row)))[0, len(before) :]
            assert torch.allclose(packed, alone, atol=TOLERANCE, rtol=TOLERANCE)
        # A document that goes on in the next row of the batch starts anew there.
        rows = torch.stack([torch.cat([first, second[:8]]), torch.cat([second[:8], first])])
        batch = model(rows, documents=(9, 17, 25, 34))
        assert torch.allclose(batch[0, 9:], batch[1, :8], atol=TOLERANCE, rtol=TOLERANCE)


def test_training_never_holds_all_logits_nor_all_attention() -> None:
    config = tiny_config(vocab_size=2048, num_attention_heads=4, max_position_embeddings=512)
    model = SportsLLM(config)
    model.initialize(0)
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
