"""GGUF files: their formats against the package `gguf`, and checkpoints that come back from them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import TokenType

import sportsllm
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from export.gguf.tokenizer import tokenizer_metadata
from export.gguf.write import GGUF_FILE, encode, write_gguf
from sportsllm.errors import ArtifactError, GateError, UsageError
from sportsllm.files import read_json, write_json
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.gguf.convert import convert_gguf
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed import QuantizedWeight, pack
from sportsllm.inference.decoder import open_decoder
from sportsllm.models.config import Experts
from sportsllm.models.rope import RopeScaling
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.text.tokenizer_training import train_tokenizer
from tests.support.checkpoint_files import edit_json
from tests.support.models import TINY_VOCAB, saved, tiny_model

TEXTS = ("The home side won 3-1, 12345 people saw it.", " two  spaces\n\tand “quotes”", "Zoë ran 57½ m ⚽ 한국")


def packed(bits: int, block_size: int, zeros: bool, columns: int = 128) -> QuantizedWeight:
    """A random matrix whose scales float16 holds exactly."""
    rng, groups = np.random.default_rng(bits + block_size), -(-columns // block_size)
    quants = rng.integers(bits == 8, 2**bits, (6, groups, block_size), dtype=np.uint8)
    scales = (rng.integers(1, 64, (6, groups)) / 1024).astype(np.float32)
    points = pack(rng.integers(0, 2**bits, (6, groups), dtype=np.uint8), bits) if zeros else None
    return QuantizedWeight(pack(quants, bits), scales, points, bits, block_size, columns)


@pytest.mark.parametrize(
    ("bits", "block_size", "zeros", "name"),
    [
        (4, 32, False, "Q4_0"),
        (4, 32, True, "Q4_1"),
        (8, 32, False, "Q8_0"),
        (4, 128, True, "Q4_1"),
        (8, 64, False, "Q8_0"),
    ],
)
def test_packed_numbers_are_those_that_gguf_reads(bits: int, block_size: int, zeros: bool, name: str) -> None:
    weight = packed(bits, block_size, zeros)
    values, kind = encode(weight, "module")
    assert kind.name == name
    assert np.array_equal(gguf.dequantize(values, kind), weight.dequantize())


def test_q8_0_has_the_range_of_the_reference_quantizer() -> None:
    """Readers negate codes: -128 and negative scales, which our grid has, must not reach the file."""

    def fields(blocks: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int8]]:
        by_block = blocks.reshape(-1, 34)
        return by_block[:, :2].copy().view(np.float16), by_block[:, 2:].view(np.int8)

    quants = np.arange(6 * 128, dtype=np.int64).reshape(6, 4, 32).astype(np.uint8)  # every code three times
    signs = np.where(np.arange(24).reshape(6, 4) % 2, -1, 1).astype(np.float32)
    weight = QuantizedWeight(pack(quants, 8), signs / 64, None, 8, 32, 128)
    values, kind = encode(weight, "module")
    wanted = weight.dequantize()
    (scales, codes), (theirs, their_codes) = fields(values), fields(gguf.quantize(wanted, kind))
    assert theirs.min() >= 0 and min(their_codes.min(), codes.min()) == -127 and scales.min() > 0
    error = np.abs(gguf.dequantize(values, kind) - wanted)
    assert error.max() == 1 / 64 and np.count_nonzero(error) == 3  # the codes of -128 alone


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_gguf_has_no_format_for_is_refused_by_name(tmp_path: Path) -> None:
    for weight, message in ((packed(4, 16, False), "down_proj: blocks of 16"), (packed(8, 32, True), "symmetric=true")):
        with pytest.raises(UsageError, match=message):
            encode(weight, "down_proj")
    torch.nn.init.constant_((model := tiny_model()).model.embed_tokens.weight, 1e5)
    with pytest.raises(ArtifactError, match=r"'model\.embed_tokens\.weight' has values beyond float16"):
        write_gguf(saved(tmp_path / "model", model), tmp_path / GGUF_FILE, {}, half=True)


def test_a_longer_context_is_in_the_file(checkpoint: Path, tmp_path: Path) -> None:
    sportsllm.export(checkpoint, out=tmp_path / "gguf", rope_scaling="yarn:4", format="gguf")
    convert_gguf(tmp_path / "gguf" / GGUF_FILE, tmp_path / "back")
    before, after = load_config(checkpoint), load_config(tmp_path / "back")
    scaling = RopeScaling("yarn", 4.0, original_max_position_embeddings=before.max_position_embeddings)
    longer = {"max_position_embeddings": 4 * before.max_position_embeddings, "rope_scaling": scaling}
    assert after == before.with_changes(**longer)
    odd = tmp_path / "odd"
    for other, said in (
        (replace(scaling, attention_factor=1.5), "YaRN with other settings"),
        (RopeScaling("llama3", 4.0, original_max_position_embeddings=64), "llama3 scaling with other settings"),
        (RopeScaling("longrope", 4.0, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8), "longrope's factors are not"),
    ):
        saved(odd, tiny_model(rope_scaling=other), checkpoint)
        with pytest.raises(UsageError, match=said):
            sportsllm.export(odd, out=tmp_path / "refused", format="gguf")
        assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "llama"),
        (
            {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
            | {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)},
            "llama",
        ),
        ({"attention_bias": True, "rope_scaling": RopeScaling("linear", 2.0)}, "qwen2"),
        ({"qk_norm": True, "rope_scaling": RopeScaling("yarn", 4.0, original_max_position_embeddings=32)}, "qwen3"),
    ],
)
def test_a_dense_checkpoint_comes_back_bit_for_bit(
    changes: dict[str, Any], architecture: str, tokenizer_directory: Path, tmp_path: Path
) -> None:
    model = tiny_model(**changes)
    saved(tmp_path / "model", model, tokenizer_directory)
    result = sportsllm.export(tmp_path / "model", out=tmp_path / "gguf", format="gguf")
    assert result.architecture == architecture and result.formats.keys() == {"F32"}
    assert result.size_bytes > 4 * model.config.parameters and result.parity["kl"] == 0
    file = tmp_path / "gguf" / GGUF_FILE
    with pytest.raises(ArtifactError, match=f"give the GGUF file itself, {file}"):
        load_config(tmp_path / "gguf")
    with pytest.raises(ArtifactError, match=f"{file}: is a file, not a directory; give a checkpoint or an export"):
        open_decoder(file)
    convert_gguf(file, tmp_path / "back")
    back = load_checkpoint(tmp_path / "back")
    assert back.config == load_config(tmp_path / "model")
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    ours, again = load_tokenizer(tmp_path / "model"), load_tokenizer(tmp_path / "back")
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert (tmp_path / "gguf" / "Modelfile").read_text(encoding="utf-8").startswith(f"FROM ./{GGUF_FILE}\n")


@pytest.mark.parametrize(("bits", "symmetric", "main"), [(4, False, "Q4_1"), (4, True, "Q4_0"), (8, True, "Q8_0")])
def test_a_packed_checkpoint_keeps_its_numbers(
    bits: int, symmetric: bool, main: str, checkpoint: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(checkpoint, tmp_path / "packed", QuantizationConfig(bits, symmetric=symmetric), method="rtn")
    result = sportsllm.export(tmp_path / "packed", out=tmp_path / "gguf", format="gguf")
    assert main in result.formats
    with pytest.raises(UsageError, match=r"`dtype` fp16: .* is packed already"):
        sportsllm.export(tmp_path / "packed", out=tmp_path / "half", format="gguf", dtype="fp16")
    convert_gguf(tmp_path / "gguf" / GGUF_FILE, tmp_path / "back")
    back, ours = load_checkpoint(tmp_path / "back"), load_checkpoint(tmp_path / "packed")
    for block, other in zip(back.model.layers, ours.model.layers, strict=True):
        found, wanted = block.self_attn.k_proj.weight, other.self_attn.k_proj.weight
        # Scales, and least values of up to 15 of them, are rounded to 11 bits; -128 becomes -127.
        most = 2**-11 * 2 * 15 / 7 if bits == 4 else 1 / 120
        assert (found - wanted).abs().max() <= most * wanted.abs().max()


def test_experts_that_are_nearly_level_do_not_stop_an_export(tokenizer_directory: Path, tmp_path: Path) -> None:
    """Scales in float16 send some tokens to other experts: in this model their logits differ by more than the limit."""
    model = tiny_model(mlp_kind="experts", experts=Experts(8, 2), tie_word_embeddings=False, std=0.05)
    saved(tmp_path / "model", model, tokenizer_directory)
    quantize_checkpoint(tmp_path / "model", tmp_path / "packed", QuantizationConfig(4), method="rtn")
    parity = sportsllm.export(tmp_path / "packed", out=tmp_path / "gguf", format="gguf").parity
    assert parity["passed"] and parity["max_abs_logit_error"] < 0.1
    logits, routers = json.loads((tmp_path / "gguf" / "parity.json").read_text(encoding="utf-8"))["passes"]
    assert logits["comparisons"][0]["greedy_match"] == parity["greedy_match"] and routers["name"] == "routers"
    mixed = QuantizationConfig(4, modules={"model.layers.1.mlp.experts.3.down_proj": 8})
    quantize_checkpoint(tmp_path / "model", tmp_path / "mixed", mixed, method="rtn")
    with pytest.raises(UsageError, match=r"^blk.1.ffn_down_exps.weight: its parts have several types"):
        sportsllm.export(tmp_path / "mixed", out=tmp_path / "refused", format="gguf")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_comes_back(prefix: bool, stories: Path, tmp_path: Path) -> None:
    """With the order of its merges, which is that of the scores."""
    file = shutil.copytree(stories, tmp_path / "model") / "tokenizer.json"
    if not prefix:
        edit_json(file, normalizer=read_json(file)["normalizer"]["normalizers"][1])
    result = sportsllm.export(tmp_path / "model", out=tmp_path / "gguf", format="gguf", dtype="fp16")
    assert result.formats.keys() == {"F16", "F32"}
    convert_gguf(tmp_path / "gguf" / GGUF_FILE, tmp_path / "back")
    ours, again = load_tokenizer(tmp_path / "model"), load_tokenizer(tmp_path / "back")
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    merges = [read_json(path / "tokenizer.json")["model"]["merges"] for path in (tmp_path / "model", tmp_path / "back")]
    made, wanted = (list(dict.fromkeys("".join(pair) for pair in each)) for each in merges)
    assert made == wanted


def test_a_tokenizers_habits_have_names_in_llama_cpp(checkpoint: Path, texts: list[str], tmp_path: Path) -> None:
    """Single digits, a text's begin token, and added tokens that are shown."""
    source = shutil.copytree(checkpoint, tmp_path / "source")
    train_tokenizer(texts, TINY_VOCAB, source, "single")
    data = read_json(source / "tokenizer.json")
    for begins in (True, False):
        found = tokenizer_metadata(source, load_config(source))
        assert (found["ggml.pre"], found["ggml.add_bos_token"]) == ("smollm", begins)
        assert found["ggml.token_type"][2] == (TokenType.CONTROL if begins else TokenType.USER_DEFINED)
        data["post_processor"], data["added_tokens"][2]["special"] = None, False
        write_json(source / "tokenizer.json", data)


