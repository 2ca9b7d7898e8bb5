"""The scales of an INT8 cache, and exports that have one, read by the runtime and by loaders of other habits."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sportsllm
from export.cache_scales import RoundedCache
from export.parity.comparison import EXACT_INT8_CACHE
from export.runtime.decoder import OnnxDecoder
from export.runtime.session import open_session
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import write_json
from sportsllm.formats.manifest import read_manifest
from sportsllm.models.layers import KVCache
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.export_models import Exports, int8_samples, measured_scales, tiny_model


@pytest.mark.parametrize("part", [0, 1])
def test_scales_have_the_least_error_of_their_channel(part: int) -> None:
    model = tiny_model(attention_bias=True)
    torch.nn.init.constant_(model.model.layers[1].self_attn.v_proj.bias, -9.0)  # values are below 0
    found = measured_scales(model, int8_samples())
    assert [tuple(scale.shape) for scale in found.states] == [(2, 2, 16)] * 2
    seen = []
    for tokens in int8_samples():
        cache = KVCache(model.config, 1, 60)
        model.hidden(tokens, cache=cache)
        seen.append(cache.tensors[part][1, 0, 1, :, 3].double())
    numbers = torch.cat(seen).detach().numpy()

    def error(scale: float) -> float:
        return float(np.square(np.clip(np.rint(numbers / scale), -128, 127) * scale - numbers).sum())

    largest = np.abs(numbers).max() / 127
    best = min(error(largest * share) for share in np.linspace(0.3, 1.3, 400))
    mine = error(float(found.states[part][1, 1, 3]))
    assert mine <= error(largest) * (1 + 1e-4)
    assert mine <= 1.1 * best, "33 tries come near what 400 find"


def test_silent_channels_keep_a_scale_above_zero() -> None:
    model = tiny_model()
    torch.nn.init.zeros_(model.model.layers[0].self_attn.k_proj.weight)
    assert (measured_scales(model, int8_samples()).states[0] > 0).all()
    with pytest.raises(ArtifactError, match="no calibration text"):
        measured_scales(model, [])


def test_the_command_reads_training_text(checkpoint: Path, exported: Path, corpus_file: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(checkpoint, tmp_path / "in"))
    write_json(source / "manifest.json", {"format": 1, "files": {}, "settings": {"corpus": [str(corpus_file)]}})
    result = sportsllm.export(source, out=tmp_path / "out", threads=1, kv_cache="int8", settings=["samples=8"])
    assert result.kv_cache == "int8" and result.parity["passed"]
    made = read_manifest(tmp_path / "out").settings
    assert made["kv_cache"] == "int8" and made["samples"] == 8 and made["calibration"] == [str(corpus_file)]
    plain = OnnxDecoder(tmp_path / "out", 1).logits([5, 6, 7, 8])
    full = OnnxDecoder(exported, 1).logits([5, 6, 7, 8])
    assert 0 < np.abs(plain - full).max() < 0.1 * full.std()


def test_without_text_the_model_writes_its_own(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sportsllm.export(checkpoint, out=tmp_path / "out", threads=1, kv_cache="int8").parity["passed"]
    assert "texts that the model writes itself" in capsys.readouterr().err


@pytest.mark.parametrize("kv_cache", [None, "fp16"])
def test_unread_text_is_refused(checkpoint: Path, corpus_file: Path, tmp_path: Path, kv_cache: str | None) -> None:
    for options in ({"calibration": [corpus_file]}, {"settings": ["samples=4"]}):
        with pytest.raises(UsageError, match=r"(calibration`|samples) is for `kv_cache` int8"):
            sportsllm.export(checkpoint, out=tmp_path / "out", kv_cache=kv_cache, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("head_dim", "bits", "qk_norm"), [(16, None, False), (8, None, True), (16, 4, True), (8, 4, False)]
)
def test_the_graph_keeps_what_the_reference_keeps(
    head_dim: int, bits: int | None, qk_norm: bool, exports: Exports
) -> None:
    export = exports(bits, cache="int8", head_dim=head_dim, qk_norm=qk_norm)
    report, model, scales = export.report, export.model, export.scales
    assert report.failures() == []
    assert [item.name for item in report.passes if not item.name.startswith("native")] == (
        ["exact"] if bits is None else ["exact", "deployed"]
    )
    assert max(c.relative_error for c in report.passes[0].comparisons) < EXACT_INT8_CACHE.error / 3
    if bits is not None:
        return
    assert scales is not None
    decoder, tokens = OnnxDecoder(export.directory, 1), int8_samples(1, 30)[0]
    decoder.prefill([tokens[0].tolist()], 40)
    cache = KVCache(model.config, 1, 40)
    with torch.inference_mode():
        model.hidden(tokens, cache=RoundedCache(model.config, 30, scales))
        model.hidden(tokens, cache=cache)
    assert decoder._cache is not None
    kept = decoder._cache.buffers["0.key"][0]
    assert kept.dtype == np.int8 and decoder._cache.buffers["1.value"].dtype == np.int8
    expected = torch.clamp(torch.round(cache.tensors[0][0, 0] / scales.states[0][0][:, None]), -128, 127).numpy()
    # The first layer reads the same inputs: only a number in the very middle between two steps may differ.
    assert (kept[:, :30] == expected[:, :30]).mean() > 0.999


def test_graphs_serve_loaders_of_other_habits(exports: Exports) -> None:
    """A cache that is a new tensor each time, and long prompts of several sequences."""
    export = exports(cache="int8")
    decoder, tokens = OnnxDecoder(export.directory, 1), torch.cat(int8_samples(2, 60)).numpy()
    expected = [decoder.logits(row.tolist()) for row in tokens]
    session = open_session(export.directory, export.model.config, 1)
    names = [f"{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]

    def read(ids: Any, past: list[Any]) -> list[Any]:
        feeds = {"input_ids": ids, "attention_mask": np.ones((len(ids), past[0].shape[2] + ids.shape[1]), np.int64)}
        return session.run(None, feeds | {f"past_key_values.{n}": p for n, p in zip(names, past, strict=True)})

    empty = [np.zeros((2, 2, 0, 16), np.int8)] * 4
    together = read(tokens, empty)
    np.testing.assert_allclose(together[0], np.stack(expected), atol=1e-4, rtol=0)
    # One sequence in two long pieces, past growing.
    first = read(tokens[:1, :40], [part[:1] for part in empty])
    second = read(tokens[:1, 40:], first[1:])
    assert second[1].shape == (1, 2, 60, 16)
    np.testing.assert_allclose(np.concatenate([first[0], second[0]], axis=1)[0], expected[0], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(second[1], together[1][:1])


def test_onnxruntime_genai_reads_long_prompts(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs the extra [genai]")
    sportsllm.export(checkpoint, out=tmp_path / "out", threads=1, kv_cache="int8", calibration=[corpus_file])
    decoder = OnnxDecoder(tmp_path / "out", 1)
    prompt = load_tokenizer(checkpoint, decoder.config).encode(corpus_file.read_text(encoding="utf-8"))[:60]
    parameters = genai.GeneratorParams(model := genai.Model(str(tmp_path / "out")))
    parameters.set_search_options(max_length=75, min_length=75, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(prompt)
    logits = decoder.prefill([prompt], max_length=75)
    for _ in range(10):
        # One cache of the same numbers each: what genai's graph gives is what ours gives.
        np.testing.assert_allclose(generator.get_logits().reshape(-1), logits[0], atol=1e-4, rtol=0)
        generator.generate_next_token()
        logits = decoder.step([int(generator.get_next_tokens()[0])])
