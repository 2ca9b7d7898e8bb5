"""Logits of other runtimes, beside this program's of the same weights."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.runtimes.logits import RuntimeLogits
from export.export import export
from sportsllm.inference.decoder import open_decoder
from tests.support.models import saved, tiny_model

ROW = [int(token) for token in np.random.default_rng(0).integers(3, 380, 150)]  # more than one chunk of 128
MODULES = {"llama.cpp": "xllamacpp", "ik_llama.cpp": "ik_llama_cpp", "genai": "onnxruntime_genai"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer_directory: Path) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "m", tiny_model(max_position_embeddings=160), tokenizer_directory)


@pytest.mark.parametrize("runtime", ["llama.cpp", "ik_llama.cpp", "genai", "openvino"])
def test_every_runtime_gives_the_logits_of_every_token(runtime: str, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "made"
    if runtime == "openvino":
        intel = pytest.importorskip("optimum.intel", reason="needs optimum-intel and OpenVINO")
        intel.OVModelForCausalLM.from_pretrained(checkpoint, export=True).save_pretrained(path)
    else:
        pytest.importorskip(MODULES[runtime])
        export(checkpoint, out=path, format="onnx" if runtime == "genai" else "gguf", dtype="fp32")
        path = path if runtime == "genai" else path / "model.gguf"
    base = open_decoder(checkpoint, 1)
    found = RuntimeLogits(runtime, path, base.config, 1)
    for own_TV, base_TV in zip(found.stream_logits(ROW), base.stream_logits(ROW), strict=True):
        # Caches of float16 or int8 and products in bfloat16 are the runtimes' own choice.
        assert (own_TV - base_TV).std() < 0.05 * base_TV.std()
