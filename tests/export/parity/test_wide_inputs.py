"""16-bit inputs for the matrices that 8-bit inputs harm."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sportsllm
from export.graph.builder import HALF, GraphForm
from export.graph.decoder import write_graph
from export.parity.comparison import DEPLOYED, Comparison, ParityReport, Pass
from export.parity.wide_inputs import InputGroup, Remedy, choose_groups, measure_groups, round_inputs
from export.runtime.decoder import OnnxDecoder
from sportsllm.errors import GateError
from sportsllm.formats.checkpoint import copy_tokenizer, load_checkpoint
from tests.support.export_models import CONTEXT, logits_of, pack_model, save, tiny_model
from tests.support.models import TINY_VOCAB

MASSIVE = 1500.0
"""How much larger a channel is than the others that share its step."""


def save_massive(directory: Path, bits: int = 8, **changes: Any) -> Path:
    """A packed model in which one norm makes a channel massive, and what reads it takes that back."""
    model = tiny_model(max_position_embeddings=CONTEXT, **changes)
    block = model.model.layers[1]
    with torch.no_grad():
        block.post_attention_layernorm.weight[40] *= MASSIVE
        for matrix in (block.mlp.gate_proj, block.mlp.up_proj):
            matrix.weight[:, 40] /= MASSIVE
    return save(directory, model, pack_model(model, bits))


LATENT = {"attention_kind": "latent", "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 12, "head_dim": 8}
FORMS = [(8, "onnx", {}), (8, "standard", {}), (4, "web", {}), (8, "onnx", LATENT | {"num_key_value_heads": 1})]


@pytest.mark.parametrize(("bits", "form", "changes"), FORMS)
def test_a_massive_channel_gets_16_bits(
    bits: int, form: str, changes: dict[str, Any], tokenizer_directory: Path, tmp_path: Path, capsys: Any
) -> None:
    """The exact pass holds the graph against PyTorch; the deployed one bounds what is left of rounding."""
    checkpoint = save_massive(tmp_path / "checkpoint", bits, **changes, vocab_size=TINY_VOCAB)
    copy_tokenizer(tokenizer_directory, checkpoint)
    cache = "int8" if form == "web" else None
    result = sportsllm.export(checkpoint, out=tmp_path / "out", format=form, threads=1, kv_cache=cache)
    names = [f"model.layers.1.mlp.{name}" for name in ("gate_proj", "up_proj")]
    head = ["model.embed_tokens"] if bits == 8 and form == "onnx" else []  # has 16 bits before the gate
    assert result.wide_inputs == [*head, *names] and result.parity["passed"]
    said = capsys.readouterr().err
    assert "8-bit inputs change this model too much (deployed pass, " in said
    assert f"16-bit inputs for {'head; ' if head else ''}gate_proj, up_proj of layer 1: " in said
    # Kernels of a feed-forward alone take no 16-bit inputs.
    assert said.count("kernels: called for all 2 layers and the head\n") == (form == "onnx") * (1 if changes else 2)
    assert said.count("texts that the model writes itself") == (form == "web"), "scales are measured once"
    parity = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert max(c["relative_error"] for item in parity["passes"] for c in item["comparisons"]) < 0.3


def test_keys_beyond_float16_need_a_float32_cache(tmp_path: Path) -> None:
    """A channel that does not turn and is alike in all keys adds the same to all scores."""
    model = tiny_model(max_position_embeddings=CONTEXT, attention_bias=True, rope_theta=1e30)
    for block in model.model.layers:
        with torch.no_grad():
            block.self_attn.q_proj.weight[15::16] *= 1e-4
            block.self_attn.q_proj.bias[15::16] = 0
            block.self_attn.k_proj.bias[15::16] = 1e5
    with pytest.raises(GateError, match=r": float16 changes this model too much .* published; try `kv_cache` fp32$"):
        sportsllm.export(save(tmp_path / "dense", model), out=tmp_path / "out", threads=1, kv_cache="fp16")
    checkpoint = save(tmp_path / "checkpoint", model, pack_model(model, 8))
    with pytest.raises(GateError, match="nothing was published; try `kv_cache` fp32; "):
        sportsllm.export(checkpoint, out=tmp_path / "out", threads=1)
    assert sportsllm.export(checkpoint, out=tmp_path / "out", threads=1, kv_cache="fp32").parity["passed"]


@pytest.mark.parametrize("standard", [False, True])
def test_all_inputs_in_16_bits_are_nearly_exact(standard: bool, tmp_path: Path) -> None:
    """8 bits change logits by some percent of their spread, 16 bits by a 254th of that. Last blocks are padded."""
    model = tiny_model(intermediate_size=100, hidden_size=72)
    save(tmp_path, model, pack_model(model, 8))
    tokens = np.random.default_rng(0).integers(0, 96, 60).tolist()
    modules = frozenset(name for group in measure_groups(model) for name in group.modules)
    write_graph(tmp_path, tmp_path, GraphForm("standard" if standard else "onnx", wide_inputs=modules))
    found, wanted = OnnxDecoder(tmp_path, 1, kernels="portable").logits(tokens), logits_of(model, tokens)
    assert np.abs(found - wanted).max() < 1e-3 * wanted.std()


def test_a_model_that_passes_keeps_its_bytes(tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=CONTEXT)
    save(tmp_path / "checkpoint", model, pack_model(model, 8))
    result = sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", threads=1)
    (plain := tmp_path / "plain").mkdir()
    write_graph(tmp_path / "checkpoint", plain, GraphForm(cached=HALF))
    assert result.wide_inputs == ["model.embed_tokens"]
    assert all((tmp_path / "out" / file.name).read_bytes() == file.read_bytes() for file in plain.iterdir())


def test_the_massive_group_does_most_damage(tmp_path: Path) -> None:
    groups = measure_groups(load_checkpoint(save_massive(tmp_path)))
    assert len(groups) == 9 and groups[-1].modules in [("lm_head",), ("model.embed_tokens",)] and groups[-1].damage
    worst = max(groups, key=lambda group: group.damage)
    assert worst.modules == ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    assert worst.damage > 100 * sum(group.damage for group in groups if group is not worst)


def test_groups_with_most_damage_per_weight_come_first() -> None:
    groups = [InputGroup(("a",), 100, 4.0), InputGroup(("b",), 10, 3.0), InputGroup(("c",), 1, 1.0)]
    assert [group.modules for group in choose_groups(groups, 0.6)] == [("c",), ("b",)]
    assert len(choose_groups(groups, 0.0)) == 3 and choose_groups(groups, 1.0) == []
    missed = Pass("deployed", DEPLOYED["int8"], (Comparison("prefill", 1, 0.0, 3.0, 2e-2, 1.0),))
    report = ParityReport("int8", (missed,), (), None)
    assert report.excess() == 9.0 and report.only_rounding_failed()  # damages are squares
    assert not ParityReport("int8", (missed,), ("cos_cache",), None).only_rounding_failed()


def test_inputs_are_rounded_block_by_block() -> None:
    x = torch.tensor([[127.0, 0.6, -3.4, 0.0, 1e-3, 0.0]])
    found = round_inputs(x, 4)
    assert found.shape == x.shape
    torch.testing.assert_close(found, torch.tensor([[127.0, 1.0, -3.0, 0.0, 1e-3, 0.0]]))


def test_a_remedy_is_one_line() -> None:
    names = ("model.layers.10.mlp.down_proj", "model.layers.2.mlp.down_proj", "model.embed_tokens")
    line = str(Remedy(frozenset(names), 0.25))
    assert line == "16-bit inputs for head; down_proj of layers 2, 10: 25.0% of all products are computed twice"
