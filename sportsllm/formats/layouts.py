"""Families whose checkpoints hold other tensors than the model: under other names, fused, transposed or shifted.

Reading goes tensor by tensor: a `Part` says where one of the model's lies and how it is made of what is stored.
Writing joins the parts again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, HEAD, LAST_NORM, NORMS, OUTPUT_NORMS, POSITIONS, parameters
from sportsllm.models.kinds import ROUTER


class UnlikeTensor(Exception):
    """A fused tensor whose parts are not where the config says; whoever reads it knows its name and file."""


class Part(NamedTuple):
    """One of the model's tensors in a family's files.

    Attributes:
        stored: the name there.
        read: the model's tensor from the stored one.
        join: the stored tensor from the model's, all those that it holds, in the model's order.
    """

    stored: str
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]


Layout = Callable[[ModelConfig, str], Part]


def parts_of(
    model_type: str,
    config: ModelConfig,
    stored: Container[str] = (),
    config_json: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Part]:
    """By the model's names its tensors in the files of a model type.

    `stored` are the names in the files, if there are any: GPT-2's may lack the first part. `config_json` is the
    files' own, with the factors that Granite's weights are read with.
    """
    layout = LAYOUTS.get(model_type, lambda _, name: Part(name))
    layout = partial(_granite, config_json) if model_type == "granite" else layout
    parts = {item.name: layout(config, item.name) for item in parameters(config)}
    for name, part in parts.items():
        bare = part.stored.removeprefix(_GPT2_PREFIX)
        if part.stored not in stored and bare in stored:
            parts[name] = part._replace(stored=bare)
    return parts


BUFFERS = {"gpt2": (".attn.bias", ".attn.masked_bias"), "gpt_neox": (".attention.bias", ".attention.masked_bias")}
"""Ends of the names of constants that early versions of GPT-2 and GPT-NeoX wrote: the causal mask."""


def _layer(name: str) -> tuple[str, str]:
    """`model.layers.3` and what follows, of a tensor in a layer; of others nothing and the whole name."""
    if not name.startswith("model.layers."):
        return "", name
    _, _, number, rest = name.split(".", 3)
    return f"model.layers.{number}", rest


def _gemma3(config: ModelConfig, name: str) -> Part:
    """Norms multiply by 1 + weight."""
    part = _olmo2(config, name)
    if "norm" not in name:
        return part
    return part._replace(read=lambda weight: weight.float() + 1, join=lambda parts: parts[0] - 1)


def _olmo2(config: ModelConfig, name: str) -> Part:
    """Norms behind sublayers, and the one before the feed-forward, have other names."""
    layer, rest = _layer(name)
    norms = {
        f"{NORMS['mlp']}.weight": "pre_feedforward_layernorm.weight",
        f"{OUTPUT_NORMS['self_attn']}.weight": "post_attention_layernorm.weight",
        f"{OUTPUT_NORMS['mlp']}.weight": "post_feedforward_layernorm.weight",
    }
    return Part(f"{layer}.{norms.get(rest, rest)}" if layer else name)


def _rows(start: int, stop: int, total: int, tensor: Tensor) -> Tensor:
    """Some rows of a fused tensor; `UnlikeTensor` if it is not as high as the config says."""
    if len(tensor) != total:
        raise UnlikeTensor(f"has {len(tensor)} rows, the config asks for {total}")
    return tensor[start:stop]


def _phi3(config: ModelConfig, name: str) -> Part:
    """Query, key and value are one matrix, gate and up another."""
    layer, rest = _layer(name)
    queries, keys, inner = config.query_size, config.key_value_size, config.intermediate_size
    fused = {
        "self_attn.q_proj.weight": ("self_attn.qkv_proj.weight", 0, queries),
        "self_attn.k_proj.weight": ("self_attn.qkv_proj.weight", queries, queries + keys),
        "self_attn.v_proj.weight": ("self_attn.qkv_proj.weight", queries + keys, queries + 2 * keys),
        "mlp.gate_proj.weight": ("mlp.gate_up_proj.weight", 0, inner),
        "mlp.up_proj.weight": ("mlp.gate_up_proj.weight", inner, 2 * inner),
    }
    if rest not in fused:
        return Part(name)
    stored, start, stop = fused[rest]
    total = 2 * inner if stored.startswith("mlp.") else queries + 2 * keys
    return Part(f"{layer}.{stored}", partial(_rows, start, stop, total), _stacked)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def _columns(start: int, stop: int, total: int, tensor: Tensor) -> Tensor:
    return _rows(start, stop, total, tensor.T)


def _transposed(parts: Sequence[Tensor]) -> Tensor:
    return _stacked(parts).T


_GPT2_PREFIX = "transformer."
_GPT2_ENDS = {EMBEDDING: "transformer.wte", POSITIONS: "transformer.wpe", LAST_NORM: "transformer.ln_f"}
_GPT2_MODULES = {
    NORMS["self_attn"]: "ln_1", NORMS["mlp"]: "ln_2",
    "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip


def _gpt2(config: ModelConfig, name: str) -> Part:
    """Matrices lie as (inputs, outputs), and query, key and value are one of them."""
    layer, rest = _layer(name)
    module, _, kind = rest.rpartition(".")
    if not layer:
        return Part(f"{_GPT2_ENDS.get(module, module)}.{kind}")
    layer = layer.replace("model.layers", "transformer.h")
    width = config.hidden_size
    places = {f"self_attn.{part}_proj": place for place, part in enumerate("qkv")}
    if module in places:
        start, stop = places[module] * width, (places[module] + 1) * width
        if kind == "bias":
            return Part(f"{layer}.attn.c_attn.bias", partial(_rows, start, stop, 3 * width), _stacked)
        return Part(f"{layer}.attn.c_attn.weight", partial(_columns, start, stop, 3 * width), _transposed)
    stored = f"{layer}.{_GPT2_MODULES[module]}.{kind}"
    if kind == "weight" and module.endswith("_proj"):
        return Part(stored, lambda matrix: matrix.T, _transposed)
    return Part(stored)


def _deepseek(config: ModelConfig, name: str) -> Part:
    """Rotary pairs are neighbours; the rotated rows are the last of each query head, and of the latent's matrix."""
    heads = {"q_proj": config.num_attention_heads, "q_b_proj": config.num_attention_heads, "kv_a_proj_with_mqa": 1}
    module = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith(f".mlp.{ROUTER}.bias"):
        return Part(f"{name.removesuffix('bias')}e_score_correction_bias")
    if module not in heads:
        return Part(name)
    count, rotated = heads[module], config.head_dim

    def turned(rows: Tensor, split: Sequence[int], axes: tuple[int, int]) -> Tensor:
        by_head = rows.reshape(count, -1, rows.shape[1])
        last = by_head[:, -rotated:].reshape(count, *split, rows.shape[1]).transpose(*axes)
        return torch.cat([by_head[:, :-rotated], last.reshape(count, rotated, -1)], dim=1).reshape(rows.shape)

    return Part(
        name,
        lambda rows: turned(rows, (rotated // 2, 2), (1, 2)),
        lambda parts: turned(parts[0], (2, rotated // 2), (1, 2)),
    )


def _granite(config_json: Mapping[str, Any], config: ModelConfig, name: str) -> Part:
    """Sublayers' outputs are multiplied, and logits divided: so are o_proj, down_proj and the last norm read."""
    factor = 1.0
    if name == f"{LAST_NORM}.weight":
        factor = 1 / float(config_json.get("logits_scaling", 1.0))
    elif name.rpartition(".")[0].endswith(("o_proj", "down_proj")):
        factor = float(config_json.get("residual_multiplier", 1.0))
    return Part(name) if factor == 1.0 else Part(name, lambda tensor: tensor.float() * factor)


_OPT_MODULES = {
    NORMS["self_attn"]: "self_attn_layer_norm", NORMS["mlp"]: "final_layer_norm", LAST_NORM: "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
    POSITIONS: "embed_positions", EMBEDDING: "embed_tokens",
}  # fmt: skip


def _opt(config: ModelConfig, name: str) -> Part:
    """The table of positions begins with two rows that are never read."""
    layer, rest = _layer(name)
    module, _, kind = rest.rpartition(".")
    if name.startswith(HEAD):
        return Part(name)
    stored = f"{layer.replace('model.', 'model.decoder.') or 'model.decoder'}.{_OPT_MODULES.get(module, module)}.{kind}"
    if module != POSITIONS:
        return Part(stored)
    return Part(stored, lambda table: table[2:], lambda parts: torch.cat([torch.zeros_like(parts[0][:2]), *parts]))


def _stablelm(config: ModelConfig, name: str) -> Part:
    """One norm serves parallel sublayers; each gets a copy."""
    shared = name.replace(NORMS["mlp"], NORMS["self_attn"]) if config.parallel_residual else name
    return Part(shared, lambda tensor: tensor if shared == name else tensor.clone())


_NEOX_MODULES = {
    "self_attn.o_proj": "attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
    EMBEDDING: "gpt_neox.embed_in", LAST_NORM: "gpt_neox.final_layer_norm", HEAD: "embed_out",
}  # fmt: skip


def _gpt_neox(config: ModelConfig, name: str) -> Part:
    """Query, key and value of a head follow each other in one matrix."""
    layer, rest = _layer(name)
    module, _, kind = rest.rpartition(".")
    base = layer.replace("model.", "gpt_neox.") + "." * bool(layer)
    places = {f"self_attn.{part}_proj": place for place, part in enumerate("qkv")}
    if module not in places:
        return Part(f"{base}{_NEOX_MODULES.get(module, module)}.{kind}")
    heads, total = (config.num_attention_heads, -1, config.head_dim), 3 * config.query_size

    def read(rows: Tensor) -> Tensor:
        return _rows(0, total, total, rows).reshape(*heads, *rows.shape[1:])[:, places[module]].flatten(0, 1)

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.reshape(*heads, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)

    return Part(f"{base}attention.query_key_value.{kind}", read, join)


_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _mixtral(config: ModelConfig, name: str) -> Part:
    """Experts' matrices have numbers for names."""
    layer, rest = _layer(name)
    if not rest.startswith("mlp."):
        return Part(name)
    *path, matrix, kind = rest.removeprefix("mlp.").split(".")
    return Part(".".join([layer, "block_sparse_moe", *path, _MIXTRAL.get(matrix, matrix), kind]))


LAYOUTS: dict[str, Layout] = {
    "gemma2": _gemma3, "gemma3_text": _gemma3, "olmo2": _olmo2, "phi3": _phi3, "gpt2": _gpt2, "mixtral": _mixtral,
    "granite": partial(_granite, {}), "opt": _opt, "stablelm": _stablelm, "gpt_neox": _gpt_neox,
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek,
}  # fmt: skip
