"""The browser layout: names that transformers.js asks for, and that our own commands open it as well."""

import json
import shutil
from pathlib import Path

import onnx
import pytest

import sportsllm
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from export import web_page
from export.graph.builder import GraphForm
from export.layout import find_files
from sportsllm.errors import ArtifactError, ConflictError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import directory_bytes, verify_directory
from sportsllm.inference.decoder import is_onnx_directory, open_decoder
from sportsllm.inference.sampling import Sampling, generate
from tests.support.export_models import pack_model, save_graph, tiny_model

NAMES = {
    "fp32": ("fp32", "model.onnx"), "fp16": ("fp16", "model_fp16.onnx"), "int8": ("q8", "model_quantized.onnx"),
    "int4": ("q4", "model_q4.onnx"),
}  # fmt: skip


@pytest.mark.parametrize("precision", NAMES)
def test_layout(precision: str, checkpoint: Path, int4: Path, tmp_path: Path) -> None:
    source, out = int4 if precision == "int4" else checkpoint, tmp_path / "web"
    if precision == "int8":
        source = tmp_path / "packed"
        quantize_checkpoint(checkpoint, source, QuantizationConfig(bits=8), "rtn")
    dtype = "fp16-weights" if precision == "fp16" else None
    result = sportsllm.export(source, out=out, dtype=dtype, threads=1, format="web")

    js_dtype, graph_name = NAMES[precision]
    settings = json.loads((out / "config.json").read_text())
    assert settings["transformers.js_config"] == {"dtype": js_dtype, "use_external_data_format": {graph_name: 1}}
    assert load_config(out) == load_config(source)
    assert {path.name for path in (out / "onnx").iterdir()} == {graph_name, f"{graph_name}_data"}
    beside = {path.name for path in out.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "parity.json"} <= beside
    assert {"index.html", "browser.js"} <= beside and 'src="browser.js"' in (out / "index.html").read_text()
    assert "genai_config.json" not in beside and "model.onnx" not in beside

    graph = onnx.load(str(out / "onnx" / graph_name), load_external_data=False).graph
    places = {entry.value for item in graph.initializer for entry in item.external_data if entry.key == "location"}
    assert places == {f"{graph_name}_data"}
    caches = [item for item in graph.input if item.name.startswith("past_key_values.")]
    assert {item.type.tensor_type.shape.dim[0].dim_param for item in caches} == {"batch_size"}
    # The browser build of ONNX Runtime has no such kernel.
    assert "GatherBlockQuantized" not in {node.op_type for node in graph.node}

    assert result.precision == precision and result.parity["passed"]
    assert result.size_bytes == directory_bytes(out) == sum(p.stat().st_size for p in (out / "onnx").iterdir())
    assert verify_directory(out)[1] == []


def test_transformers_js_is_copied_once_it_is_there(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPORTSLLM_NODE_MODULES", str(tmp_path / "modules"))
    bare, out = tmp_path / "bare", tmp_path / "web"
    sportsllm.export(checkpoint, out=bare, threads=1, format="web")
    assert not (bare / "lib").exists() and "another --out" in capsys.readouterr().err
    for name in (web_page._LIBRARY, *web_page._RUNTIME):
        (tmp_path / "modules" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "modules" / name).write_text(name)
    with pytest.raises(ConflictError, match="other settings"):  # not up to date
        sportsllm.export(checkpoint, out=bare, threads=1, format="web")
    sportsllm.export(checkpoint, out=out, threads=1, format="web")
    web_page.write_page(out)  # as when some matrices are written again
    assert {path.read_text() for path in (out / "lib").iterdir()} == {web_page._LIBRARY, *web_page._RUNTIME}


@pytest.mark.parametrize(("bits", "asymmetric"), [(4, True), (8, False)])
def test_the_same_logits_as_the_plain_layout(bits: int, asymmetric: bool, tmp_path: Path) -> None:
    """Packed embeddings are read in another way there; odd widths leave padding in their last block."""
    model = tiny_model(hidden_size=72, intermediate_size=100)
    quantization = pack_model(model, bits, 16, asymmetric)
    for name, form in (("plain", "onnx"), ("web", "web")):
        save_graph(tmp_path / name, model, quantization, GraphForm(form))
        (tmp_path / name / "model.safetensors").unlink()
    chosen = [
        list(generate(open_decoder(tmp_path / name, 1), [3, 50, 7], 12, Sampling(temperature=0)))
        for name in ("plain", "web")
    ]
    assert chosen[0] == chosen[1]


def test_damaged_and_doubtful_directories(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "web"
    sportsllm.export(checkpoint, out=out, threads=1, format="web")
    beside_weights = shutil.copytree(out, tmp_path / "both")
    shutil.copyfile(checkpoint / "model.safetensors", beside_weights / "model.safetensors")
    assert is_onnx_directory(out) and not is_onnx_directory(beside_weights)
    load_checkpoint(beside_weights)

    data = find_files(out).data
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match=r"onnx/model\.onnx_data.*bytes instead of"):
        open_decoder(out, 1)
    (out / "onnx" / "model_q4.onnx").touch()
    with pytest.raises(ArtifactError, match=r"several graphs \(model\.onnx, model_q4\.onnx\)"):
        open_decoder(out, 1)
