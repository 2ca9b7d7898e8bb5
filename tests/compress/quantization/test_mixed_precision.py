"""Mixed precision: what a group costs by exact derivatives and by brute force, and that budgets are kept."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sportsllm
from compress.quantization.config import QuantizationConfig, SizeBudget, bits_per_weight, matrix_bytes
from compress.quantization.mixed_precision import SensitivityGroup, choose_bits, measure_groups
from compress.quantization.packed_checkpoint import PackedCheckpoint, round_weight
from compress.quantize import _kind, quantize_checkpoint
from sportsllm.commands import load_command
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.safetensors import WEIGHTS
from sportsllm.inference.calibration import CalibrationText
from sportsllm.models.config import Experts
from sportsllm.models.description import matrix_shapes
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.memory import WeightFormat, component_bytes
from tests.support.calibration import NARROW
from tests.support.lstm_models import LSTM
from tests.support.models import saved, tiny_config, tiny_model


def samples() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 384, (1, length), generator=draw) for length in (20, 33)]


def changed(model: SportsLLM, config: QuantizationConfig, names: Sequence[str], share: float) -> SportsLLM:
    """A copy with a share of the error of rounding a group."""
    other = copy.deepcopy(model)
    for name in names:
        weight = other.get_parameter(f"{name}.weight").data
        rounded = round_weight(weight, config.grid_for(name), search=True)
        weight += share * (torch.from_numpy(rounded.dequantize()) - weight)
    return other


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True},
        {"qk_norm": True, "tie_word_embeddings": False, "logit_softcap": 2.0},
        NARROW | {"mlp_kind": "experts", "experts": Experts(count=3, active=2), "num_hidden_layers": 1},
        LSTM | {"num_hidden_layers": 1},
    ],
    ids=str,
)
def test_of_given_draws_a_group_costs_half_the_squared_change_of_their_log_probability(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Against differences over a twentieth of the rounding's error, which float32 attention leaves exact to 1%."""
    model, config = tiny_model(std=0.1, **changes), QuantizationConfig(4, 32, 8)
    saved(tmp_path / "in", model)
    groups = measure_groups(tmp_path / "in", model.config, config, samples(), tmp_path, draws=1, seed=3)
    assert sorted(name for group in groups for name in group.modules) == sorted(matrix_shapes(model.config, True))
    draw, drawn = torch.Generator().manual_seed(3), []
    for tokens in samples():
        p = model(tokens)[0].detach().float().log_softmax(-1).exp()
        drawn.append(torch.multinomial(p, 1, generator=draw))
    for group in groups:
        total = 0.0
        for tokens, chosen in zip(samples(), drawn, strict=True):
            with torch.inference_mode():
                sides = [changed(model, config, group.modules, share)(tokens)[0].double() for share in (0.05, -0.05)]
            more, less = (float(side.log_softmax(-1).gather(1, chosen).sum()) for side in sides)
            total += ((more - less) / 0.1) ** 2 / 2
        assert group.kl == pytest.approx(total / 53, rel=0.02)


def test_a_group_costs_the_second_order_of_its_divergence(tmp_path: Path) -> None:
    """Against differences of the logits: half the mean variance of their change, by the model's own tokens.

    Of n draws for each of two pieces the mean square is known within sqrt(2 / 2n), 5.8% for n = 300; four times that is
    allowed.
    """
    model, config = tiny_model(std=0.1, qk_norm=True, **NARROW), QuantizationConfig(4, 32, 8)
    groups = measure_groups(saved(tmp_path, model), model.config, config, samples(), draws=300)
    for group in groups:
        total = 0.0
        for tokens in samples():
            with torch.inference_mode():
                more, less = (changed(model, config, group.modules, share)(tokens).double() for share in (0.05, -0.05))
                p, change = model(tokens).double().softmax(-1), (more - less) / 0.1
            total += float((p * change**2).sum() - ((p * change).sum(-1) ** 2).sum()) / 2
        assert group.kl == pytest.approx(total / 53, rel=0.23)


