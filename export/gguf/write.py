"""A checkpoint as one GGUF file, for llama.cpp and what is built on it. The way back is `sportsllm.formats.gguf`.

Packed matrices keep their codes (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). A block of 32 weights
has its scale d, and in Q4_1 its least value m, in float16:

    Q4_0  w = d * (q - 8)     INT4 without zero points
    Q4_1  w = d * q + m       INT4 with zero points, m = -zero_point * d
    Q8_0  w = d * q           INT8 without zero points, d >= 0 and q from -127: a code of -128 becomes -127

Shape suffixes: N rows (outputs), K columns, G blocks of 32 in a row.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Format
from torch import Tensor, nn

from export.parity.check import threads_of_torch
from export.parity.comparison import READ_BACK, TEXTS, Comparison, ParityReport, Pass, compare, make_sequences, merge
from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError, GateError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.families.gemma import CAPS
from sportsllm.formats.gguf.blocks import BLOCK_TYPES, Blocks, RoundedModel
from sportsllm.formats.gguf.config import ARCHITECTURES, LLAMA3, ROPE_FACTORS, WRITTEN, open_gguf, read_config
from sportsllm.formats.gguf.tokenizer import write_tokenizer
from sportsllm.formats.gguf.weights import GGUFTensors, gguf_names, paired_heads, rows_in_pairs
from sportsllm.formats.huggingface import family_of, load_config
from sportsllm.formats.manifest import plain_name
from sportsllm.formats.packed import QuantizedWeight, unpack
from sportsllm.formats.packed_modules import read_packed
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.models.config import FULL, UNROTATED, ModelConfig
from sportsllm.models.description import Parameter, parameters
from sportsllm.models.experts import mixtures
from sportsllm.models.kinds import ROUTER
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.rope import RopeScaling, inverse_frequencies
from sportsllm.text.tokenizer import load_tokenizer

BLOCK = 32
GGUF_FILE = "model.gguf"
_GEMMA = {
    "gemma2": "Gemma 2 only with every second layer full, and with bounded scores and logits",
    "gemma3": "Gemma 3 only with full layers at equal distances between others",
}


def architecture_of(config: ModelConfig) -> str:
    """llama.cpp's name of the architecture.

    Raises:
        UsageError: it has none for this model.
    """
    family = family_of(config) or ""
    full_width = config.query_size == config.hidden_size  # not if heads were pruned
    if (family == "mixtral" and config.sliding_window is None) or (family == "qwen2" and not full_width):
        family = "llama"  # which has experts, the same biases, and heads of any width
    if (kind := WRITTEN.get(family)) is None:
        parts = f"a model with {config.attention_kind} attention and {config.mlp_kind} feed-forward"
        raise UsageError(f"GGUF: {family or parts} is not supported; use a model of {', '.join(WRITTEN.values())}")
    if family == "smollm3" and config.layer_types != tuple(
        UNROTATED if layer % 4 == 3 else FULL for layer in range(config.num_hidden_layers)
    ):
        raise UsageError("GGUF: llama.cpp leaves rotation out in every fourth layer of SmolLM3; these layers differ")
    if kind in _GEMMA:
        largest = config.num_hidden_layers == {"gemma2": 46, "gemma3": 62}[kind]
        scored = config.hidden_size // config.num_attention_heads if largest else config.head_dim
        bounded = config.attention_softcap is not None and config.logit_softcap is not None
        if not (_period(config) == 2 and bounded if kind == "gemma2" else _period(config) not in (None, 1)):
            raise UsageError(f"GGUF: llama.cpp knows {_GEMMA[kind]}; use --format onnx")
        if abs((config.attention_scale or 0) * scored**0.5 - 1) > 1e-6:
            raise UsageError(f"GGUF: {kind} has query_pre_attn_scalar {scored} in llama.cpp; use --format onnx")
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "longrope":
        raise UsageError("GGUF: longrope's factors are not supported; use --format onnx")
    if scaling is not None and scaling.rope_type == "yarn":
        original = scaling.original_max_position_embeddings  # with Hugging Face's other defaults, llama.cpp's too
        if scaling != RopeScaling("yarn", scaling.factor, original_max_position_embeddings=original):
            raise UsageError("GGUF: YaRN with other settings than factor and original context is not supported")
    if scaling is not None and scaling.rope_type == "llama3" and scaling != replace(LLAMA3, factor=scaling.factor):
        raise UsageError("GGUF: llama3 scaling with other settings than a factor and Llama 3's own is not supported")
    its, biases = ARCHITECTURES[kind], config.attention_bias or config.attention_output_bias or config.mlp_bias
    for said, found in (
        ("only with an untied head", its.tied is False and config.tie_word_embeddings),
        ("only with a tied head", its.tied is True and not config.tie_word_embeddings),
        ("only without biases", its.biases is False and biases),
        ("only with biases", its.biases is True and not config.attention_bias),
        ("only if heads x head_dim is the hidden size", family == "olmo2" and not full_width),
    ):
        if found:
            raise UsageError(f"GGUF: llama.cpp supports {kind} models {said}")
    if config.experts is not None and (config.dense_layers or config.experts.weights != "sum"):
        raise UsageError("GGUF: llama.cpp supports Qwen3-MoE only with experts in all layers and weights that sum to 1")
    return kind


def write_gguf(
    checkpoint: Path,
    path: Path,
    tokenizer: Mapping[str, Any],
    half: bool,
    rounded: RoundedModel | None = None,
    mix: str | None = None,
) -> dict[str, int]:
    """Write a checkpoint, packed or not, with its tokenizer; dense matrices in float16 if `half`.

    Args:
        checkpoint: its config and, without `rounded`, its weights.
        tokenizer: see `export.gguf.tokenizer.tokenizer_metadata`.
        rounded: the weights of a checkpoint that is not packed, in blocks of `mix`.
        mix: one of `export.request.BLOCK_DTYPES`.

    Returns:
        Bytes of tensors by format, the largest first.

    Raises:
        UsageError: an architecture or blocks that GGUF has not.
        ArtifactError: the checkpoint is damaged, or does not fit float16.
    """
    config, tensors = load_config(checkpoint), TensorFiles(checkpoint)
    kind = architecture_of(config)
    writer = gguf.GGUFWriter(path, kind)
    bytes_of, odd = Counter[str](), list[str]()
    names, groups = gguf_names(kind, config), dict[str, list[Parameter]]()
    for parameter in parameters(config):
        groups.setdefault(names[parameter.name], []).append(parameter)
    with progress_bar("tensors", len(groups)) as bar:
        for name, group in groups.items():
            parts = [_stored(kind, config, tensors, parameter, half, rounded, odd) for parameter in group]
            if len({stored for _, stored in parts}) > 1:
                raise UsageError(f"{name}: its parts have several types; quantize them with --set uniform=true")
            values, stored = np.concatenate([part for part, _ in parts]), parts[0][1]
            if name.endswith("_exps.weight"):
                values = values.reshape(len(parts), -1, values.shape[1])
            writer.add_tensor(name, values, raw_dtype=stored)
            bytes_of[stored.name] += values.nbytes
            bar.advance(1)
    if odd:
        rows = f"GGUF has no blocks for rows whose width is no multiple of {BLOCK}"
        log(f"{len(odd)} matrices are stored in float16, {odd[0]} first: {rows}")
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "llama3":
        plain = inverse_frequencies(config.with_changes(rope_scaling=None))
        writer.add_tensor(ROPE_FACTORS, (plain / inverse_frequencies(config)).astype(np.float32))
    main = bytes_of.most_common(1)[0][0]
    file_type = gguf.LlamaFileType["ALL_F32" if main == "F32" else f"MOSTLY_{(mix or main).upper()}"]
    facts = {"general.name": plain_name(checkpoint), "general.file_type": int(file_type)}
    facts["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    facts |= {f"{kind}.{key}": value for key, value in _sizes(kind, config).items()}
    facts |= {f"tokenizer.{key}": value for key, value in tokenizer.items()}
    add_facts(writer, facts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(bytes_of.most_common())


def _stored(
    kind: str,
    config: ModelConfig,
    tensors: TensorFiles,
    parameter: Parameter,
    half: bool,
    rounded: RoundedModel | None,
    odd: list[str],
) -> tuple[npt.NDArray[Any], Format]:
    """A parameter's values and their type; packed modules that no block type fits are added to `odd`."""
    module, _, part = parameter.name.rpartition(".")
    if rounded is not None and parameter.name in rounded.matrices:
        values, stored = rounded.matrices[parameter.name].data, Format[rounded.matrices[parameter.name].kind]
        odd += [module] * (stored is Format.F16)
    elif part == "weight" and f"{module}.weight_packed" in tensors:
        weight = read_packed(tensors, module, parameter.shape)
        if weight.in_features % BLOCK:
            odd.append(module)
            values, stored = dense(weight.dequantize(), half=True)
        else:
            values, stored = encode(weight, module)
    else:
        tensor = (tensors if rounded is None else rounded.others)[parameter.name].float()
        exact = parameter.role == "positions" or module.endswith(f".{ROUTER}")
        values, stored = dense(tensor.numpy(), half and not exact)
    if stored is Format.F16 and not np.isfinite(values).all():
        raise ArtifactError(f"tensor {parameter.name!r} has values beyond float16's 65,504; export it as fp32")
    heads = paired_heads(kind, config, parameter.name)
    return (rows_in_pairs(torch.from_numpy(values), heads).numpy() if heads else values), stored


