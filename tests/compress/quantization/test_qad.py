"""Training on the runtime's grid: its derivatives by the definition, and what is packed is what was trained."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from compress.distillation.loss import DistillationConfig
from compress.distillation.student import StudentTraining
from compress.quantization.config import GridSpec, QuantizationConfig
from compress.quantization.packed_checkpoint import PackedCheckpoint, round_weight
from compress.quantization.qad import FakeQuantLinear, make_trainable, pack_trained
from compress.quantize import quantize_checkpoint
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.packed import QuantizedWeight
from sportsllm.formats.packed_modules import QuantizedLinear
from sportsllm.simulator import simulate
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import validation
from tests.support.models import tiny_model


def packed_matrix(bits: int = 4, symmetric: bool = True) -> tuple[torch.Tensor, QuantizedWeight]:
    weight = torch.randn(10, 72, generator=torch.Generator().manual_seed(0))
    return weight, round_weight(weight, GridSpec(bits, 16, symmetric), search=True)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_it_starts_as_the_packed_matrix_and_packs_what_it_multiplies_by(bits: int, symmetric: bool) -> None:
    weight, packed = packed_matrix(bits, symmetric)
    layer = FakeQuantLinear(packed, None, 2 * weight)  # many steps away
    x = torch.eye(72)
    assert torch.allclose(layer(x).T, torch.from_numpy(packed.dequantize()), atol=1e-6)
    again = layer.pack()
    assert np.array_equal(again.packed, packed.packed) and np.array_equal(again.scales, packed.scales)
    assert (again.zero_points is None) == symmetric
    with torch.no_grad():
        layer.weight += 0.3 * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
    moved = layer.pack()
    assert not np.array_equal(moved.packed, packed.packed)
    assert torch.allclose(layer(x).T, torch.from_numpy(moved.dequantize()), atol=1e-6)


def test_int8_products_are_those_of_the_grid_under_autocast() -> None:
    """Outputs are rounded to bfloat16, which averages out over tokens; rounded weights would not."""
    weight, packed = packed_matrix(bits=8)
    layer = FakeQuantLinear(packed, None, weight)
    x = torch.randn(4_000, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = layer(x.float())
    assert found.dtype == torch.bfloat16
    exact = torch.from_numpy(packed.dequantize()).double().T
    effective = torch.linalg.lstsq(x.double(), found.double()).solution
    assert float((effective - exact).norm()) < 0.4 * float((exact.bfloat16().double() - exact).norm())


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_are_straight_through(symmetric: bool) -> None:
    """The product's inside the grid, none beyond its ends."""
    weight, packed = packed_matrix(symmetric=symmetric)
    layer = FakeQuantLinear(packed, None, weight)
    with torch.no_grad():
        layer.weight[0, 0] = 100.0  # beyond the grid
    by_weight = torch.randn(10, 72, generator=torch.Generator().manual_seed(2))
    (layer(torch.eye(72)).T * by_weight).sum().backward()
    scale, zero = (np.repeat(each, 16, axis=1)[:, :72] for each in (packed.scales, packed.zero_point_values()))
    steps = layer.weight.detach().double().numpy() / scale + zero
    inside = (steps >= -0.5) & (steps <= 15.5)
    assert layer.weight.grad is not None
    assert inside.mean() > 0.9 and not inside[0, 0]
    assert np.allclose(layer.weight.grad.numpy(), by_weight.numpy() * inside, atol=1e-6)


def test_only_the_layers_and_the_last_norm_are_trained() -> None:
    full, model = (tiny_model(attention_bias=True) for _ in range(2))
    packed = PackedCheckpoint(full.config, QuantizationConfig())
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            matrix = round_weight(module.weight.detach(), GridSpec(4, 32, True), search=False)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QuantizedLinear(matrix, module.bias))
            packed.add_packed(name, matrix)
    tokens = torch.randint(0, 384, (2, 20), generator=torch.Generator().manual_seed(0))
    before = model(tokens)
    make_trainable(model, given := {n: m.weight.detach() for n, m in full.named_modules() if hasattr(m, "weight")})
    assert not given.keys() & packed.modules.keys(), "training needs their memory"
    assert torch.allclose(model(tokens), before, atol=1e-4)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "model.embed_tokens.weight" not in trained
    assert {"model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"} <= trained
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        (model(tokens) - full(tokens)).square().mean().backward()
        optimizer.step()
    pack_trained(model, packed)
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    stored = torch.from_numpy(layer.pack().dequantize())
    assert torch.equal(packed.tensors["model.layers.1.mlp.up_proj.weight_scale"], torch.from_numpy(layer.pack().scales))
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert torch.equal(packed.tensors[name], model.get_parameter(name))
    assert torch.allclose(layer(torch.eye(64)), stored.T, atol=1e-6)


def test_the_stage_recovers_quality_and_stays_on_the_grid(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    config = TrainConfig(steps=60, batch_size=2, accumulation=1, sequence=64, learning_rate=1e-3, warmup=2)
    recovery = StudentTraining(checkpoint, config, (corpus_file,), (), DistillationConfig())
    grid = QuantizationConfig(4, 64, 32)
    results = quantize_checkpoint(checkpoint, tmp_path / "out", grid, "rtn", recovery=lambda: recovery)
    plain = quantize_checkpoint(checkpoint, tmp_path / "rtn", grid, "rtn")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ArtifactError, match="all of it is held out"):
        patch.setattr("compress.quantize.round_weights", None)  # refused before it
        own = StudentTraining(checkpoint, config, (corpus_file,), valid=(corpus_file,))
        quantize_checkpoint(checkpoint, tmp_path / "none", grid, "rtn", recovery=lambda: own)
    assert results.tokens == 60 * 128 and results.size_bytes == plain.size_bytes
    full, rounded, trained = (load_checkpoint(path) for path in (checkpoint, tmp_path / "rtn", tmp_path / "out"))
    words = load_tokenizer(checkpoint, full.config)
    errors = [0.0, 0.0]
    with torch.inference_mode():
        for number in range(20):
            ids = torch.tensor([words.encode(simulate(1, number).text)[:100]])
            wanted = full(ids).log_softmax(-1)
            for place, model in enumerate((rounded, trained)):
                found = model(ids).log_softmax(-1)
                errors[place] += float(torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="sum"))
    assert errors[1] < 0.9 * errors[0]  # 0.79 to 0.86 over several corpora
    recorded = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert recorded["method"] == "rtn+qad" and len(recorded["modules"]) == 14
    assert (tmp_path / "out" / "metrics.jsonl").exists()
    # The trained model's own score is that of the file it became.
    score = validation(load_corpus((corpus_file,), ()), words, TrainConfig(steps=1), False).report(trained, 65_536)
    assert score.bits_per_byte == pytest.approx(results.valid_bits_per_byte, rel=1e-5)
