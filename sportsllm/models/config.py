"""The shape of a model: one frozen record, read from and written to Hugging Face's config.json.

Imports neither torch nor any other large library: the device install reads it too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sportsllm.errors import ArtifactError, UsageError


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary table: `linear`, or `llama3` (Llama 3.1, by wavelength)."""

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and switches of a LLaMA-family decoder. Names are Hugging Face's.

    `attention_bias` is a bias on q, k and v; `attention_output_bias` one on o (Llama sets both with
    one field, Qwen2 has only the first). `qk_norm` normalises each query and key head (Qwen3).
    `attention_kind` and `mlp_kind` name the block's two halves; a new kind is a new name here.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 2
    attention_kind: str = "grouped_query"
    mlp_kind: str = "swiglu"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            least = 2 if name == "max_position_embeddings" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"config: {name} is {value!r}; it must be a whole number of at least {least}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"config: num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}; choose a divisor"
            )
        if self.head_dim % 2:
            raise UsageError(f"config: head_dim is {self.head_dim}; rotary embedding needs an even number")
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"config: dropout is {self.dropout}; it must be in [0, 1)")
        if not (0 < self.rms_norm_eps < math.inf and 0 < self.rope_theta < math.inf):
            raise UsageError("config: rms_norm_eps and rope_theta must be greater than 0")
        if self.attention_kind != "grouped_query" or self.mlp_kind != "swiglu":
            raise UsageError(
                f"config: attention_kind {self.attention_kind!r} / mlp_kind {self.mlp_kind!r} is not known; "
                "this version has 'grouped_query' and 'swiglu'"
            )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together."""
        return self.num_key_value_heads * self.head_dim

    def parameters_by_component(self) -> dict[str, int]:
        """Exact number of trained numbers in each part; they add up to `parameters`."""
        layers, hidden = self.num_hidden_layers, self.hidden_size
        attention = 2 * hidden * self.query_size + 2 * hidden * self.key_value_size
        if self.attention_bias:
            attention += self.query_size + 2 * self.key_value_size
        if self.attention_output_bias:
            attention += hidden
        mlp = 3 * hidden * self.intermediate_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + hidden
        norms = 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)
        return {
            "embedding": self.vocab_size * hidden,
            "attention": layers * attention,
            "feed_forward": layers * mlp,
            "norms": layers * norms + hidden,
            "head": 0 if self.tie_word_embeddings else self.vocab_size * hidden,
        }

    @property
    def parameters(self) -> int:
        """Exact number of parameters; a tied head counts once."""
        return sum(self.parameters_by_component().values())

    @property
    def block_parameters(self) -> int:
        """Parameters that are neither embedding nor head."""
        parts = self.parameters_by_component()
        return parts["attention"] + parts["feed_forward"] + parts["norms"]

    def with_changes(self, **changes: Any) -> ModelConfig:
        """A copy with some fields replaced, validated again."""
        return replace(self, **changes)

    def to_hf(self) -> dict[str, Any]:
        """The config.json that Hugging Face's loaders read."""
        model_type = self._model_type()
        names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        data: dict[str, Any] = {"architectures": [names[model_type]], "model_type": model_type}
        ours = {"attention_output_bias", "qk_norm", "dropout", "attention_kind", "mlp_kind", "rope_scaling"}
        for field in fields(self):
            if field.name not in ours:
                value = getattr(self, field.name)
                data[field.name] = list(value) if isinstance(value, tuple) else value
        if model_type == "qwen2":
            del data["attention_bias"]
        if model_type != "llama":
            del data["mlp_bias"]
            data["use_sliding_window"] = False
        if self.rope_scaling is not None:
            scaling = asdict(self.rope_scaling)
            if self.rope_scaling.rope_type == "linear":
                scaling = {"rope_type": "linear", "factor": self.rope_scaling.factor}
            data["rope_scaling"] = scaling
        if self.dropout:
            data["dropout"] = self.dropout
        data["hidden_act"] = "silu"
        data["torch_dtype"] = "float32"
        return data

    def _model_type(self) -> str:
        if self.qk_norm:
            kind, possible = "qwen3", self.attention_bias == self.attention_output_bias and not self.mlp_bias
        elif self.attention_bias and not self.attention_output_bias:
            kind, possible = "qwen2", not self.mlp_bias
        else:
            kind, possible = "llama", self.attention_bias == self.attention_output_bias
        if not possible:
            raise UsageError(
                "config: this mix of attention_bias, attention_output_bias, mlp_bias and qk_norm belongs to "
                "no Hugging Face model type; use llama's, qwen2's or qwen3's"
            )
        return kind


# Fields of config.json that change nothing in what the model computes.
_IGNORED = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "initializer_range", "_name_or_path", "max_window_layers", "sliding_window", "quantization_config",
    "transformers.js_config", "unk_token_id",
}  # fmt: skip
# Fields that are harmless only with these values.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, 1.0),
    "is_decoder": (False, True),
    "use_mrope": (False,),
}
_MODEL_TYPES = ("llama", "qwen2", "qwen3")


