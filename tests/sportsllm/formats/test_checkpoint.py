"""Checkpoints that are damaged, incomplete or not what they say: each one clear line, never a wrong model."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import sportsllm
from sportsllm.commands import find_model
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import load_checkpoint, open_model
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed_modules import QuantizedEmbedding
from sportsllm.formats.safetensors import WEIGHTS, StreamedTensors, _open
from sportsllm.models.layers import KVCache
from tests.support.checkpoint_files import edit_json, edit_tensors, refused
from tests.support.disk import full_disk
from tests.support.export_models import round_to_nearest


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint to damage: the tiny one, or the fixture that a test names."""
    source = request.getfixturevalue(getattr(request, "param", "checkpoint"))
    return shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("manifest.json"))


IN_INT4 = pytest.mark.parametrize("copy", ["int4"], indirect=True)


def test_streamed_tensors_are_the_bytes_of_a_file_written_at_once(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "b.weight_packed": torch.randint(0, 256, (3, 5), generator=draw).to(torch.uint8),
        "b.weight_scale": torch.randn(3, 1, generator=draw).half(),
        "c.bias": torch.randn(7, generator=draw),
        "a.weight": torch.randn(4, 6, generator=draw).T,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "whole", {"format": "pt"})
    streamed = StreamedTensors(tmp_path / "parts", {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()})
    streamed["c.bias"] = torch.zeros(7)
    for name, tensor in tensors.items():
        streamed[name] = tensor
    assert all(torch.equal(streamed[name], tensor) for name, tensor in tensors.items())
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_streamed_tensors_need_their_space_at_once(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with full_disk(), pytest.raises(OSError) as caught:
        StreamedTensors(path, {"weight": (torch.float32, (100, 100))})
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("copy", ["checkpoint", "int4"], indirect=True)
def test_a_model_beyond_the_free_memory_runs_layer_by_layer(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = open_model(copy)
    assert "each layer is loaded" not in capsys.readouterr().err
    monkeypatch.setattr("sportsllm.formats.checkpoint.available_bytes", lambda: 1_000)
    streamed = open_model(copy)
    assert "GB of float32 weights exceed the free memory; each layer is loaded when it runs" in capsys.readouterr().err
    assert not any(name.startswith("model.layers") for name in streamed.state_dict())
    tokens, caches = torch.arange(3, 23)[None], [KVCache(whole.config, 1, 32) for _ in range(2)]
    assert torch.equal(streamed(tokens), whole(tokens))
    for part in (tokens[:, :7], tokens[:, 7:8]):
        assert torch.equal(streamed(part, caches[0]), whole(part, caches[1]))
    edit_tensors(copy, {"model.layers.1.input_layernorm.weight": torch.ones(3)})
    with pytest.raises(ArtifactError, match="has shape"):
        open_model(copy)(tokens)


def test_shards_and_half_precision(copy: Path) -> None:
    tensors = load_file(str(copy / WEIGHTS))
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name].half() for name in part}, str(copy / file))
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (copy / WEIGHTS).unlink()
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(load_checkpoint(copy).state_dict()[name], tensors[name].half().float())
    (copy / "model-2.safetensors").unlink()
    refused(copy, "model-2.safetensors")


def test_truncated_overlong_and_not_readable(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (copy / WEIGHTS).read_bytes()
    for damaged in (data[:-100], data + b"\0" * 100, b""):
        (copy / WEIGHTS).write_bytes(damaged)
        refused(copy, "not a whole safetensors file")
    monkeypatch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ArtifactError, match="Permission denied"):
        _open(copy / WEIGHTS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_not_finite(copy: Path, value: float) -> None:
    edit_tensors(copy, {"model.norm.weight": torch.full((64,), value, dtype=torch.float64)})
    refused(copy, r"'model.norm.weight' holds NaN or infinity")
    edit_tensors(copy, {"model.norm.weight": torch.full((64,), 1.5).to(torch.float8_e4m3fn)})
    assert torch.equal(load_checkpoint(copy).state_dict()["model.norm.weight"], torch.full((64,), 1.5))


def test_wrong_missing_and_extra(copy: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(copy, {name: torch.zeros(16, 64)})
    refused(copy, r"k_proj.weight' has shape \(16, 64\), config.json asks for \(32, 64\)")
    edit_tensors(copy, {name: None})
    refused(copy, "k_proj.weight' is missing")
    edit_tensors(copy, {name: torch.zeros(32, 64), "model.layers.7.mystery": torch.zeros(3)})
    refused(copy, "mystery' belongs to no part")


def test_nothing_there(tmp_path: Path, copy: Path) -> None:
    refused(tmp_path / "none", "not found")
    (copy / WEIGHTS).unlink()
    refused(copy, "give a finished checkpoint")
    (copy / "config.json").write_text("{", encoding="utf-8")
    refused(copy, "not valid JSON")


def test_tied_head_stored_twice_is_read_once(copy: Path) -> None:
    edit_tensors(copy, {"lm_head.weight": load_checkpoint(copy).head_weight.detach()})
    assert load_checkpoint(copy).lm_head is None
    edit_tensors(copy, {"lm_head.weight": torch.zeros(384, 64)})
    refused(copy, r"lm_head\.weight differs")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("config.json", "adapter_config.json", "config.json: not found; the directory holds a LoRA adapter"),
        ("tokenizer.json", "tokenizer.model", "not found; write it from tokenizer.model by AutoTokenizer"),
        (WEIGHTS, "pytorch_model.bin", "pickle files can run code"),
        (WEIGHTS, "model.fp16.safetensors", "no model.safetensors; rename model.fp16.safetensors"),
        (WEIGHTS, "model-00001-of-00002.safetensors", "no model.safetensors; copy model.safetensors.index.json too"),
    ],
)
def test_other_files_of_hugging_face_are_named(copy: Path, old: str, new: str, said: str) -> None:
    (copy / old).rename(copy / new)
    with pytest.raises(ArtifactError, match=said):
        sportsllm.load(copy)


