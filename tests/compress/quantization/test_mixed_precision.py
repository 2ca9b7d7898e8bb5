"""Mixed precision: what a group costs by brute force, and that budgets are kept."""

import copy
import json
from pathlib import Path

import pytest
import torch

from compress.quantization.config import QuantizationConfig, bits_per_weight, matrix_bytes, matrix_weights
from compress.quantization.mixed_precision import SensitivityGroup, SizeBudget, choose_bits, measure_groups
from compress.quantization.packed_checkpoint import PackedCheckpoint, round_weight
from compress.quantization.run import quantize
from export.export import ExportOptions, export_checkpoint
from sportsllm.errors import UsageError
from sportsllm.models.kinds import matrix_shapes
from sportsllm.training.calibration_text import CalibrationText
from tests.support.models import tiny_config, tiny_model


def samples() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 384, (1, length), generator=draw) for length in (20, 33)]


@torch.inference_mode()
def test_a_group_costs_what_rounding_it_alone_costs() -> None:
    model, config = tiny_model(qk_norm=True), QuantizationConfig(4, 32, 8)
    before = copy.deepcopy(model.state_dict())
    groups = measure_groups(model, config, samples())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(group.modules) for group in groups] == [3, 1, 2, 1] * 2
    assert sorted(name for group in groups for name in group.modules) == sorted(matrix_shapes(model.config, True))
    for group in groups:
        other = copy.deepcopy(model)
        for name in group.modules:
            linear = other.get_submodule(name)
            rounded = round_weight(linear.weight, config.grid_for(name, linear.in_features), search=True)
            linear.weight.data = torch.from_numpy(rounded.dequantize())
        total = 0.0
        for tokens in samples():
            log_p, log_q = (m(tokens).double().log_softmax(-1) for m in (model, other))
            total += float((log_p.exp() * (log_p - log_q)).sum())
        assert group.kl == pytest.approx(total / 53, rel=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_are_those_that_are_stored(symmetric: bool) -> None:
    model = tiny_model(intermediate_size=104, tie_word_embeddings=False)
    config = QuantizationConfig(4, 32, 8, symmetric, {"model.layers.0.mlp.up_proj": 8})
    packed = PackedCheckpoint(model.config, config)
    for name in matrix_shapes(model.config):
        packed.add_matrix(name, model.get_submodule(name).weight.detach(), search=False)
    assert sum(t.numel() * t.element_size() for t in packed.tensors.values()) == matrix_bytes(model.config, config)


def test_the_best_bargains_are_taken_as_long_as_they_fit() -> None:
    costs = {("a",): (1.0, 100), ("b", "c"): (1.5, 100), ("d",): (0.1, 1), ("e",): (0.2, 150)}
    groups = [SensitivityGroup(names, *cost) for names, cost in costs.items()]
    assert choose_bits(QuantizationConfig(), groups, 0).modules == {}
    assert choose_bits(QuantizationConfig(), groups, 101).modules == {"d": 8, "b": 8, "c": 8}
    assert choose_bits(QuantizationConfig(), groups, 160).modules == {"d": 8, "b": 8, "c": 8}
    assert set(choose_bits(QuantizationConfig(), groups, 351).modules) == {"a", "b", "c", "d", "e"}


@pytest.mark.parametrize("method", ["mse", "gptq"])
def test_the_stage_keeps_the_budget_and_its_export_is_faithful(
    checkpoint: Path, corpus_file: Path, tmp_path: Path, method: str
) -> None:
    result = quantize(
        checkpoint,
        tmp_path / "out",
        QuantizationConfig(4, 64, 8),
        method,
        text=CalibrationText((corpus_file,), 8),
        budget=SizeBudget(bits_per_weight=6.5),
    )
    assert 5.0 < result["bits_per_weight"] <= 6.5
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    bits = {name: entry["bits"] for name, entry in config["quantization_config"]["modules"].items()}
    for group in result["sensitivity"]:
        assert {bits[name] for name in group["modules"]} == {group["bits"]}
    assert set(bits.values()) == {4, 8}
    assert export_checkpoint(tmp_path / "out", tmp_path / "onnx", ExportOptions(threads=1))["parity"]["passed"]


def test_a_size_counts_everything(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    config, low = tiny_config(), QuantizationConfig(4, 32, 8)
    least = matrix_bytes(config, low) + 4 * (config.parameters - matrix_weights(config))
    wanted = (least + 5_000) / 1e6
    result = quantize(
        checkpoint, tmp_path / "out", low, text=CalibrationText((corpus_file,), 2), budget=SizeBudget(size_mb=wanted)
    )
    assert any(group["bits"] == 8 for group in result["sensitivity"])
    header = 8 + int.from_bytes((tmp_path / "out" / "model.safetensors").read_bytes()[:8], "little")
    assert least < (tmp_path / "out" / "model.safetensors").stat().st_size - header <= wanted * 1e6


def test_budgets_that_cannot_be_kept() -> None:
    config = tiny_config()
    assert bits_per_weight(config, QuantizationConfig(4, 32, 8)) == pytest.approx(5.0)
    with pytest.raises(UsageError, match=r"--bits-per-weight 4\.5 is less than INT4 takes with blocks of 32, 5\.000"):
        SizeBudget(4.5).spare_bytes(config, QuantizationConfig())
    with pytest.raises(UsageError, match=r"--size-mb 0\.01 is less"):
        SizeBudget(None, 0.01).spare_bytes(config, QuantizationConfig())
    with pytest.raises(UsageError, match="not both"):
        SizeBudget(5.0, 1.0).spare_bytes(config, QuantizationConfig())
    with pytest.raises(UsageError, match="leave --bits 8 out"):
        SizeBudget(9.0).spare_bytes(config, QuantizationConfig(bits=8))
