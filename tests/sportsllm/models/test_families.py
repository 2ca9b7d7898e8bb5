"""Every family against `transformers` on the same small weights, both ways."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import checkpoint_with, config_from_hf, family_of, load_config, to_hf
from sportsllm.models.config import FULL, SLIDING, UNROTATED, Experts
from sportsllm.models.experts import route
from sportsllm.models.layers import KVCache
from sportsllm.training.loss import cross_entropy
from tests.support import families
from tests.support.checkpoint_files import edit_json, edit_tensors, one_line, refused
from tests.support.models import saved, tiny_config, tiny_model

# Float32 sums in another order, as a share of the logits' spread.
TOLERANCE = 1e-5
TOKENS = torch.randint(0, 384, (2, 32), generator=torch.Generator().manual_seed(1))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("name", families.PLAIN | families.CONFIGS)
def test_logits_are_theirs_and_again_theirs_when_saved(name: str, tmp_path: Path) -> None:
    peer = families.save(name, tmp_path / "theirs")
    ours = load_checkpoint(tmp_path / "theirs")
    saved(tmp_path / "ours", ours)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    cache, row = KVCache(ours.config, 2, 32), TOKENS.reshape(1, -1)[:, :50]
    with torch.inference_mode():
        wanted = peer(TOKENS).logits
        parts = [ours(TOKENS[:, :10], cache), ours(TOKENS[:, 10:20], cache)]
        parts += [ours(TOKENS[:, i : i + 1], cache) for i in range(20, 32)]
        assert distance(ours(TOKENS), wanted) < TOLERANCE
        assert distance(torch.cat(parts, dim=1), wanted) < TOLERANCE
        assert distance(again(TOKENS).logits, wanted) < TOLERANCE
        assert distance(ours(row, documents=(30, 50))[0, 30:], ours(row[:, 30:])[0]) < TOLERANCE
    assert load_config(tmp_path / "ours") == ours.config
    # Fused matrices come apart, and what is left is LLaMA's or, with a window, Mistral's; V2 in order is V3.
    written = {"phi3": "LlamaForCausalLM", "phi3-longrope": "LlamaForCausalLM", "phi3-sliding": "MistralForCausalLM"}
    written["deepseek-v2"] = "DeepseekV3ForCausalLM"
    assert type(again).__name__ == written.get(name, type(peer).__name__)
    biases = sum(buffer.numel() for name, buffer in peer.named_buffers() if name.endswith("correction_bias"))
    unread = 2 * ours.config.hidden_size if name == "opt" else 0  # OPT's positions begin at the third row
    assert ours.config.parameters == sum(parameter.numel() for parameter in peer.parameters()) + biases - unread


def test_an_absent_epsilon_or_rotary_base_is_that_of_transformers() -> None:
    for name, config in (families.PLAIN | families.CONFIGS).items():
        given, usual = config.to_dict(), type(config)().to_dict()
        absent = [key for key in given if "_eps" in key or key in ("rope_theta", "rotary_emb_base")]
        short = {key: value for key, value in given.items() if key not in absent or value != usual.get(key)}
        assert config_from_hf(short) == config_from_hf(given), name


def test_deepseek_v2_scales_its_scores_as_published(tmp_path: Path) -> None:
    """DeepSeek's code multiplies scores by the square of mscale_all_dim's factor; transformers 4.57 does not."""
    peer = families.save("deepseek-v2-yarn", tmp_path)
    scaling = families.CONFIGS["deepseek-v2-yarn"].rope_scaling | {"mscale": 0.707, "mscale_all_dim": 0.707}
    edit_json(tmp_path / "config.json", rope_scaling=scaling)
    peer.model.rotary_emb.attention_scaling = 1.0  # the ratio of two equal factors
    for layer in peer.model.layers:
        layer.self_attn.scaling *= (1 + 0.1 * 0.707 * math.log(8.0)) ** 2
    with torch.inference_mode():
        assert distance(load_checkpoint(tmp_path)(TOKENS), peer(TOKENS).logits) < TOLERANCE


def test_closed_groups_of_experts_stay_closed() -> None:
    """With negative biases alone an expert of a closed group, ranked 0, would win (DeepSeek-V3)."""
    experts = Experts(8, 2, router="sigmoid", choice_bias=True, groups=4, active_groups=1)
    mixture = tiny_model(mlp_kind="experts", experts=experts).model.layers[0].mlp
    with torch.no_grad():
        mixture.gate.bias.fill_(-3.0)
    _, chosen_XK, _ = route(mixture, torch.randn(20, 64, generator=torch.Generator().manual_seed(0)))
    assert (chosen_XK[:, 0] // 2 == chosen_XK[:, 1] // 2).all()


@pytest.mark.parametrize(
    ("name", "prefix", "layer"), [("gpt2", "transformer.", "h.0.attn"), ("gpt-neox", "", "gpt_neox.layers.0.attention")]
)
def test_gpt_as_it_was_first_published(name: str, prefix: str, layer: str, tmp_path: Path) -> None:
    """The causal mask and rotary frequencies are among the tensors, and GPT-2's names lack their first part."""
    peer, file = families.save(name, tmp_path), tmp_path / "model.safetensors"
    tensors = {each.removeprefix(prefix): tensor for each, tensor in load_file(file).items()}
    tensors[f"{layer}.bias"] = torch.ones(1, 1, 320, 320).tril()
    if name == "gpt-neox":
        tensors |= {f"{layer}.masked_bias": torch.tensor(-1e9), f"{layer}.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors, file, metadata={"format": "pt"})
    with torch.inference_mode():
        assert distance(load_checkpoint(tmp_path)(TOKENS), peer(TOKENS).logits) < TOLERANCE


def test_bounded_scores_and_logits_have_their_gradients(tmp_path: Path) -> None:
    peer = families.save("gemma2", tmp_path)
    ours = load_checkpoint(tmp_path)
    logits_NV = peer(TOKENS[:, :-1]).logits.flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits_NV, TOKENS[:, 1:].flatten(), reduction="sum")
    hidden, cap = ours.hidden(TOKENS[:, :-1]), ours.config.logit_softcap
    found = cross_entropy(hidden, ours.head_weight, TOKENS[:, 1:], softcap=cap)
    wanted.backward()
    found.backward()
    assert abs(float(found.detach() - wanted.detach())) < TOLERANCE * float(wanted.detach())
    for name in ("embed_tokens", *(f"layers.0.self_attn.{part}_proj" for part in "qkvo")):
        theirs = peer.get_parameter(f"model.{name}.weight").grad
        assert distance(ours.get_parameter(f"model.{name}.weight").grad, theirs) < 10 * TOLERANCE, name


