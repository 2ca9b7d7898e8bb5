"""Stretched rotary tables against `transformers`: its functions, and its model on the same tiny weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import sportsllm
from export.runtime.decoder import OnnxDecoder
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.formats.huggingface import checkpoint_with, config_from_hf, load_config, to_hf
from sportsllm.models.rope import RopeScaling, attention_factor, inverse_frequencies, rope_tables, with_rope_scaling
from tests.support.models import tiny_config, tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn, original context unset": {"rope_type": "yarn", "factor": 2.0},
    "yarn, attention factor": {**YARN, "attention_factor": 1.5},
    "yarn, both mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, one mscale counts for nothing": {**YARN, "mscale": 0.7},
    "yarn, other turns, not truncated": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
}  # fmt: skip

LONGROPE = {
    "type": "longrope", "short_factor": [1.0 + pair / 8 for pair in range(8)],
    "long_factor": [1.0 + pair for pair in range(8)],
}  # fmt: skip


def their_config(scaling: dict[str, Any], **changes: Any) -> transformers.LlamaConfig:
    shape: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "bos_token_id": 1, "eos_token_id": 2, "rope_scaling": scaling,
    }  # fmt: skip
    return transformers.LlamaConfig(**shape | changes)


@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 8), (1_000_000.0, 128)])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_angles_and_attention_factor_are_those_of_transformers(
    scaling: dict[str, Any], theta: float, head_dim: int
) -> None:
    theirs = their_config(scaling, rope_theta=theta, head_dim=head_dim)
    inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu")
    ours = config_from_hf(json.loads(theirs.to_json_string()))
    # They compute in float32 and we in float64: a few units in the last of 24 bits.
    np.testing.assert_allclose(inverse_frequencies(ours), inverse.numpy(), rtol=1e-6)
    assert attention_factor(ours.rope_scaling) == pytest.approx(factor)
    cos, sin = rope_tables(ours)
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-5)


def peer_of(kind: str) -> transformers.PreTrainedModel:
    """`transformers`' model with this scaling, weights large enough for attention to look around."""
    torch.manual_seed(0)
    if kind == "longrope":
        plain = their_config(SCALINGS["linear"]).to_dict()
        plain |= {"original_max_position_embeddings": 64, "rope_scaling": dict(LONGROPE), "pad_token_id": 0}
        phi3 = transformers.Phi3Config(**{key: value for key, value in plain.items() if key != "model_type"})
        model: Any = transformers.Phi3ForCausalLM(phi3).float().eval()
    else:
        model = transformers.LlamaForCausalLM(their_config(SCALINGS[kind])).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", ["longrope", "yarn, other turns, not truncated"])