def config_from_hf(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face config of a LLaMA-family model.

    Args:
        data: the parsed config.json.
        where: the file's name, for messages.

    Raises:
        ArtifactError: a field this program does not know or cannot honour; its name is in the message.
    """
    try:
        return _parse(data, where)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ArtifactError(f"{where}: a field has a value of the wrong kind ({error}); mend it") from None


def _parse(data: Mapping[str, Any], where: str) -> ModelConfig:
    model_type = data.get("model_type", "llama")
    if model_type not in _MODEL_TYPES:
        raise ArtifactError(
            f"{where}: model_type {model_type!r} is not supported; use one of {', '.join(_MODEL_TYPES)}"
        )
    rest = {key: value for key, value in data.items() if key not in _IGNORED}
    for key, allowed in _REQUIRED.items():
        value = rest.pop(key, allowed[0])
        if value not in allowed:
            raise ArtifactError(f"{where}: {key} is {value!r}; only {allowed[0]!r} is supported")
    layer_types = rest.pop("layer_types", None)
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise ArtifactError(f"{where}: layer_types has {sorted(set(layer_types))}; only 'full_attention' is supported")

    try:
        heads, hidden = rest["num_attention_heads"], rest["hidden_size"]
        values: dict[str, Any] = {
            "vocab_size": rest.pop("vocab_size"),
            "intermediate_size": rest.pop("intermediate_size"),
            "num_hidden_layers": rest.pop("num_hidden_layers"),
        }
    except KeyError as error:
        raise ArtifactError(f"{where}: field {error} is missing") from None
    rope = dict(rest.pop("rope_parameters", None) or {})  # transformers 5 keeps theta and scaling together
    scaling = rest.pop("rope_scaling", None) or rope
    default_head_dim = 128 if model_type == "qwen3" else hidden // heads
    values |= {
        "hidden_size": rest.pop("hidden_size"),
        "num_attention_heads": rest.pop("num_attention_heads"),
        "num_key_value_heads": rest.pop("num_key_value_heads", None) or heads,
        "head_dim": rest.pop("head_dim", None) or default_head_dim,
        "tie_word_embeddings": rest.pop("tie_word_embeddings", False),
        "rope_theta": rest.pop("rope_theta", None) or rope.get("rope_theta", 10_000.0),
        "rope_scaling": _rope_scaling(scaling, where),
        "qk_norm": model_type == "qwen3",
    }
    bias = rest.pop("attention_bias", model_type == "qwen2")
    values["attention_bias"] = bool(bias)
    values["attention_output_bias"] = bool(bias) and model_type != "qwen2"
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = rest.pop(key, None)
        values[key] = tuple(value) if isinstance(value, list) else value
    for key in (
        "max_position_embeddings",
        "rms_norm_eps",
        "mlp_bias",
        "dropout",
        "attention_kind",
        "mlp_kind",
    ):
        if key in rest:
            values[key] = rest.pop(key)
    if rest:
        raise ArtifactError(f"{where}: unknown field {sorted(rest)[0]!r}; remove it or use a supported model")
    try:
        return ModelConfig(**values)
    except UsageError as error:
        raise ArtifactError(f"{where}: {error}") from None


def _rope_scaling(data: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = data.get("rope_type", data.get("type", "default"))
    if kind in (None, "default"):
        return None
    if kind not in ("linear", "llama3"):
        raise ArtifactError(f"{where}: rope_scaling type {kind!r} is not supported; use none, linear or llama3")
    known = {field.name for field in fields(RopeScaling)}
    unknown = set(data) - known - {"type", "rope_theta"}
    if unknown:
        raise ArtifactError(f"{where}: rope_scaling has an unknown field {sorted(unknown)[0]!r}")
    return RopeScaling(rope_type=kind, **{key: data[key] for key in known & set(data) - {"rope_type"}})


def load_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json.

    Raises:
        ArtifactError: it is missing, no JSON, or describes a model that is not supported.
    """
    path = directory / "config.json"
    return config_from_hf(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file, or say in one line why not."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: not found; is {path.parent} a checkpoint or an export?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not valid JSON ({error}); write the directory again") from None
    if not isinstance(data, dict):
        raise ArtifactError(f"{path}: holds a {type(data).__name__}, not a JSON object")
    return data


def packed_by_bitsandbytes(quantization: Any) -> str | None:
    """`NF4`, `FP4` or `INT8` where config.json's quantization_config is bitsandbytes', else None."""
    if not isinstance(quantization, dict):
        return None
    eight, four = bool(quantization.get("load_in_8bit")), bool(quantization.get("load_in_4bit"))
    if quantization.get("quant_method", "bitsandbytes" if eight or four else None) != "bitsandbytes":
        return None
    return "INT8" if eight else str(quantization.get("bnb_4bit_quant_type", "fp4")).upper()