@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_are_those_that_are_stored(symmetric: bool) -> None:
    model = tiny_model(intermediate_size=104, tie_word_embeddings=False)
    config = QuantizationConfig(4, 32, 8, symmetric, {"model.layers.0.mlp.up_proj": 8})
    packed = PackedCheckpoint(model.config, config)
    for name in matrix_shapes(model.config):
        packed.add_matrix(name, model.get_submodule(name).weight.detach())
    assert sum(t.numel() * t.element_size() for t in packed.tensors.values()) == matrix_bytes(model.config, config)


def test_the_best_bargains_are_taken_as_long_as_they_fit() -> None:
    costs = {("a",): (1.0, 100), ("b", "c"): (1.5, 100), ("d",): (0.1, 1), ("e",): (0.2, 150)}
    groups = [SensitivityGroup(names, *cost) for names, cost in costs.items()]
    assert choose_bits(QuantizationConfig(), groups, 0).modules == {}
    assert choose_bits(QuantizationConfig(), groups, 160).modules == {"d": 8, "b": 8, "c": 8}
    assert set(choose_bits(QuantizationConfig(), groups, 351).modules) == {"a", "b", "c", "d", "e"}


def test_the_stage_keeps_the_budget_and_its_export_is_faithful(narrow: Path, corpus_file: Path, tmp_path: Path) -> None:
    result = quantize_checkpoint(
        narrow, tmp_path / "out", QuantizationConfig(4, 32, 8), "gptq", text=CalibrationText((corpus_file,), 8),
        budget=SizeBudget(bits_per_weight=6.5),
    )  # fmt: skip
    assert 5.0 < result.bits_per_weight <= 6.5
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    bits = {name: entry["bits"] for name, entry in config["quantization_config"]["modules"].items()}
    for group in result.sensitivity:
        assert {bits[name] for name in group["modules"]} == {group["bits"]}
    assert set(bits.values()) == {4, 8}
    assert sportsllm.export(tmp_path / "out", out=tmp_path / "onnx", threads=1).parity["passed"]


def test_logits_that_overflow_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.layers[1].post_attention_layernorm.weight.data.mul_(1e30)
    with pytest.raises(ArtifactError, match="logits are not finite"):
        measure_groups(saved(tmp_path, model), model.config, QuantizationConfig(), [torch.arange(64)[None]])


@pytest.mark.parametrize("method", ["balance", "gptq"])
def test_shared_experts_keep_eight_bits(corpus_file: Path, checkpoint: Path, tmp_path: Path, method: str) -> None:
    model = tiny_model(num_hidden_layers=1, mlp_kind="experts", experts=Experts(4, 2, shared=1), **NARROW)
    saved(tmp_path / "in", model, checkpoint)
    text = CalibrationText((corpus_file,), 4)
    budget = SizeBudget(bits_per_weight=bits_per_weight(model.config, QuantizationConfig()) + 0.4)
    result = quantize_checkpoint(tmp_path / "in", tmp_path / "out", method=method, text=text, budget=budget)
    recorded = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    bits = {name: entry["bits"] for name, entry in recorded["modules"].items()}
    always = {"model.layers.0.mlp.gate"} | {name for name in bits if ".shared_experts." in name}
    assert len(always) == 4 and {bits[name] for name in always} == {8}
    found = {tuple(group["modules"]): group for group in result.sensitivity}
    assert found[("model.layers.0.mlp.shared_experts.down_proj",)]["extra_bytes"] == 0
    assert tuple(f"model.layers.0.mlp.experts.{number}.down_proj" for number in range(4)) in found  # as kernels need
    assert {group["bits"] for group in result.sensitivity} == {4, 8}
    for names, group in found.items():
        assert {bits[name] for name in names if name not in always} <= {group["bits"]}


