"""A GGUF file and its metadata as a `ModelConfig`: every key of the architecture is honoured or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.families.gemma import CAPS
from sportsllm.formats.huggingface import FAMILIES
from sportsllm.models.config import FULL, SLIDING, UNROTATED, Experts, ModelConfig
from sportsllm.models.rope import RopeScaling, inverse_frequencies

ROPE_FACTORS = "rope_freqs.weight"
_PARALLEL, _WINDOW = "use_parallel_residual", "attention.sliding_window"
_RMS_EPSILON, _LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_ORIGINAL_CONTEXT = "rope.scaling.original_context_length"
_READ = {
    *_SIZES, "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", _ORIGINAL_CONTEXT, "expert_count",
    "expert_used_count",
}  # fmt: skip
# What these say is in other keys, or is about how the model came about.
_IGNORED = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
LLAMA3 = RopeScaling("llama3", 1.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)

_T = TypeVar("_T")
_D = TypeVar("_D")


@dataclass(frozen=True)
class GGUFFile:
    """Metadata by key, such as `llama.block_count`, and tensors by name, such as `blk.0.attn_q.weight`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    def value(self, key: str, kind: type[_T]) -> _T:
        """The value of a key.

        Raises:
            ArtifactError: it is missing, or of another type.
        """
        found = self.metadata.get(key)
        if not isinstance(found, kind) or isinstance(found, bool) is not (kind is bool):
            what = "is missing" if found is None else f"is a {type(found).__name__}, not a {kind.__name__}"
            raise self.error(f"{key} {what}; convert the model again")
        return found

    def value_or(self, default: _D, key: str, kind: type[_T]) -> _T | _D:
        """As `value`, but `default` if the file lacks the key."""
        return self.value(key, kind) if key in self.metadata else default

    def error(self, text: str) -> ArtifactError:
        """An error about this file."""
        return ArtifactError(f"{self.path}: {text}")


READABLE = ("F32", "F16", *sorted(kind.name for kind in gguf.quants._type_traits))
"""Types of tensors that the package `gguf` makes numbers of."""


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """Names the tensor whose type the package does not know."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
        for field in fields:
            number = int(field.parts[4][0])
            if (kind := known.get(number, str(number))) not in READABLE:
                name, supported = bytes(field.parts[1]).decode(), f"supported: {', '.join(READABLE)}"
                raise ArtifactError(
                    f"{self._path}: tensor {name!r} has type {kind}, which is not supported; {supported}"
                )
        super()._build_tensors(start_offs, fields)


def open_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file.

    Raises:
        ArtifactError: no GGUF, cut short, damaged, one part of several, or with tensors of an unknown type.
    """
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ArtifactError(f"{path}: not a GGUF file; it begins with {magic!r}, not with b'GGUF'")
    try:  # the reader has no errors of its own: past the file's end it fails in whatever it does next
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ArithmeticError, LookupError, OSError, TypeError, UnicodeError, ValueError) as error:
        raise ArtifactError(f"{path}: cut short or damaged ({error}); copy or download it again") from None
    file = GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    parts = file.value_or(1, "split.count", int)
    if parts != 1:
        raise file.error(f"is one of {parts} parts; join them with llama-gguf-split --merge")
    return file


def architecture(file: GGUFFile) -> str:
    """The model's architecture.

    Raises:
        ArtifactError: it is not one of `ARCHITECTURES`.
    """
    name = file.value("general.architecture", str)
    if name not in ARCHITECTURES:
        raise file.error(f"architecture {name!r} is not supported; use one of {', '.join(ARCHITECTURES)}")
    return name