def test_an_adapter_beside_the_weights_is_not_ignored_silently(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "adapter_config.json").write_text("{}", encoding="utf-8")
    find_model(copy)
    assert "the LoRA adapter beside the weights is ignored" in capsys.readouterr().err
    with pytest.raises(ArtifactError, match=f"{WEIGHTS}: is a file, not a directory; give a checkpoint"):
        sportsllm.load(copy / WEIGHTS)
    (copy / WEIGHTS).rename(copy / "adapter_model.safetensors")
    refused(copy, f"no {WEIGHTS}; the directory holds a LoRA adapter; merge it into its base model")


@pytest.mark.parametrize(
    ("own", "named", "stops"),
    [
        (1, [1, 5], (1, 5)),
        ([4, 1], [1, 5], (4, 1, 5)),
        (None, 5, (5,)),
        (1, None, (1,)),
        (1, [10**6, -1, "5"], (1,)),  # no ids of the model
    ],
)
def test_end_tokens_of_generation_config_count(copy: Path, own: object, named: object, stops: tuple[int, ...]) -> None:
    edit_json(copy / "config.json", eos_token_id=own)
    edit_json(copy / "generation_config.json", eos_token_id=named)
    assert load_config(copy).stop_token_ids == stops


@pytest.mark.parametrize(("bits", "asymmetric"), [(4, True), (4, False), (8, True)])
def test_a_packed_table_is_dense_only_if_it_is_the_head_too(bits: int, asymmetric: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    packed = round_to_nearest(torch.randn(50, 40, generator=draw).numpy(), bits, 16, asymmetric)
    tokens, dense = torch.randint(50, (2, 7), generator=draw), torch.from_numpy(packed.dequantize())
    for tied in (True, False):
        table = QuantizedEmbedding(packed, tied)
        assert torch.equal(table(tokens), dense[tokens])
        assert len(table.weight) == 50 * tied
        assert torch.equal(table.bfloat16()(tokens), dense[tokens].bfloat16())  # of a teacher, rounded once


_PACKED = "model.layers.0.self_attn.q_proj.weight"


@IN_INT4
@pytest.mark.parametrize(
    ("part", "tensor", "said"),
    [
        ("packed", torch.tensor(1, dtype=torch.uint8), "does not fit shape"),
        ("packed", torch.zeros(0, 0, 0, dtype=torch.uint8), "does not fit shape"),
        ("packed", torch.zeros(64, 2, 16, dtype=torch.int8), "weight_packed is int8, not uint8"),
        ("scale", torch.ones(64, 2), "weight_scale is float32, not float16"),
        ("zero_point", torch.ones(64, 1), "weight_zero_point is float32, not uint8"),
        ("zero_point", torch.ones(64, 2, dtype=torch.uint8), r"weight_zero_point' has shape \(64, 2\)"),
    ],
)
def test_damaged_packed_tensors_are_refused(copy: Path, part: str, tensor: torch.Tensor, said: str) -> None:
    edit_tensors(copy, {f"{_PACKED}_{part}": tensor})
    refused(copy, said)


@IN_INT4
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("quant_method", "fp8", "quant_method 'fp8' is not supported"),
        ("bits", 3, "bits: must be 4 or 8, not 3"),
        ("modules", {_PACKED.removesuffix(".weight"): "x"}, "modules.model.layers.0.self_attn.q_proj"),
        ("modules", {_PACKED.removesuffix(".weight"): {"bits": 8}}, "does not fit shape"),
    ],
)
def test_damaged_records_of_quantization_are_refused(copy: Path, field: str, value: object, said: str) -> None:
    recorded = json.loads((copy / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    edit_json(copy / "config.json", quantization_config=recorded | {field: value})
    refused(copy, said)