def test_a_size_counts_everything(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    config, low = tiny_config(), QuantizationConfig(4, 32, 8)
    least = matrix_bytes(config, low) + 4 * (config.parameters - sum(map(math.prod, matrix_shapes(config).values())))
    wanted = (least + 5_000) / 1e6
    text, budget = CalibrationText((corpus_file,)), SizeBudget(size_mb=wanted)
    result = quantize_checkpoint(checkpoint, tmp_path / "out", low, "mse", text=text, budget=budget)
    assert any(group["bits"] == 8 for group in result.sensitivity)
    assert 0 < result.calibration_tokens <= 4 * 128, "a method without calibration reads few samples"
    header = 8 + int.from_bytes((tmp_path / "out" / "model.safetensors").read_bytes()[:8], "little")
    assert least < (tmp_path / "out" / "model.safetensors").stat().st_size - header <= wanted * 1e6


def test_four_bits_spend_five_percent_more_by_default(
    narrow: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"checkpoint": narrow, "calibration": [corpus_file], "group_size": 16}
    mixed = load_command("quantize")(out=tmp_path / "mixed", settings={"samples": 2}, **few)
    uniform = load_command("quantize")(out=tmp_path / "uniform", settings={"samples": 2, "uniform": True}, **few)
    assert _kind(("experts.0.gate_proj", "experts.0.up_proj", "experts.1.gate_proj")) == "gate_proj, up_proj"
    raised, said = sum(group["bits"] == 8 for group in mixed.sensitivity), capsys.readouterr().out
    assert f"8 bits for {raised} of {len(mixed.sensitivity)} groups of matrices" in said and not uniform.sensitivity
    card = (tmp_path / "mixed" / "README.md").read_text(encoding="utf-8")
    assert f"quantized: INT4 and INT8, {mixed.bits_per_weight:.2f} bits per weight, groups of 16, method gptq" in card
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("uniform", "mixed")]
    assert sizes[0] < sizes[1] <= 1.05 * sizes[0]
    assert not load_command("quantize")(checkpoint=narrow, out=tmp_path / "rtn", method="rtn").sensitivity
    load_command("quantize")(out=tmp_path / "large", method="mse", size_mb=9.0, **few)
    assert "the size leaves room for more; --bits 8 needs no size" in capsys.readouterr().out
    with pytest.raises(UsageError, match="uniform=true is one precision for all"):
        load_command("quantize")(checkpoint=narrow, out=tmp_path / "no", settings={"uniform": True}, size_mb=1.0)


def test_a_damaged_checkpoint_is_refused_before_it_is_measured(checkpoint: Path, tmp_path: Path) -> None:
    model = tiny_model()
    path, table = saved(tmp_path / "in", model, checkpoint) / WEIGHTS, "model.embed_tokens.weight"
    whole = load_file(str(path))
    damaged = {
        f"tensor '{table}' is missing": {name: tensor for name, tensor in whole.items() if name != table},
        f"tensor '{table}' has shape": whole | {table: whole[table][:-1].clone()},
        "tensor 'extra' belongs to no part": whole | {"extra": torch.zeros(2)},
    }
    for said, tensors in damaged.items():
        save_file(tensors, str(path))
        with pytest.raises(ArtifactError, match=said):
            measure_groups(tmp_path / "in", model.config, QuantizationConfig(4, 32, 8), samples())


def test_budgets_that_cannot_be_kept() -> None:
    config = tiny_config()
    assert bits_per_weight(config, QuantizationConfig(4, 32, 8)) == pytest.approx(4.5)
    assert SizeBudget(4.5).spare_bytes(config, QuantizationConfig()) == 0
    with pytest.raises(
        UsageError, match=r"--set bits_per_weight=4.2 is less than INT4 takes with groups of 32, 4\.500"
    ):
        SizeBudget(4.2).spare_bytes(config, QuantizationConfig())
    with pytest.raises(UsageError, match=r"--size-mb 0\.01 is less"):
        SizeBudget(None, 0.01).spare_bytes(config, QuantizationConfig())
    with pytest.raises(UsageError, match="leave --bits 8 out"):
        SizeBudget(9.0).spare_bytes(config, QuantizationConfig(bits=8))


MIXTURE = tiny_config(mlp_kind="experts", experts=Experts(count=4, active=2, shared=1))


@pytest.mark.parametrize("symmetric", [True, False])
def test_sizes_are_foretold(symmetric: bool) -> None:
    config = QuantizationConfig(bits=4, symmetric=symmetric)
    foretold = component_bytes(MIXTURE, WeightFormat("int4", zero_points=not symmetric))
    assert matrix_bytes(MIXTURE, config) == sum(foretold.values()) - foretold["norms"]
