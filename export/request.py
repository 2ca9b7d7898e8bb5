"""A request to export: parameters of `export`, what follows from them, and which of them cannot be met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from export.graph.decoder import check_kinds, computes_in_half
from export.runtime.providers import find_provider
from export.web_page import library_files
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed import quantization_config
from sportsllm.inference.calibration import CalibrationText
from sportsllm.models.memory import usual_cache

FORMATS = ("onnx", "web", "standard", "gguf")
DTYPES = ("fp32", "fp16", "fp16-weights")
BLOCK_DTYPES = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q4_k_s", "q4_k_m", "q5_k", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl",
    "iq4_xs",
)  # fmt: skip
"""Types for `--format gguf`, by llama.cpp's names; `q4_k` and `q5_k` stand for `q4_k_m` and `q5_k_m`."""
CACHES = ("fp32", "fp16", "int8")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to write: parameters of `export`, and what follows from them."""

    checkpoint: Path
    format: str
    dtype: str | None
    kv_cache: str | None
    given: CalibrationText
    inline: bool
    threads: int | None
    provider: str

    @property
    def mix(self) -> str | None:
        """llama.cpp's types that matrices are rounded to."""
        name = {"q4_k": "q4_k_m", "q5_k": "q5_k_m"}.get(self.dtype or "", self.dtype)
        return name if name in BLOCK_DTYPES else None

    @cached_property
    def text(self) -> CalibrationText:
        """Calibration text: what is given or, to round matrices or a cache by, the checkpoint's training text."""
        return self.given if self.mix is None and self.kv_cache != "int8" else self.given.found(self.checkpoint)

    @property
    def half(self) -> bool:
        """Whether dense matrices are stored in float16."""
        return self.dtype in ("fp16", "fp16-weights")

    @property
    def in_half(self) -> bool:
        """Whether the graph computes in float16."""
        return self.dtype == "fp16" and self.format != "gguf"

    @cached_property
    def cache(self) -> str:
        """What the graph caches in."""
        if self.kv_cache is not None:
            return self.kv_cache
        packed = self.format == "onnx" and not self.inline and quantization_config(self.checkpoint) is not None
        return "fp16" if self.in_half else usual_cache(load_config(self.checkpoint), packed)

    def settings(self, rope_scaling: str | None) -> dict[str, Any]:
        """What decides the content, for the manifest."""
        dense = "fp16" if self.half else "fp32"
        given = {
            "computed_in": "fp16" if self.in_half else None,
            "inline": self.inline,
            "transformers_js": self.format == "web" and bool(library_files()),
            "calibration": [str(path) for path in self.text.files],
            "samples": self.text.samples,
            "rope_scaling": rope_scaling,
        }
        return {
            "format": self.format,
            "dtype": self.mix or ("packed" if quantization_config(self.checkpoint) is not None else dense),
            "kv_cache": self.cache,
            **{name: value for name, value in given.items() if value},
            **self.text.reading.record(),
        }


def refuse(request: ExportRequest) -> None:
    """Refuse parameters that are unknown, exclude each other or do not fit the checkpoint."""
    for flag, value, known in (
        ("--format", request.format, FORMATS),
        ("--dtype", request.dtype or "fp32", (*DTYPES, *BLOCK_DTYPES) if request.format == "gguf" else DTYPES),
        ("--kv-cache", "fp32" if request.kv_cache is None else request.kv_cache, CACHES),
    ):
        if value not in known:
            gguf = "; it needs --format gguf" if value in BLOCK_DTYPES else ""
            raise UsageError(f"{flag} {value!r}: choose {', '.join(known[:-1])} or {known[-1]}{gguf}")
    reason = next((reason for reason, found in (*_excluded(request), *_unfit(request)) if found), None)
    if reason is not None:
        raise UsageError(reason)


def _excluded(request: ExportRequest) -> Iterator[tuple[str, bool]]:
    """Parameters that exclude each other: what to say, and whether they are given."""
    kind, cache = request.format, request.kv_cache
    elsewhere = not find_provider(request.provider).is_cpu
    for flag, given in {"--calibration": request.given.files, "--set samples": request.given.samples}.items():
        yield (
            f"{flag} is for --kv-cache int8 and GGUF types such as --dtype q4_k_m; leave it out, or add one of them",
            bool(given) and cache != "int8" and request.mix is None,
        )
    graphs = {"--kv-cache": cache is not None, "--provider": elsewhere, "--set inline": request.inline}
    for flag, given in graphs.items():
        yield f"{flag} is for ONNX graphs; leave it out, or --format gguf", given and kind == "gguf"
    yield (
        f"--format standard with --kv-cache {cache}: no standard operator reads such a cache; leave one of them out",
        kind == "standard" and cache in ("fp16", "int8"),
    )
    yield (
        "--format web with --kv-cache fp16: browsers cache in float16 if they compute in it; use --dtype fp16, or "
        "--kv-cache int8",
        kind == "web" and cache == "fp16" and not request.in_half,
    )
    cpu = {f"--kv-cache {cache}": cache in ("fp32", "int8"), "--format standard": kind == "standard"}
    for flag, given in cpu.items():
        yield f"--dtype fp16 with {flag}: that is for CPUs; leave one of them out", request.in_half and given


def _unfit(request: ExportRequest) -> Iterator[tuple[str, bool]]:
    """What the checkpoint has no form for: what to say, and whether it is asked for."""
    model, kind, dtype = request.checkpoint, request.format, request.dtype
    packed, config = quantization_config(model), load_config(model)
    dense = packed is None
    advice = "use --dtype fp16-weights, or leave --dtype out" if dense else "leave --dtype out"
    no_half = kind == "gguf" or request.kv_cache in ("fp32", "int8")
    other = "" if no_half else ", or use --dtype fp16 to compute in float16"
    yield (
        f"--dtype fp16: {model}: this kind of model has no graph in float16; {advice}",
        request.in_half and not computes_in_half(config),
    )
    yield (
        f"--dtype fp16 with --format web: transformers.js opens 4-bit matrices there, not those of {model}",
        request.in_half and kind == "web" and packed is not None and packed.bits != 4,
    )
    yield (
        f"--dtype {dtype}: {model} is packed already and is exported as it is; leave --dtype out{other}",
        dtype is not None and not dense and not request.in_half,
    )
    if kind == "gguf":
        return
    check_kinds(config, "fp32" if request.in_half else request.cache, kind == "standard")
    latent, lstm, selected = (config.attention_kind == name for name in ("latent", "lstm", "selected"))
    experts = config.experts is not None
    for form, reason, found in (
        ("standard", "joining the cache at each step takes longer than selection saves", selected),
        ("standard", "ONNX Runtime loads no packed LSTM in them", lstm and not dense),
        ("standard", "packed experts have no standard operators", experts and not dense),
        ("web", "selected attention writes into a cache with room, which browsers do not give", selected),
        ("web", "browsers give a latent cache no room to write into", latent),
        ("web", "browsers pass on keys and values, not the states of an LSTM", lstm),
    ):
        yield f"--format {form}: {model}: {reason}; leave it out", form == kind and found
