"""Quantization of a whole checkpoint with calibration text: what each table's error costs where it is used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from compress.layerwise import StoredStates
from compress.pruning.cut import KeptUnits
from compress.quantization.config import QuantizationConfig
from compress.quantization.gptq import damped_gram
from compress.quantization.layer_by_layer import TABLE_SHARE, quantize_calibrated, round_checkpoint
from compress.quantization.mixed_precision import measure_groups
from compress.quantization.packed_checkpoint import PackedCheckpoint
from sportsllm.errors import ArtifactError
from sportsllm.models.config import Experts
from sportsllm.models.description import block_matrices, block_units
from sportsllm.models.language_model import SportsLLM
from tests.compress.pruning.test_refit import BIASES, Inputs, ridge_solution, targets
from tests.compress.pruning.test_refit import SAMPLES as TEXT
from tests.compress.quantization.test_channel_scaling import uneven
from tests.support.calibration import NARROW, random_tokens
from tests.support.models import saved, tiny_model
from tests.support.pretend_gpu import pretended_gpu
from tests.support.training import allocated_peak

MIXTURE = {"mlp_kind": "experts", "experts": Experts(count=3, active=2)}
SAMPLES = [tokens for length in (40, 64, 17) for tokens in random_tokens(1, length, rows=1, below=24)]
ONE = [torch.arange(3, 67)[None]]


def rounded(
    model: SportsLLM, directory: Path, config: QuantizationConfig, samples: list[torch.Tensor], gptq: bool = True
) -> PackedCheckpoint:
    packed = PackedCheckpoint(model.config, config, "gptq" if gptq else "balance", keep_originals=True)
    quantize_calibrated(saved(directory, model), packed, samples)
    return packed


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, BIASES | {"tie_word_embeddings": False}], ids=str)
@pytest.mark.parametrize("gptq", [True, False])
def test_every_matrix_is_rounded_for_what_it_reads(gptq: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    """By `gptq` in the quantized model, fitted to give what the full one gives unless it is a tied table."""
    given: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    class Given(PackedCheckpoint):
        def add_by_gptq(self, module: str, weight_NK: torch.Tensor, gram_KK: torch.Tensor) -> None:
            given[module] = weight_NK.double(), gram_KK
            super().add_by_gptq(module, weight_NK, gram_KK)

    model = tiny_model(**changes)
    uneven(model)
    before, config = model(TEXT[0]), model.config
    packed = Given(config, QuantizationConfig(4, 32, 4), "gptq" if gptq else "balance", keep_originals=True)
    quantize_calibrated(saved(tmp_path, model), packed, TEXT)
    vectors = {name: packed.tensors[name] for name, value in model.state_dict().items() if value.ndim == 1}
    model.load_state_dict(vectors | {f"{name}.weight": each for name, each in packed.originals.items()}, strict=False)
    assert torch.allclose(model(TEXT[0]), before, atol=1e-4 * float(before.abs().max()))
    quantized = tiny_model(**changes)
    quantized.load_state_dict(vectors | {f"{name}.weight": packed.matrix(name) for name in packed.modules})
    full, ours = (Inputs(each) for each in (model, quantized if gptq else model))
    units = {name: torch.arange(unit.count) for name, unit in block_units(config).items()}
    kept, pull = KeptUnits(config, config, [0, 1], [units, units]), 20 / sum(tokens.numel() for tokens in TEXT)
    cases = {
        f"model.layers.{layer}.{matrix.name}": (
            ours[f"{layer}.{matrix.name}"], targets(matrix, model, full, ours, kept, layer, torch.eye(64))
        )
        for layer in range(2) for matrix in block_matrices(config)
    }  # fmt: skip
    theirs, read = (model.model.norm(inputs["end"].float()).double() for inputs in (full, ours))
    if model.lm_head is not None:
        cases["lm_head"] = read, theirs @ model.head_weight.double().T
    else:
        weight, gram = given.pop("model.embed_tokens")
        theirs = theirs[:600] if gptq else theirs  # of 5 samples, which have 8 tokens for each channel
        moment = theirs.T @ theirs
        moment = moment / moment.diagonal().mean() + TABLE_SHARE * torch.eye(64)
        assert torch.equal(weight, model.head_weight.double())
        assert torch.allclose(gram, damped_gram(moment), rtol=1e-4, atol=1e-5)
    assert given.keys() == cases.keys()
    for name, (inputs, wanted) in cases.items():
        weight, gram = given[name]
        start = model.get_parameter(f"{name}.weight").double()
        expected = ridge_solution(inputs, wanted, start, pull * inputs.shape[1]) if gptq else start
        assert (weight - expected).norm() < 1e-4 * expected.norm(), name
        assert not gptq or (weight - start).norm() > 1e-2 * expected.norm(), name
        assert torch.allclose(gram, damped_gram(inputs.T @ inputs), rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(
    ("config", "changes"), [(QuantizationConfig(4, symmetric=False, head_bits=4), MIXTURE), (QuantizationConfig(8), {})]
)
def test_what_is_written_layer_by_layer_is_what_memory_holds(
    config: QuantizationConfig, changes: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    model = tiny_model(**NARROW, **changes)
    saved(tmp_path, model, checkpoint)
    path = tmp_path / "packed.safetensors"
    in_memory, in_file = (PackedCheckpoint(model.config, config, "gptq", each) for each in (None, path))
    for packed in (in_memory, in_file):
        round_checkpoint(tmp_path, packed, SAMPLES)
    written = load_file(path)
    assert in_file.modules == in_memory.modules
    assert written.keys() == in_memory.tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in in_memory.tensors.items())
    assert sorted(path.name for path in tmp_path.glob("*")) == sorted(
        [*(path.name for path in checkpoint.glob("*")), "packed.safetensors"]
    )


def test_a_wide_layer_takes_one_second_moment_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or three in float32: damped, its factor, and what that is made of. A copy in float64 would be twice as much."""
    monkeypatch.setattr("compress.quantization.gptq._EXACT", 0)
    for name in ("layer_fit.BAND", "layerwise.BAND", "quantization.gptq._BAND", "quantization.gptq._ROWS"):
        monkeypatch.setattr(f"compress.{name}", 16)
    model = tiny_model(hidden_size=16, intermediate_size=300, num_hidden_layers=1, num_attention_heads=2)
    saved(tmp_path, model)
    packed = PackedCheckpoint(model.config, QuantizationConfig(4), "gptq", tmp_path / "packed.safetensors")
    assert allocated_peak(lambda: round_checkpoint(tmp_path, packed, SAMPLES[2:])) < 1.8 * 8 * 300**2