def _period(config: ModelConfig) -> int | None:
    """Every how many layers one is full, the last of them; None if they are ordered in another way."""
    types = config.layer_types or ()
    full = types.index(FULL) + 1 if FULL in types else len(types) + 1
    return full if all((kind == FULL) == (layer % full == full - 1) for layer, kind in enumerate(types)) else None


def _sizes(kind: str, config: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
    }
    found[(its := ARCHITECTURES[kind]).epsilon] = float(config.rms_norm_eps)
    if kind == "gpt2":
        return found
    if "use_parallel_residual" in its.keys:
        found["use_parallel_residual"] = config.parallel_residual
    found |= {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.rotary_size,
        "vocab_size": config.vocab_size,
    }
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type in ("linear", "yarn"):
        found |= {"rope.scaling.type": scaling.rope_type, "rope.scaling.factor": float(scaling.factor)}
        if scaling.rope_type == "yarn":
            found["rope.scaling.original_context_length"] = scaling.original_max_position_embeddings
    if config.experts is not None:
        found |= {"expert_count": config.experts.count, "expert_used_count": config.experts.active}
    if kind == "qwen3moe":
        found["expert_feed_forward_length"] = config.intermediate_size
    if kind == "granite":
        found |= {"embedding_scale": float(config.embedding_scale), "attention.scale": config.attention_scale}
        found |= {"residual_scale": 1.0, "logit_scale": 1.0}  # which the weights have
    if kind == "gemma2":
        found |= {theirs: float(getattr(config, ours)) for theirs, ours in CAPS.items()}
    if "attention.sliding_window" in its.keys:
        found["attention.sliding_window"] = config.sliding_window
    if kind == "gemma3":
        if config.rope_local_theta is not None:
            found["rope.freq_base_swa"] = float(config.rope_local_theta)
        if (period := _period(config)) != 6:  # older releases know six alone, without the key
            found["attention.sliding_window_pattern"] = period
    return found


