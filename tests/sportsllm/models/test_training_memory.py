"""The memory of a training step against what torch's allocator hands out while it takes one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import feed_forward, grouped_query
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import PRESETS
from sportsllm.models.sublayer import Kept
from sportsllm.models.training_memory import TrainingStep, largest_batch, layer_activation_bytes, training_memory
from sportsllm.processors import LOSS_CHUNK_TOKENS
from sportsllm.text.packing import Batch
from sportsllm.training.loop import language_model_loss
from sportsllm.training.optimizers import Muon, build_optimizers
from sportsllm.training.settings import TrainConfig
from tests.support.models import tiny_config
from tests.support.training import allocated_peak

TINY = tiny_config(
    vocab_size=256, hidden_size=48, intermediate_size=128, num_hidden_layers=3, max_position_embeddings=256
)


class Shape(NamedTuple):
    changes: dict[str, Any]
    batch: int = 2
    length: int = 64
    ends: tuple[int, ...] | None = None  # of packed documents; a sequence each if not given
    optimizer: str = "adamw"
    bits: int = 32


SHAPES = {
    "tied": Shape({}),
    "untied, large vocabulary": Shape({"tie_word_embeddings": False, "vocab_size": 3_000, "num_hidden_layers": 2}),
    "deep": Shape({"num_hidden_layers": 8}),
    "Muon": Shape({}, optimizer="muon"),
    "deep, Muon, one short sequence": Shape({"num_hidden_layers": 8}, 1, 8, optimizer="muon"),
    "wide, packed documents": Shape({"hidden_size": 96, "intermediate_size": 320}, ends=(20, 61, 100, 128)),
    "one short sequence": Shape({}, 1, 8),
    "long, all heads": Shape({"num_key_value_heads": 4}, 1, 256),
    "Qwen's norms and biases": Shape({"qk_norm": True, "attention_bias": True, "attention_output_bias": True}),
    "states of 8 bits": Shape({"vocab_size": 512}, bits=8),
}


def _peak_bytes(config: ModelConfig, shape: Shape, precision: str, checkpointed: bool) -> tuple[int, int]:
    """Weights, states and the most that the allocator gave out at once in a step of two batches; states alone."""
    model = SportsLLM(config)
    model.initialize(0)
    model.train()
    model.checkpoint_activations = checkpointed
    optimizers = build_optimizers(model, TrainConfig(optimizer=shape.optimizer, optimizer_bits=shape.bits))
    for optimizer in optimizers:
        if isinstance(optimizer, Muon):
            optimizer.dtype = torch.float32  # as on processors that emulate bfloat16, which the formula assumes
    tokens = shape.batch * shape.length
    ends = shape.ends or tuple(range(shape.length, tokens + 1, shape.length))
    ids = torch.randint(0, config.vocab_size, (shape.batch, shape.length))

    def step() -> None:
        for _ in range(2):
            batch = Batch(ids.clone(), ids.clone(), ends)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = language_model_loss(model, batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    step()  # makes the states
    peak = allocated_peak(step)
    states = [tensor for optimizer in optimizers for state in optimizer.state.values() for tensor in state.values()]
    # bitsandbytes' maps of 256 values belong to all tensors.
    own = {t.data_ptr(): t.numel() * t.element_size() for t in states if isinstance(t, torch.Tensor) and t.ndim}
    held = sum(own.values())
    return peak + held + sum(p.numel() * p.element_size() for p in model.parameters()), held


@pytest.mark.parametrize(("precision", "checkpointed"), [("fp32", False), ("bf16", True)])
@pytest.mark.parametrize("name", SHAPES)
def test_the_formula_is_what_torch_allocates(name: str, precision: str, checkpointed: bool) -> None:
    """Within 5%: a page of small results (masks, positions, norms of gradients) is not in the formula.

    Processors that multiply bf16 themselves may hold one more float32 table of the head's size for a moment.
    """
    shape = SHAPES[name]
    config = TINY.with_changes(**shape.changes)
    step = TrainingStep(shape.batch, shape.length, precision, shape.optimizer, shape.bits, checkpointed=checkpointed)
    measured, states = _peak_bytes(config, shape, precision, checkpointed)
    native = precision == "bf16" and torch.cpu._is_avx512_bf16_supported()
    copy = 4 * config.vocab_size * config.hidden_size if native else 0
    needed = training_memory(config, step)
    total, maps = needed.total, 2 * 4 * 256 if shape.bits == 8 else 0
    assert needed.optimizer_states == states - maps
    assert any(total + more == pytest.approx(measured, rel=0.05) for more in (0, copy)), (total, measured)


def test_parts_of_base_162m() -> None:
    config = PRESETS["base-162m"]
    step = TrainingStep(32, 2_048, processor="gpu")
    plain, checkpointed = (training_memory(config, replace(step, checkpointed=each)) for each in (False, True))
    for needed in (plain, checkpointed):
        assert sum(needed.parts().values()) == needed.total
        assert needed.master_weights == needed.gradients == needed.optimizer_states // 2 == 4 * config.parameters
    # One layer by hand, D = 768, F = 3,072: two norms of 4 D + 4 and 2 D; q, k, v, the output and its copy of 2 D and
    # 12 log-sums; four of 2 F. Twelve layers, rotary tables of 4 x 64 and two ids of 8 bytes a token. The peak is in
    # the last layer's backward pass, two gradients of 2 F: more than final norm and chunked logits took before.
    layer = 2 * (6 * 768 + 4) + 10 * 768 + 48 + 8 * 3_072
    assert (plain.peak, plain.work) == ("backward", 32 * 2_048 * 4 * 3_072)
    assert plain.activations == 32 * 2_048 * (12 * layer + 4 * 64 + 16)
    assert checkpointed.activations == 32 * 2_048 * (12 * 4 * 768 + 4 * 64 + 16 + layer)
    # Without checkpointing no card of 24 GB holds this batch; with it one of 12 GB does.
    assert plain.total > 24e9 and 8e9 < checkpointed.total < 12e9
    on_cpu = training_memory(config, TrainingStep(32, 2_048))
    assert on_cpu.peak == "loss"  # x / rms(x) of 25 norms, 2 bytes more of q, k, v and output; the final norm's result
    assert on_cpu.activations - plain.activations == 32 * 2_048 * ((12 * (8 + 8) + 8 + 2) * 768 + 4)


def test_a_step_of_muon_by_hand() -> None:
    """D = 48, F = 128, three layers: gate and up of (F, D) are the largest stack, six matrices.

    On a CPU the stack and two iterates in float32 and two products of (D, D); on a GPU the iterates, a copy of the
    stack and the products in bfloat16.
    """
    cpu, gpu = (training_memory(TINY, TrainingStep(1, 2, optimizer="muon", processor=each)) for each in ("cpu", "gpu"))
    assert (cpu.peak, cpu.work) == ("optimizer", 6 * (3 * 4 * 48 * 128 + 2 * 4 * 48 * 48))
    assert gpu.work == 6 * ((4 + 3 * 2) * 48 * 128 + 2 * 2 * 48 * 48)


def test_weights_are_copied_under_mixed_precision_only() -> None:
    config = PRESETS["base-162m"]
    mixed, plain = (training_memory(config, TrainingStep(4, 512, each)) for each in ("fp16", "fp32"))
    assert (plain.weights, plain.master_weights) == (4 * config.parameters, 0)
    assert mixed.master_weights == plain.weights
    assert mixed.weights < 2 * config.parameters  # the embedding is looked up, not multiplied by
    assert training_memory(config, TrainingStep(4, 512, "bf16")) == mixed


def test_the_largest_batch_is_the_last_that_fits() -> None:
    config = PRESETS["base-162m"]
    for checkpointed in (False, True):
        step = TrainingStep(1, 2_048, processor="gpu", checkpointed=checkpointed)
        batch = largest_batch(config, step, 9e9)
        assert training_memory(config, replace(step, batch=batch)).total <= 9e9
        assert training_memory(config, replace(step, batch=batch + 1)).total > 9e9
    assert largest_batch(config, TrainingStep(1, 2_048), 2e9) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"optimizer_bits": 4}, "use 32 or 8"), ({"optimizer_bits": 8, "optimizer": "muon"}, "bitsandbytes has no Muon")],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingStep(**{"batch": 1, "length": 8, **arguments})


def _saved_bytes(run: Callable[[], object]) -> int:
    """Bytes of the activations that autograd keeps; weights and states of random numbers left out."""
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor.ndim > 1)


def _kept(kept: Kept) -> int:
    """Bytes on a GPU in bf16."""
    return 2 * (kept.computed + kept.attended + kept.cast) + 4 * (kept.float32 + kept.normed)


def test_a_gpus_kernels_keep_what_the_formula_says() -> None:
    """torch's own rules of differentiation, for FlashAttention on tensors without memory."""
    batch, length, heads, groups, size = 2, 32, TINY.num_attention_heads, TINY.num_key_value_heads, TINY.head_dim

    def half(count: int) -> torch.Tensor:
        shape = batch, count, length, size
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    q, k, v = half(heads), half(groups), half(groups)
    attention = _saved_bytes(lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True))
    joined = 2 * TINY.query_size  # the output of all documents, as o_proj reads it
    expected = attention + batch * length * joined
    assert batch * length * _kept(grouped_query(TINY).kept) == expected

    # The fused norm's backward pass reads x and 1 / rms(x); the weight is held anyway.
    schema = torch.ops.aten._fused_rms_norm_backward.default._schema
    read = [argument.name for argument in schema.arguments if "Tensor" in str(argument.type)]
    assert read == ["grad_out", "input", "rstd", "weight"]
    norm, result = 4 * TINY.hidden_size + 4, 2 * TINY.hidden_size
    halves = [_kept(kind.kept) for kind in (grouped_query(TINY), feed_forward(TINY, "silu", gated=True))]
    assert layer_activation_bytes(TINY, True, "gpu") == 2 * (norm + result) + sum(halves)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("checkpointed", "optimizer"), [(False, "adamw"), (True, "adamw"), (True, "muon")])
def test_a_gpu_allocates_what_the_formula_says(checkpointed: bool, optimizer: str) -> None:
    """10%: the allocator rounds to 512 bytes, cuBLAS keeps a workspace, and kernels have buffers of their own."""
    config = PRESETS["tiny-5m"]
    model = SportsLLM(config).cuda()
    model.train()
    model.checkpoint_activations = checkpointed
    optimizers = build_optimizers(model, TrainConfig(optimizer=optimizer))
    ids = torch.randint(0, config.vocab_size, (16, 1_024), device="cuda")
    batch = Batch(ids, ids, tuple(range(1_024, 16 * 1_024 + 1, 1_024)))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = language_model_loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=True)
    step = TrainingStep(16, 1_024, optimizer=optimizer, processor="gpu", checkpointed=checkpointed)
    needed = training_memory(config, step)
    assert needed.total == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)
    assert batch.tokens.numel() > LOSS_CHUNK_TOKENS