def test_models_and_both_graphs_give_their_logits_beyond_the_original_context(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = peer_of(kind)
    peer.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(0, 96, (1, 200), generator=torch.Generator().manual_seed(1))
    config, scaling = load_config(tmp_path / "theirs"), None
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "longrope":
        assert config.max_position_embeddings == 64
        scaling = "longrope:4"
        config = with_rope_scaling(config, scaling)
        assert with_rope_scaling(config, "longrope:2").max_position_embeddings == 128  # of the original context
    with torch.inference_mode(), checkpoint_with(tmp_path / "theirs", config) as longer:
        wanted = peer(tokens).logits[0].numpy()
        plain = load_checkpoint(longer)(tokens)[0].numpy()
    found = {"pytorch": plain}
    for name, standard in (("ort", False), ("standard", True)):
        form = "standard" if standard else "onnx"
        sportsllm.export(tmp_path / "theirs", out=tmp_path / name, format=form, threads=1, rope_scaling=scaling)
        found[name] = OnnxDecoder(tmp_path / name, 1).logits(tokens[0].tolist())
    # Float32 in another order; 1e-4 of the spread is 30 times what is seen.
    for name, logits in found.items():
        assert np.abs(logits - wanted).max() < 1e-4 * np.ptp(wanted), name
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("longrope with the long factors, for a context of 256 tokens") == 2 * (scaling is not None)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_stretched_checkpoint_opens_there_as_the_same_model(kind: str, tmp_path: Path) -> None:
    original = {} if kind == "linear" else {"original_max_position_embeddings": 128}
    ours = tiny_model(max_position_embeddings=512, rope_scaling=RopeScaling(kind, 4.0, **original))
    assert kind != "yarn" or with_rope_scaling(tiny_config(), "yarn:4") == ours.config
    save_checkpoint(tmp_path, ours)
    assert load_config(tmp_path) == ours.config
    written = json.loads((tmp_path / "config.json").read_text())["rope_scaling"]
    assert (written["rope_type"], written["factor"]) == (kind, 4.0)
    assert ("original_max_position_embeddings" in written) == (kind != "linear")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(0, 384, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = there(tokens).logits
        assert (ours(tokens) - wanted).abs().max() < 1e-4 * float(wanted.max() - wanted.min())


def test_records_go_there_and_back_in_both_layouts() -> None:
    scalings = [
        RopeScaling("linear", 2.0),
        RopeScaling("llama3", 8.0, 1.0, 4.0, 128),
        RopeScaling("yarn", 4.0, original_max_position_embeddings=32),
        RopeScaling("yarn", 4.0, original_max_position_embeddings=32, attention_factor=1.2, truncate=False),
        RopeScaling("yarn", 4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0),
        RopeScaling(
            "longrope", 4.0, original_max_position_embeddings=32, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8
        ),
    ]
    for scaling in scalings:
        config = tiny_config(rope_scaling=scaling)
        data = json.loads(json.dumps(to_hf(config)))
        own = {key: value for key, value in vars(config).items() if key != "rope_scaling"}
        layouts = data, {**own, "model_type": "sportsllm", "rope_scaling": data["rope_scaling"]}
        assert [config_from_hf(layout) for layout in layouts] == [config, config]
    old = {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}  # written by earlier versions
    assert config_from_hf(to_hf(tiny_config()) | {"rope_scaling": old}).rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported; use none or linear, llama3, yarn"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor is 0.5; it must be at least 1"),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor is nan"),
        ({**YARN, "low_freq_factor": 1.0}, "unknown field 'low_freq_factor'"),
        ({**YARN, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_slow"),
        ({**YARN, "attention_factor": -1.0}, "attention_factor"),
        ({**YARN, "attention_factor": float("nan")}, "attention_factor"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({**YARN, "factor": "four"}, "wrong type"),
        ({**LONGROPE, "factor": 2.0, "long_factor": [1.0]}, "longrope needs short_factor and long_factor"),
        (
            {**LONGROPE, "factor": 2.0, "original_max_position_embeddings": 1},
            "original_max_position_embeddings must be",
        ),
        ({**LONGROPE, "factor": 2.0, "short_factor": [0.0] * 8}, "short_factor and long_factor must be above 0"),
        ({**LONGROPE, "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}, "longrope has 1 factors; 8 rotary"),
    ],
)
def test_bad_records_are_refused_by_name(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(ArtifactError, match=named):
        config_from_hf(to_hf(tiny_config()) | {"rope_scaling": scaling})


def test_yarn_needs_a_base_above_one() -> None:
    with pytest.raises(UsageError, match="rope_theta is 1"):
        rope_tables(with_rope_scaling(tiny_config(rope_theta=1.0), "yarn:2"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ntk:4", "'ntk' is not a type; give TYPE:FACTOR, for example yarn:4"),
        ("yarn", "no factor"),
        ("yarn:four", "no factor"),
        ("yarn:0.5", "from 1 to 131,072"),
        ("yarn:nan", "from 1 to"),
        ("yarn:1e9", "at most 16,777,216 positions of float32"),
        ("longrope:2", "longrope is for models that were trained with it"),
    ],
)
def test_bad_requests_are_refused(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        with_rope_scaling(tiny_config(), text)
