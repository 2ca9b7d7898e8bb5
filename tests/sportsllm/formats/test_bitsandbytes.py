"""Checkpoints that bitsandbytes packed: bitsandbytes' own dequantization and `transformers` are the oracles."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as peer
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sportsllm
from compress.distillation.loss import DistillationConfig
from compress.distillation.student import StudentTraining
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from sportsllm.files import write_json
from sportsllm.formats.bitsandbytes import companions, read_dense
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed import bitsandbytes_kind
from sportsllm.formats.safetensors import WEIGHTS, TensorFiles
from sportsllm.inference.calibration import CalibrationText
from sportsllm.training.settings import TrainConfig
from tests.support.bnb_models import KINDS, dense_model, dequantize, pack_linears, quantization, save, with_numbers_of
from tests.support.checkpoint_files import edit_json, edit_tensors, refused
from tests.support.command_line import CommandLine

IDS = torch.randint(0, 384, (1, 48), generator=torch.Generator().manual_seed(5))
UP = "model.layers.1.mlp.up_proj"


def read(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return read_dense("x.weight", companions(tensors), tensors.__getitem__, "file")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dequantizes_bit_by_bit_as_the_library(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for kind, nested, blocksize, storage in itertools.product(
        ("nf4", "fp4"), (False, True), (64, 512), (torch.uint8, torch.bfloat16)
    ):
        for shape in ((24, 112), (40, 96)):  # 5.25 and 7.5 blocks of 512
            weight = torch.randn(shape, generator=generator).to(dtype)
            packed, state = peer.quantize_4bit(
                weight, blocksize=blocksize, compress_statistics=nested, quant_type=kind, quant_storage=storage
            )
            parts = {f"x.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
            found, wanted = read({"x.weight": packed, **parts}), dequantize(packed, state)
            assert found.dtype == dtype and torch.equal(found, wanted), (kind, nested, blocksize, shape)
    numbers, scales, _ = peer.int8_vectorwise_quant(torch.randn(24, 112, generator=generator).half())
    wanted = peer.int8_vectorwise_dequant(numbers, scales)
    assert torch.equal(read({"x.weight": numbers, "x.SCB": scales}), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_gives_the_logits_of_the_model_that_was_saved(kind: str, tmp_path: Path) -> None:
    """4 bits multiply in float32: only the order of additions differs. LLM.int8 rounds activations as well."""
    packed = pack_linears(dense_model(), kind)
    ours = load_checkpoint(save(tmp_path / "packed", packed, kind))
    packed = packed if kind == "int8" else with_numbers_of(dense_model(), packed)
    with torch.inference_mode():
        found, wanted, before = ours(IDS), packed(IDS).logits.float(), dense_model()(IDS).logits
    spread, error = float(wanted.std()), float((found - wanted).abs().max())
    assert error < (0.3 if kind == "int8" else 1e-4) * spread
    assert float((before - wanted).abs().max()) > 0.01 * spread, "the packed model is another one"
    assert float((found - wanted).square().mean()) < 0.9 * float((before - wanted).square().mean())


def test_transformers_itself_saves_what_is_read(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers quantizes with it")
    import transformers

    dense_model().save_pretrained(tmp_path / "dense")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    how = transformers.BitsAndBytesConfig(**four)
    arguments = {"dtype": torch.float32, "device_map": "cpu", "quantization_config": how}
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "dense", **arguments).save_pretrained(tmp_path / "saved")
    save(tmp_path / "by-hand", pack_linears(dense_model(), "nf4-double"), "nf4-double")
    saved, by_hand = (load_file(str(tmp_path / name / WEIGHTS)) for name in ("saved", "by-hand"))
    assert saved.keys() == by_hand.keys() and all(torch.equal(saved[name], by_hand[name]) for name in saved)
    assert load_checkpoint(tmp_path / "saved").config.hidden_size == 64


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tokenizer_directory: Path) -> Path:
    model = pack_linears(dense_model(torch.bfloat16), "nf4-double")
    return save(tmp_path_factory.mktemp("bnb") / "packed", model, "nf4-double", tokenizer_directory)


def test_shows_the_ordinary_names_and_reads_one_matrix_when_asked(packed: Path) -> None:
    tensors, names = TensorFiles(packed), set(dense_model().state_dict())
    assert set(tensors) == names and len(tensors) == len(names)
    assert f"{UP}.weight" in tensors and f"{UP}.weight.absmax" not in tensors
    with pytest.raises(KeyError):
        tensors[f"{UP}.weight.absmax"]
    assert tensors[f"{UP}.weight"].dtype == torch.bfloat16 and tensors[f"{UP}.weight"].shape == (112, 64)


Change = Callable[[torch.Tensor], torch.Tensor | None]
STATE = "weight.quant_state.bitsandbytes__nf4"


def gone(_: torch.Tensor) -> None:
    pass


def new_state(**changes: Any) -> tuple[str, Change]:
    """Other fields of the packed JSON."""

    def change(old: torch.Tensor) -> torch.Tensor:
        return torch.tensor(list(json.dumps(json.loads(bytes(old.tolist())) | changes).encode()), dtype=torch.uint8)

    return STATE, change


DAMAGE = [
    ("weight.absmax", gone, r"KeyError: 'absmax'"),
    ("weight.nested_absmax", gone, r"nested_absmax is missing"),
    ("weight.quant_map", gone, r"KeyError: 'quant_map'"),
    (STATE, gone, r"cannot be unpacked by its quant_state"),
    ("weight", gone, r"belongs to no part|is missing"),
    (STATE, lambda t: torch.full_like(t, 255), r"cannot be unpacked"),
    (STATE, lambda t: torch.tensor(list(b"[4]"), dtype=torch.uint8), r"cannot be unpacked"),
    (*new_state(quant_type="int4"), r"of int4, which is not supported"),
    (*new_state(quant_type="fp4"), r"quant_map is not FP4's table"),
    (*new_state(dtype="int8"), r"int8"),
    (*new_state(blocksize=0), r"ZeroDivisionError"),
    (*new_state(blocksize=128), r"absmax has 112 values, not 56"),
    (*new_state(shape=[64, 112]), r"shape \(64, 112\), config.json asks for \(112, 64\)"),
    (*new_state(shape=[112, 1 << 40]), r"weight has 3584 values, not"),
    (*new_state(shape=[112]), r"shape \[112\]"),
    (*new_state(nested_blocksize=None), r"TypeError"),
    (*new_state(nested_blocksize=16), r"nested_absmax has 1 values, not 7"),
    (*new_state(nested_offset="much"), r"ValueError"),
    (*new_state(nested_offset=float("nan")), r"holds NaN"),
    ("weight", lambda t: t[:-1], r"weight has 3583 values, not 3584"),
    ("weight.absmax", lambda t: t[:-1], r"absmax has 111 values, not 112"),
    ("weight.nested_absmax", lambda t: t * float("nan"), r"holds NaN"),
    ("weight.nested_quant_map", lambda t: t[:7], r"nested_quant_map has 7 values"),
    ("weight.quant_map", lambda t: -t, r"quant_map is not NF4's table"),
]


def refused_with(source: Path, folder: Path, part: str, change: Change, message: str) -> None:
    """A copy is refused in which a tensor of a matrix is changed."""
    target = shutil.copytree(source, folder / "damaged", dirs_exist_ok=True)
    new = change(load_file(target / WEIGHTS)[f"{UP}.{part}"])
    edit_tensors(target, {f"{UP}.{part}": None if new is None else new.contiguous()})
    refused(target, message)


@pytest.mark.parametrize(("part", "change", "message"), DAMAGE)
def test_damage_is_one_clear_line(packed: Path, tmp_path: Path, part: str, change: Change, message: str) -> None:
    refused_with(packed, tmp_path, part, change, message)


def test_damage_of_eight_bits(tmp_path: Path) -> None:
    source = save(tmp_path / "whole", pack_linears(dense_model(), "int8"), "int8")
    for part, change, message in (
        ("SCB", gone, r"up_proj.SCB' is missing"),
        ("SCB", lambda t: t[1:], r"SCB' has 111 values for a matrix of shape \(112, 64\)"),
        ("SCB", lambda t: t * float("inf"), "holds NaN"),
        ("weight", lambda t: t[1:], r"SCB' has 112 values for a matrix of shape \(111, 64\)"),
        ("weight_format", lambda t: t + 2, r"weight_format 2"),
    ):
        refused_with(source, tmp_path, part, change, message)


@pytest.mark.parametrize("value", [["nf4"], {"quant_method": "gptq"}, {"load_in_4bit": False}])
def test_other_methods_stay_refused(packed: Path, tmp_path: Path, value: Any) -> None:
    shutil.copytree(packed, tmp_path / "other")
    edit_json(tmp_path / "other" / "config.json", quantization_config=value)
    refused(tmp_path / "other", "quantization_config|quant_method")


def test_quantize_says_that_it_rounds_again_and_what_that_costs(
    packed: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cli: CommandLine
) -> None:
    grid = QuantizationConfig(4, 32, 8)
    result = quantize_checkpoint(packed, tmp_path / "out", grid, "rtn")
    assert "stored its matrices as NF4; they are rounded again" in capsys.readouterr().err
    stored, model = TensorFiles(packed), load_checkpoint(tmp_path / "out")
    names = [name for name in stored if name.startswith("model.layers.") and name.endswith("_proj.weight")]
    before = torch.cat([stored[name].double().flatten() for name in names])
    after = torch.cat([model.get_submodule(name.removesuffix(".weight")).weight.flatten() for name in names])
    wanted = float((after - before).norm() / before.norm())
    assert result.regridded_from == "NF4" and result.regrid_relative_error == pytest.approx(wanted, rel=1e-6)
    assert 0.05 < wanted < 0.15  # 4 bits on blocks of 32 cost a dense normal matrix about 0.1
    recorded = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert recorded["quant_method"] == "sportsllm-nbits" and "load_in_4bit" not in recorded
    # Eight bits hold what four held.
    eight = quantize_checkpoint(packed, tmp_path / "eight", QuantizationConfig(8, 32, 8), "rtn")
    assert eight.regrid_relative_error < 0.01
    # What training changes afterwards is no error of rounding.
    steps = TrainConfig(steps=2, batch_size=2, accumulation=1, sequence=32, learning_rate=0.01, warmup=0)
    training = StudentTraining(packed, steps, (corpus_file,), distillation=DistillationConfig(kl_weight=0))
    trained = quantize_checkpoint(packed, tmp_path / "qad", grid, "rtn", recovery=lambda: training)
    assert trained.valid_bits_per_byte < trained.bits_per_byte_before_recovery
    assert trained.regrid_relative_error == result.regrid_relative_error
    assert cli("quantize", tmp_path / "out", "--out", tmp_path / "again")[0] == 3


def test_balance_moves_scales_so_that_its_loss_is_not_stated(packed: Path, tmp_path: Path, corpus_file: Path) -> None:
    text = CalibrationText((corpus_file,), 2)
    result = quantize_checkpoint(packed, tmp_path / "out", method="balance", text=text)
    assert result.regridded_from == "NF4" and result.regrid_relative_error is None


def test_exports_dense_and_leaves_no_trace_of_the_packing(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = sportsllm.export(packed, out=tmp_path / "onnx", threads=2)
    assert "stored its matrices as NF4; they are exported dense, in fp32" in capsys.readouterr().err
    assert result.precision == "fp32" and result.parity["passed"]
    config = json.loads((tmp_path / "onnx" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config and load_config(tmp_path / "onnx") == load_config(packed)
    from export.runtime.decoder import open as open_export

    with torch.inference_mode():
        wanted = load_checkpoint(packed)(IDS)[0].numpy()
    assert np.allclose(open_export(tmp_path / "onnx", 2).logits(IDS[0].tolist()), wanted, atol=1e-3 * wanted.std())


def test_config_alone_says_how_it_was_packed(tmp_path: Path) -> None:
    older, other = {"load_in_8bit": True}, {"quant_method": "awq", "bits": 4}  # older files name no method
    kinds = list[str | None]()
    for record in (*map(quantization, KINDS), older, other, None):
        write_json(tmp_path / "config.json", {"quantization_config": record})
        kinds.append(bitsandbytes_kind(tmp_path))
    assert kinds == ["NF4", "NF4", "FP4", "FP4", "INT8", "INT8", None, None]