def read_config(file: GGUFFile) -> ModelConfig:
    """The shape, rotary settings and special tokens of a model. Biases and tying follow from its tensors.

    Raises:
        ArtifactError: another architecture, or a key that is missing, not known or that cannot be honoured.
    """
    its = ARCHITECTURES[name := architecture(file)]
    own = {key.removeprefix(f"{name}.") for key in file.metadata if key.startswith(f"{name}.")}
    if unknown := sorted(own - _READ - {its.epsilon, *its.keys} - _IGNORED):
        raise file.error(f"{name}.{unknown[0]} is not known and may matter; use the original checkpoint")
    values: dict[str, Any] = {field: file.value(f"{name}.{key}", int) for key, field in _SIZES.items()}
    routed = bool(file.value_or(0, f"{name}.expert_count", int))
    if routed and name not in ("llama", "qwen3moe"):
        raise file.error(f"{name}.expert_count: a mixture of experts is not supported; use a dense model")
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = file.value_or(heads, f"{name}.attention.head_count_kv", int)
    head_dim = file.value_or(values["hidden_size"] // max(heads, 1), f"{name}.attention.key_length", int)
    rotated = file.value_or(head_dim, f"{name}.rope.dimension_count", int)
    for key in ("attention.value_length", "rope.dimension_count")[: 1 if _PARALLEL in its.keys else 2]:
        if (found := file.value_or(head_dim, f"{name}.{key}", int)) != head_dim:
            raise file.error(f"{name}.{key} is {found}; only the head size, {head_dim}, is supported")
    if "token_embd.weight" not in file.tensors:
        raise file.error("tensor 'token_embd.weight' is missing; convert the model again")
    values |= {
        "head_dim": head_dim,
        "rotary_dim": None if rotated == head_dim else rotated,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
        "rms_norm_eps": _decimal(file.value(f"{name}.{its.epsilon}", float)),
        "rope_theta": _decimal(file.value_or(10_000.0, f"{name}.rope.freq_base", float)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **_special_tokens(file),
        **FAMILIES["mixtral" if routed and name == "llama" else its.family].fixed,
    }
    try:
        values |= its.read(file, values)
        if routed:
            values |= _experts(file, values)
        config = ModelConfig(**values)
        return config.with_changes(rope_scaling=_rope_scaling(file, name, config))
    except UsageError as error:
        raise file.error(str(error)) from None


def _smollm3(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp rotates in three layers of four, as in the one model that there is."""
    types = tuple(FULL if (layer + 1) % 4 else UNROTATED for layer in range(values["num_hidden_layers"]))
    return {"layer_types": types if UNROTATED in types else None}


def _gemma3(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma(file, values, file.value_or(6, "gemma3.attention.sliding_window_pattern", int), 62) | {
        "rope_theta": _decimal(file.value_or(1e6, "gemma3.rope.freq_base", float)),
        "rope_local_theta": _decimal(file.value_or(10_000.0, "gemma3.rope.freq_base_swa", float)),
    }


def _gemma2(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    caps = {ours: _decimal(file.value(f"gemma2.{theirs}", float)) for theirs, ours in CAPS.items()}
    return _gemma(file, values, 2, 46) | caps


def _gemma(file: GGUFFile, values: Mapping[str, Any], every: int, largest: int) -> dict[str, Any]:
    """What llama.cpp knows untold: which layers are full, and how scores scale: otherwise if there are `largest`."""
    layers, hidden = values["num_hidden_layers"], values["hidden_size"]
    scored = hidden // values["num_attention_heads"] if layers == largest else values["head_dim"]
    return {
        "embedding_scale": hidden**0.5,
        "attention_scale": scored**-0.5,
        "layer_types": tuple(SLIDING if (layer + 1) % every else FULL for layer in range(layers)),
        "sliding_window": file.value(f"{architecture(file)}.attention.sliding_window", int),
    }


def _phi3(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    window = file.value_or(0, "phi3.attention.sliding_window", int)
    if not 0 < window < values["max_position_embeddings"]:
        return {}
    return {"sliding_window": window, "layer_types": (SLIDING,) * values["num_hidden_layers"]}


def _stablelm(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    if file.value_or(False, f"stablelm.{_PARALLEL}", bool):
        raise file.error(f"stablelm.{_PARALLEL} is true, which is not supported; convert it from Hugging Face's files")
    return {}


def _gptneox(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    biases = dict.fromkeys(("attention_bias", "attention_output_bias"), "blk.0.attn_qkv.bias" in file.tensors)
    return biases | {"mlp_kind": "gelu_erf", "parallel_residual": file.value(f"gptneox.{_PARALLEL}", bool)}


def _granite(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Scales of embedding and scores; the others are multiplied into the weights. One of 0 means its default."""
    if not file.value_or(True, "granite.rope.scaling.finetuned", bool):
        raise file.error("granite.rope.scaling.finetuned is false: without rotary positions; not supported")
    score = _decimal(file.value_or(0.0, "granite.attention.scale", float))
    embedding = _decimal(file.value_or(0.0, "granite.embedding_scale", float))
    return {"embedding_scale": embedding or 1.0, "attention_scale": score or values["head_dim"] ** -0.5}


def granite_factors(file: GGUFFile) -> dict[str, float]:
    """What Granite's weights are read with, by the names in Hugging Face's config.json."""
    residual, logits = file.value_or(0.0, "granite.residual_scale", float), file.value("granite.logit_scale", float)
    return {"residual_multiplier": _decimal(residual) or 1.0, "logits_scaling": _decimal(logits) or 1.0}


def _experts(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    name, inner = architecture(file), values["intermediate_size"]
    count, active = (file.value(f"{name}.expert_{key}", int) for key in ("count", "used_count"))
    if name == "qwen3moe":
        inner = file.value_or(inner // max(active, 1), "qwen3moe.expert_feed_forward_length", int)
    return {"experts": Experts(count, active, balance_loss=0.001), "intermediate_size": inner}


@dataclass(frozen=True)
class Architecture:
    """What sets an architecture's files apart from LLaMA's, for reading and for writing.

    Attributes:
        family: Hugging Face's model type.
        keys: further keys, without the architecture's name.
        read: returns the fields of `ModelConfig` that follow from these keys, or that llama.cpp knows untold.
        epsilon: the key of the norms' epsilon.
        layout: how its tensors lie, see `sportsllm.formats.layouts`; as in the family's files if None.
        paired: whether rows of queries and keys are in llama.cpp's own order.
        biases, tied: whether llama.cpp wants biases, and a tied head; None for either.
        written: whether models are written too.
    """

    family: str
    keys: Collection[str] = ()
    read: Callable[[GGUFFile, Mapping[str, Any]], dict[str, Any]] = lambda file, values: {}
    epsilon: str = _RMS_EPSILON
    layout: str | None = None
    paired: bool = False
    biases: bool | None = None
    tied: bool | None = None
    written: bool = True


_GRANITE = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
_GEMMA3 = (_WINDOW, "attention.sliding_window_pattern", "rope.freq_base_swa")
ARCHITECTURES = {
    "llama": Architecture("llama", paired=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", biases=False),
    "smollm3": Architecture("smollm3", read=_smollm3, paired=True, biases=False),
    "gemma2": Architecture("gemma2", (_WINDOW, *CAPS), _gemma2, biases=False, tied=True),
    "gemma3": Architecture("gemma3_text", _GEMMA3, _gemma3, biases=False),
    "gpt2": Architecture("gpt2", epsilon=_LAYER_EPSILON),
    "olmo2": Architecture("olmo2", biases=False, tied=False),
    "stablelm": Architecture("stablelm", (_PARALLEL,), _stablelm, _LAYER_EPSILON, tied=False),
    "gptneox": Architecture("gpt_neox", (_PARALLEL,), _gptneox, _LAYER_EPSILON, layout="gpt2", biases=True, tied=False),
    "granite": Architecture("granite", _GRANITE, _granite, paired=True),
    "qwen3moe": Architecture("qwen3_moe", ("expert_feed_forward_length",), biases=False),
    "phi3": Architecture("phi3", (_WINDOW,), _phi3, written=False),
}
WRITTEN = {its.family: name for name, its in ARCHITECTURES.items() if its.written}
"""Architectures that are written too, by Hugging Face's model type."""


def _decimal(value: float) -> float:
    """The shortest decimal number of a float32: 1e-05 for 9.99999974737875e-06."""
    return float(str(np.float32(value)))


def _special_tokens(file: GGUFFile) -> dict[str, Any]:
    """Begin, end and padding; the ends of a text, a turn and a message all end a text."""
    prefix = "tokenizer.ggml."
    ends = [file.value_or(None, f"{prefix}{key}_token_id", int) for key in ("eos", "eot", "eom")]
    stops = tuple(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": file.value_or(None, f"{prefix}bos_token_id", int),
        "eos_token_id": stops if len(stops) > 1 else stops[0] if stops else None,
        "pad_token_id": file.value_or(None, f"{prefix}padding_token_id", int),
    }


def _rope_scaling(file: GGUFFile, name: str, config: ModelConfig) -> RopeScaling | None:
    """How rotary angles are stretched. Llama 3's way has no keys in the file but the factors of all pairs as a tensor:
    the scaling is accepted if it gives these factors.
    """
    kind = file.value_or("none", f"{name}.rope.scaling.type", str)
    if kind not in ("none", "linear", "yarn"):
        raise file.error(f"{name}.rope.scaling.type is {kind!r}; only none, linear, yarn and Llama 3's are supported")
    if (factors := file.tensors.get(ROPE_FACTORS)) is None:
        if kind == "none":
            return None
        factor = _decimal(file.value(f"{name}.rope.scaling.factor", float))
        original = file.value_or(config.max_position_embeddings, f"{name}.{_ORIGINAL_CONTEXT}", int)
        if kind == "linear":
            return RopeScaling("linear", factor)
        return RopeScaling("yarn", factor, original_max_position_embeddings=original)
    stretch = np.asarray(factors.data, dtype=np.float64).ravel()
    scaling = RopeScaling(**{**vars(LLAMA3), "factor": _decimal(float(stretch.max()))})
    wanted = inverse_frequencies(config) / inverse_frequencies(config.with_changes(rope_scaling=scaling))
    if kind != "none" or stretch.shape != wanted.shape or not np.allclose(stretch, wanted, rtol=1e-5):
        raise file.error(f"{ROPE_FACTORS} stretches the rotary angles in another way than Llama 3; not supported")
    return scaling