@pytest.mark.parametrize(
    "config",
    [
        # Its parallel sublayers share a norm, of which each has a copy here.
        transformers.StableLmConfig(**families.SIZES, use_parallel_residual=True),
        transformers.Phi3Config(**families.SIZES, partial_rotary_factor=0.5),  # Phi-4-mini
    ],
    ids=["stablelm, parallel", "phi3, partial rotation"],
)
def test_a_model_that_no_family_can_say_is_saved_as_one_of_our_own(
    config: transformers.PretrainedConfig, tmp_path: Path
) -> None:
    peer = families.peer_of(config)
    peer.save_pretrained(tmp_path / "theirs")
    ours = load_checkpoint(tmp_path / "theirs")
    saved(tmp_path / "ours", ours)
    with torch.inference_mode():
        assert distance(ours(TOKENS), peer(TOKENS).logits) < TOLERANCE
        assert torch.equal(load_checkpoint(tmp_path / "ours")(TOKENS), ours(TOKENS))
    assert family_of(ours.config) is None


def test_stablelm_has_the_biases_of_its_own_field_alone() -> None:
    data = json.loads(families.CONFIGS["stablelm-16"].to_json_string())
    assert not config_from_hf(data | {"attention_bias": True}).attention_bias


@pytest.mark.parametrize("value", [None, 0, 1])
@pytest.mark.parametrize("switch", ["attention_bias", "mlp_bias", "tie_word_embeddings", "use_qkv_bias"])
def test_null_and_numbers_are_switches_as_in_transformers(switch: str, value: int | None) -> None:
    config = families.CONFIGS["stablelm"] if switch == "use_qkv_bias" else families.PLAIN["llama"]
    data = json.loads(config.to_json_string())
    assert config_from_hf(data | {switch: value}) == config_from_hf(data | {switch: bool(value)})


