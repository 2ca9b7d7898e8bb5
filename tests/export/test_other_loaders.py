"""Exports in other people's loaders, where those are installed."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sportsllm
from export.kernels.library import VERSION, library_of
from export.layout import GRAPH_FILE, genai_config, not_opened_by
from export.runtime.session import called_version
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.sampling import Sampling, generate
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.config import Experts, Selection
from sportsllm.models.presets import preset
from tests.support import families
from tests.support.export_models import TINY

PROMPT = [0, 40, 70, 100, 200]


def greedy(checkpoint: Path, count: int = 20) -> list[int]:
    return list(generate(TorchDecoder(load_checkpoint(checkpoint)), PROMPT, count, Sampling(temperature=0)))


def opened_by_optimum(directory: Path) -> Any:
    optimum = pytest.importorskip("optimum.onnxruntime", reason="needs the extra [optimum]")
    return optimum.ORTModelForCausalLM.from_pretrained(str(directory), provider="CPUExecutionProvider")


def greedy_by_optimum(directory: Path) -> list[int]:
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    found: list[int] = opened_by_optimum(directory).generate(torch.tensor([PROMPT]), **settings)[0, 5:].tolist()
    return found


def test_optimum_generates_the_same_tokens(exported: Path, checkpoint: Path) -> None:
    assert greedy_by_optimum(exported) == greedy(checkpoint)


@pytest.mark.parametrize(
    ("family", "closed"),
    [
        ("qwen3", "it expects heads of 16 channels, these have 32"),
        ("gemma3", None),
        ("olmo2", "for olmo2 it expects a key head for each query head"),
        ("opt", None),
    ],
)
def test_what_optimum_opens_of_other_families(family: str, closed: str | None, tmp_path: Path) -> None:
    families.save(family, tmp_path / "checkpoint")
    sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", threads=1)
    reason = not_opened_by(load_config(tmp_path / "out"))
    assert reason is None if closed is None else str(reason).endswith(closed)
    with nullcontext() if closed is None else pytest.raises(Exception, match="invalid dimensions for input: past"):
        assert greedy_by_optimum(tmp_path / "out") == greedy(tmp_path / "checkpoint")


def test_optimum_inlines_layers_that_are_functions(exported_int4: Path) -> None:
    assert called_version(exported_int4 / GRAPH_FILE) == VERSION
    ours = generate(open_decoder(exported_int4, 2, "portable"), PROMPT, 20, Sampling(temperature=0))
    assert greedy_by_optimum(exported_int4) == list(ours)


def test_optimum_runs_standard_operators_with_padding_on_the_left(checkpoint: Path, int4: Path, tmp_path: Path) -> None:
    """Each row as if it were alone, packed or not."""
    long, short = PROMPT, [0, 99]
    for source in (checkpoint, int4):
        directory = tmp_path / f"{source.name}-onnx"
        sportsllm.export(source, out=directory, threads=2, format="standard")
        padded = torch.tensor([long, [0] * 3 + short])
        mask = torch.tensor([[1] * 5, [0] * 3 + [1] * 2])
        settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = opened_by_optimum(directory).generate(padded, attention_mask=mask, **settings)[:, 5:].tolist()
        decoder = open_decoder(directory, 2)
        assert found == [list(generate(decoder, row, 20, Sampling(temperature=0))) for row in (long, short)]
        if source == checkpoint:
            assert found[0] == greedy(checkpoint)


@pytest.mark.parametrize("registered", [False, True])
def test_onnxruntime_genai_runs_either_kernels(registered: bool, exported_int4: Path) -> None:
    """The same logits as ours with the library registered in its settings, bit for bit, and without.

    ONNX Runtime's own operators divide a sum among threads as it pleases: float32 in another order of additions.
    """
    genai = pytest.importorskip("onnxruntime_genai", reason="needs the extra [genai]")
    library = library_of(VERSION)
    if registered and library is None:
        pytest.skip("the kernels are not built")
    config = genai.Config(str(exported_int4))
    if registered:
        options = {"custom_ops_library": str(library)}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    parameters = genai.GeneratorParams(model := genai.Model(config))
    parameters.set_search_options(max_length=15, min_length=15, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(PROMPT)
    decoder = open_decoder(exported_int4, 2, "native" if registered else "portable")
    logits = decoder.prefill([PROMPT], 15)
    for _ in range(5):
        atol = 0.0 if registered else 1e-5
        np.testing.assert_allclose(generator.get_logits().reshape(-1), logits[0], atol=atol, rtol=0)
        generator.generate_next_token()
        logits = decoder.step([int(generator.get_next_tokens()[0])])


def test_onnxruntime_genai_generates_the_same_tokens(
    exported: Path, exported_int4: Path, checkpoint: Path, int4: Path, tmp_path: Path
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs the extra [genai]")
    sportsllm.export(checkpoint, out=tmp_path / "standard", threads=2, format="standard")
    sportsllm.export(int4, out=tmp_path / "half", dtype="fp16", threads=2)
    for directory in (exported, exported_int4, tmp_path / "standard", tmp_path / "half"):
        parameters = genai.GeneratorParams(model := genai.Model(str(directory)))
        parameters.set_search_options(max_length=25, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(PROMPT)
        tokens: list[int] = []
        while not generator.is_done() and len(tokens) < 20:
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        ours = list(generate(open_decoder(directory, 2, "portable"), PROMPT, 20, Sampling(temperature=0)))
        assert tokens == ours[: len(tokens)] and tokens


def test_genai_settings_name_what_the_graph_has() -> None:
    settings = genai_config(TINY.with_changes(eos_token_id=(1, 5), pad_token_id=None), "llama")
    assert settings["model"]["decoder"]["filename"] == GRAPH_FILE
    assert settings["model"]["decoder"]["inputs"]["past_key_names"] % 1 == "past_key_values.1.key"
    assert settings["model"]["eos_token_id"] == [1, 5] and "pad_token_id" not in settings["model"]
    assert settings["search"]["max_length"] == 64
    longer = genai_config(TINY.with_changes(max_position_embeddings=131_072), "llama")
    assert longer["model"]["context_length"] == 131_072
    assert longer["search"]["max_length"] == 1_024


def test_who_cannot_open_an_export_is_said() -> None:
    assert not_opened_by(TINY) is None
    own = not_opened_by(TINY.with_changes(mlp_kind="gelu"))
    assert own is not None and "onnxruntime-genai and this program can" in own
    mixtral = TINY.with_changes(mlp_kind="experts", experts=Experts(4, 2))
    assert "optimum cannot open the export" in str(not_opened_by(mixtral))
    selected = preset("tiny-1m").with_changes(attention_kind="selected", selection=Selection())
    for config, cached in (
        (preset("tiny-latent"), "latent vectors"),
        (preset("lstm-1m"), "hidden and cell vectors"),
        (selected, "selected_key, selected_value and selected_index vectors"),
    ):
        line = not_opened_by(config)
        assert line is not None and line.startswith(cached) and line.endswith("runs in this program alone")