@pytest.mark.parametrize(
    ("method", "config", "changes"),
    [
        ("gptq", QuantizationConfig(4, symmetric=False), {"hidden_size": 16, "head_dim": 8}),
        ("gptq", QuantizationConfig(8), {"tie_word_embeddings": False, "num_hidden_layers": 1}),
        ("balance", QuantizationConfig(8), MIXTURE | {"num_hidden_layers": 1, "intermediate_size": 48}),
    ],
)
def test_a_gpu_rounds_as_the_cpu_does(
    method: str, config: QuantizationConfig, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The pretended one computes on the CPU, and no sum may mix tensors of both."""
    model = tiny_model(**NARROW | changes)
    saved(tmp_path, model)
    given = model.config, config, method
    wanted, found = (PackedCheckpoint(*given, tmp_path / name, keep_originals=True) for name in ("cpu", "gpu"))
    with sdpa_kernel(SDPBackend.MATH):
        round_checkpoint(tmp_path, wanted, SAMPLES)
        wanted_costs = measure_groups(tmp_path, model.config, config, SAMPLES)
        with pretended_gpu() as gpu:
            round_checkpoint(tmp_path, found, SAMPLES, gpu)
            costs = measure_groups(tmp_path, model.config, config, SAMPLES, tmp_path, device=gpu)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    assert all(torch.equal(found.originals[name], weight) for name, weight in wanted.originals.items())
    assert [group.kl for group in costs] == pytest.approx([group.kl for group in wanted_costs], rel=1e-6)


def test_the_bands_of_wide_second_moments_change_no_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bands are added up in another order, which turns few values."""
    model, found = tiny_model(std=0.1), list[dict[str, torch.Tensor]]()
    for band in (1024, 16):
        monkeypatch.setattr("compress.layerwise.BAND", band)
        packed = rounded(model, tmp_path, QuantizationConfig(8), random_tokens(4, 100, rows=1, below=24), gptq=False)
        found.append({name: tensor for name, tensor in packed.tensors.items() if name.endswith("_packed")})
    assert max(float((found[0][name] != found[1][name]).float().mean()) for name in found[0]) < 0.005


def test_states_in_a_file_are_read_like_those_of_a_list(tmp_path: Path) -> None:
    states = [torch.full((1, 2), float(number)) for number in range(3)]
    stored = StoredStates(tmp_path, states)
    assert torch.equal(torch.cat([stored[-1], *stored[1:], *stored]), torch.cat([states[-1], *states[1:], *states]))


@pytest.mark.parametrize("gptq", [True, False])
def test_inputs_that_overflow_are_refused(gptq: bool, tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.mul_(1e30)
    with pytest.raises(ArtifactError, match=r"layers.1.mlp.gate_proj: .* overflow"):
        rounded(model, tmp_path, QuantizationConfig(head_bits=32), ONE, gptq)


@pytest.mark.parametrize("gptq", [True, False])
def test_matrices_without_inputs_are_rounded_as_they_are(
    gptq: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of an expert that nobody chose, and one behind a matrix of zeros, in a layer without experts."""
    experts = Experts(count=4, active=2, router="sigmoid", choice_bias=True)
    first = {"dense_layers": 1, "dense_intermediate_size": 32}
    model = tiny_model(std=0.1, mlp_kind="experts", experts=experts, **first, **NARROW)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.bias[2] = -9.0
        model.model.layers[0].mlp.up_proj.weight.zero_()
    packed = rounded(model, tmp_path, QuantizationConfig(8), ONE, gptq)
    assert "experts that no token was sent to: layer 1: 2; more samples" in capsys.readouterr().err
    for name in ("model.layers.1.mlp.experts.2.down_proj", "model.layers.0.mlp.down_proj"):
        weight = packed.originals[name]
        assert (packed.matrix(name) - weight).abs().max() < 0.01 * weight.abs().max()