def test_rotary_bases_as_transformers_5_keeps_them() -> None:
    data = json.loads(families.CONFIGS["gemma3"].to_json_string())
    del data["rope_local_base_freq"], data["rope_theta"]
    data["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    config = config_from_hf(data)
    assert (config.rope_theta, config.rope_local_theta) == (5e5, 5e3)


def test_partial_rotation_as_transformers_5_keeps_it(tmp_path: Path) -> None:
    data = json.loads(families.CONFIGS["gpt-neox"].to_json_string())
    for name in ("rotary_pct", "rotary_emb_base", "rope_theta", "rope_scaling", "partial_rotary_factor"):
        data.pop(name, None)
    data["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config = config_from_hf(data)
    assert (config.rotary_size, config.rope_theta) == (config.head_dim // 2, 500.0)
    (tmp_path / "config.json").write_text(json.dumps(data))
    longer = config.with_changes(max_position_embeddings=2 * config.max_position_embeddings)
    with checkpoint_with(tmp_path, longer) as source:
        assert load_config(source) == longer
    llama = json.loads(families.CONFIGS["olmo2"].to_json_string()) | {"rope_parameters": data["rope_parameters"]}
    with one_line(r"partial_rotary_factor is 0\.5; only 1 is supported"):
        config_from_hf(llama)


@pytest.mark.parametrize(("name", "share"), [("gpt-neox", "rotary_pct"), ("stablelm-16", "partial_rotary_factor")])
def test_a_share_of_a_head_that_no_fraction_gives_exactly(name: str, share: str) -> None:
    """44 * (30 / 44) is 29.999…, of which `transformers` too takes 29."""
    data = json.loads(families.CONFIGS[name].to_json_string())
    for other in ("rope_parameters", "head_dim"):  # a model of this config may have written them there
        data.pop(other, None)
    data |= {"hidden_size": 44 * data["num_attention_heads"], share: 0.7}
    config = config_from_hf(data)
    assert config.rotary_size == 30 == int(44 * to_hf(config)[share])
    assert to_hf(config)["model_type"] == data["model_type"] and config_from_hf(to_hf(config)) == config


def test_layers_take_their_types_along() -> None:
    config = tiny_config(num_hidden_layers=3, layer_types=(FULL, SLIDING, UNROTATED), sliding_window=4)
    assert config.with_changes(num_hidden_layers=2).layer_types == (FULL, SLIDING)
    assert [config.window(layer) for layer in range(3)] == [None, 4, None]
    assert [config.rotates(layer) for layer in range(3)] == [True, True, False]
    assert family_of(config) is None  # no family has sliding and unrotated layers at once
    assert config_from_hf(json.loads(json.dumps(to_hf(config)))) == config


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("gemma3", "model.layers.1.post_feedforward_layernorm.weight", "post_feedforward_layernorm"),
        ("gemma3", "model.layers.0.self_attn.q_norm.weight", "q_norm"),
        ("gpt2", "transformer.h.2.ln_1.bias", r"h\.2\.ln_1\.bias"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", "qkv_proj"),
    ],
)
def test_a_missing_tensor_is_named_as_in_the_file(name: str, tensor: str, said: str, tmp_path: Path) -> None:
    families.save(name, tmp_path)
    edit_tensors(tmp_path, {tensor: None})
    refused(tmp_path, f"{said}.* is missing")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
        ("gemma3", {"sliding_window": 0}, "sliding_window is 0"),
        (
            "phi3",
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]},
                "original_max_position_embeddings": 320,
            },
            "has 1 factors; 8",
        ),
        ("deepseek-v3", {"kv_lora_rank": 24.5}, "kv_lora_rank is 24.5"),
        ("deepseek-v3-experts", {"num_experts_per_tok": 9}, "9 of 8 experts per token"),
        ("deepseek-v3-experts", {"n_group": 8}, "each group needs two experts"),
        ("deepseek-v3-mixed", {"first_k_dense_replace": -1}, "dense_layers is -1"),
        ("deepseek-v3-mixed", {"intermediate_size": None}, "dense_intermediate_size is None"),
        ("mixtral", {"num_local_experts": -1}, "count is -1"),
        ("phi3", {"partial_rotary_factor": 0.01}, "rotary_dim is 0"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]; only the first layers can be dense"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("stablelm", {"partial_rotary_factor": 0.2}, "rotary_dim is 3; give an even number up to 16"),
        ("gpt-neox", {"rotary_pct": 0.0}, "rotary_dim is 0; it must be"),
        ("gpt-neox", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "layer_types has 2 entries for 4 layers"),
        ("mistral", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be"),
        ("gemma3", {"layer_types": None, "num_hidden_layers": 0}, "it must be a whole number from 1 to 4,096"),
        ("gpt-neox", {"use_parallel_residual": "no"}, "parallel_residual is 'no'; it must be true or false"),
        ("stablelm", {"use_qkv_bias": 2}, "attention_bias is 2; it must be true or false"),
        ("mistral", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("smollm3", {"rope_interleaved": True}, "rope_interleaved is True"),
        ("phi3", {"activation": "geglu"}, "activation is 'geglu'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(name: str, changes: dict[str, Any], said: str) -> None:
    data = json.loads(families.CONFIGS[name].to_json_string()) | changes
    with one_line(said, ArtifactError, UsageError):
        config_from_hf(data)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"clip_qkv": 8.0}, "have LLaMA's names, but its config.json differs: unknown field 'clip_qkv'"),
        ("llama", {}, "have LLaMA's names, and so has config.json; if it is one, set model_type to 'llama'"),
        ("qwen3", {}, r"model_type 'olmo' is not supported; use one of llama, .*, deepseek_v2$"),
    ],
)
def test_an_unknown_family_with_llamas_names(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    families.save(name, tmp_path)
    edit_json(tmp_path / "config.json", model_type="olmo", **changes)
    with one_line(said):
        load_config(tmp_path)


def test_a_fused_matrix_of_another_height_is_refused(tmp_path: Path) -> None:
    families.save("phi3", tmp_path)
    edit_json(tmp_path / "config.json", num_key_value_heads=1)
    refused(tmp_path, r"qkv_proj\.weight' has 128 rows, the config asks for 96")


def test_fields_of_published_files_that_say_nothing_about_the_model() -> None:
    data = json.loads(families.CONFIGS["gemma3"].to_json_string(use_diff=False))  # every field that transformers has
    harmless = {
        "cache_implementation": "hybrid",
        "auto_map": {"AutoConfig": "x.Y"},
        "pretraining_tp": 2,
        "prefix": None,
        "attention_dropout": 0.1,  # as Granite has it
        "is_llama_config": True,  # as SmolLM2 has it
        "rope_interleaved": False,
        "activation": "swiglu",  # as Falcon 3 has it
        "unsloth_fixed": True,
        "unsloth_version": "2026.3.3",
        "n_special": 0,  # as GPT-2 medium has it
        "predict_special_tokens": True,
        "output_past": True,
        "max_sequence_length": 2048,
    }
    assert config_from_hf(data | harmless) == config_from_hf(data)