def test_special_tokens_that_gguf_cannot_name(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"eos_token_id": (1, 5, 6, 7), "pad_token_id": -1, "vocab_size": TINY_VOCAB + 1}
    found = tokenizer_metadata(checkpoint, load_config(checkpoint).with_changes(**changes))
    assert (found["ggml.tokens"][-1], found["ggml.token_type"][-1]) == (f"[PAD{TINY_VOCAB}]", TokenType.UNUSED)
    assert [found.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom", "padding")] == [1, 5, 6, None]
    assert f"llama.cpp will not stop at {found['ggml.tokens'][7]}" in capsys.readouterr().err


def test_tokenizers_that_gguf_cannot_say_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "model")
    data = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    word_piece = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 9}
    word_piece["continuing_subword_prefix"] = "##"
    sentencepiece = {"normalizer": replace, "pre_tokenizer": None}
    for changes, message in (
        ({"normalizer": {"type": "Lowercase"}}, "none of llama.cpp's"),
        ({"model": word_piece}, "is WordPiece"),
        ({"model": None}, "not a readable tokenizer"),
        ({"model": {**data["model"], "merges": [3]}}, "not a readable tokenizer"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}, "it has no tokens"),
        ({"model": {**data["model"], "dropout": 1.0}}, "would split 'The home"),
        ({"model": {**data["model"], "byte_fallback": True}}, "not SentencePiece's"),
        ({"model": {**data["model"], "byte_fallback": True}, **sentencepiece}, "no unknown token"),
    ):
        (copy / "tokenizer.json").write_text(json.dumps({**data, **changes}), encoding="utf-8")
        with pytest.raises((ArtifactError, GateError), match=message):
            sportsllm.export(copy, out=tmp_path / "out", format="gguf")