def add_facts(writer: gguf.GGUFWriter, facts: Mapping[str, Any]) -> None:
    """Add metadata, each by its type: truth value, whole number, number, text, or a list of one of those."""
    for key, value in facts.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def encode(weight: QuantizedWeight, module: str) -> tuple[npt.NDArray[np.uint8], Format]:
    """A packed matrix as GGUF stores it, (N, bytes of a row). Larger blocks become several of 32 with one scale.

    K must be a multiple of 32.

    Raises:
        UsageError: blocks, or zero points, that GGUF has no format for.
    """
    if weight.block_size % BLOCK:
        raise UsageError(
            f"{module}: blocks of {weight.block_size}; GGUF's have {BLOCK} numbers: quantize with --group-size 32"
        )
    if weight.bits == 8 and weight.zero_points is not None:
        raise UsageError(f"{module}: GGUF has no INT8 with zero points; quantize it with --set symmetric=true")
    rows, groups = weight.out_features, weight.in_features // BLOCK

    def by_block(x_NG: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return x_NG.repeat(weight.block_size // BLOCK, axis=1)[:, :groups]

    levels = unpack(weight.packed.reshape(rows, -1), weight.bits)[:, : weight.in_features].astype(np.int16)
    scale_NG = by_block(weight.scales).astype(np.float16).astype(np.float32)
    least_NG, kind = np.zeros_like(scale_NG), "Q4_0" if weight.bits == 4 else "Q8_0"
    if weight.zero_points is not None:
        kind, least_NG = "Q4_1", by_block(weight.zero_point_values()) * scale_NG
    else:
        levels -= 2 ** (weight.bits - 1)
    if kind == "Q8_0":  # readers may negate codes, so -128 must not occur, and d must not be negative
        levels *= np.where(scale_NG < 0, -1, 1).astype(np.int16).repeat(BLOCK, axis=1)
        levels, scale_NG = levels.clip(-127, 127), np.abs(scale_NG)
    ones_NG = np.ones_like(scale_NG, dtype=np.int16)
    return Blocks(BLOCK_TYPES[kind], levels, scale_NG, ones_NG, least_NG, ones_NG).pack(), Format[kind]


def dense(values: npt.NDArray[np.float32], half: bool) -> tuple[npt.NDArray[np.generic], Format]:
    """Dense numbers: matrices in float16 if asked for, vectors always in float32, as llama.cpp wants them."""
    if half and values.ndim == 2:
        return torch.from_numpy(values).half().numpy(), Format.F16  # which warns of no overflow, unlike numpy
    return np.ascontiguousarray(values, dtype=np.float32), Format.F32


def check_gguf(checkpoint: Path, path: Path, threads: int | None, rounded: RoundedModel | None = None) -> ParityReport:
    """A GGUF file, read with the package `gguf`, against its checkpoint: logits, and how texts are split.

    With `rounded`, the logits of these weights are those that the file should give.

    Raises:
        GateError: the file's tokenizer splits a text in another way.
    """
    file, config = open_gguf(path), load_config(checkpoint)
    found = SportsLLM(read_config(file))
    with torch.no_grad():
        for name, tensor in GGUFTensors(file, config).items():
            found.get_parameter(name).copy_(tensor)
    tokenizer = load_tokenizer(checkpoint, config)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(file, Path(folder))
        again = load_tokenizer(Path(folder), found.config)
    for text in TEXTS:
        if again.encode(text) != tokenizer.encode(text):
            raise GateError(f"{checkpoint}: in a GGUF file its tokenizer would split {text!r} in another way")
    model = load_checkpoint(checkpoint)
    if rounded is not None:
        matrices = {name: gguf.dequantize(data, Format[kind]) for name, (kind, data) in rounded.matrices.items()}
        model.load_state_dict({**rounded.others, **{name: torch.from_numpy(each) for name, each in matrices.items()}})
    routers = _route_alike(model, found)
    with threads_of_torch(threads), torch.inference_mode():
        batches = [torch.tensor([sequence]) for sequence in make_sequences(config, tokenizer)]
        compared = [compare(model(batch)[0].numpy(), found(batch)[0].numpy()) for batch in batches]
    routed = [Pass("routers", replace(READ_BACK, greedy_match=0.0), (merge("prefill", routers),))] if routers else []
    return ParityReport("gguf", (Pass("read back", READ_BACK, (merge("prefill", compared),)), *routed), (), None)


def _route_alike(model: SportsLLM, found: SportsLLM) -> list[Comparison]:
    """Compare routers, and let `found` choose the experts that `model` chose: rounding exchanges nearly level ones."""
    compared, read = list[Comparison](), list[Tensor]()

    def replace_logits(_router: nn.Module, _x: object, own_XN: Tensor) -> Tensor:
        compared.append(compare(read[0].numpy(), own_XN.numpy()))
        return read.pop(0)

    for expected, actual in zip(mixtures(model), mixtures(found), strict=True):
        expected.gate.register_forward_hook(lambda *call: read.append(call[-1]))
        actual.gate.register_forward_hook(replace_logits)
    return compared
