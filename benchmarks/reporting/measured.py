"""A result of `bench` as a typed record, from a file or just measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from benchmarks.devices.load import is_this_machine
from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import (
    MACHINE_INDEPENDENT,
    QUALITIES,
    LimitVerdict,
    Predicted,
    Verdict,
    judge,
    limit_lengths,
    worst,
)
from benchmarks.labels import LIMITS
from benchmarks.spread import Finite, Spread
from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, validate
from sportsllm.inference.scoring import TaskScore
from sportsllm.models.config import ModelConfig

_ADVICE = "measure again with bench --out"

Figure = Finite | None
_Interval = tuple[Finite, Finite] | None
_Tokens = Annotated[str, Field(pattern=r"^[1-9]\d{0,8}$")]
ByTokens = dict[_Tokens, Figure]
Scored = tuple[str, ...]
"""Who scored a quality, `bench`, `training` or `fit`, and on which text. Those of different texts do not compare."""


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of the time of a step, in ms."""

    p50: Finite
    p90: Figure = None
    p95: Figure = None
    p99: Figure = None


@dataclass(frozen=True)
class MemoryFloor:
    """The least time of a step by depth: bytes read over the measured bandwidth."""

    by_depth_ms: ByTokens


@dataclass(frozen=True)
class WrittenText:
    """A kind of text written with prompt lookup: proposed and accepted tokens, and the speed, also without lookup."""

    proposed: int
    accepted: int
    tokens_per_pass: Figure = None
    tokens_per_s: Figure = None
    plain_tokens_per_s: Figure = None


@dataclass(frozen=True)
class Sustained:
    """Decoding for minutes: figures of windows, what the last lost against the first, and cores of other programs."""

    windows: list[dict[str, Figure]]
    throttling_percent: Figure = None
    throttled: bool | None = None
    other_cpu_cores: Figure = None


@dataclass(frozen=True)
class Peer:
    """A runtime measured in turns with this one; `status` is `measured` or says why not."""

    status: str
    install: str | None = None
    version: str | None = None
    generated_tokens_per_s: ByTokens = field(default_factory=dict)
    ttft_ms: ByTokens = field(default_factory=dict)
    peak_rss_bytes: Figure = None
    steady: bool | None = None


@dataclass(frozen=True)
class Ratio:
    """Ours over the best peer's, with its interval."""

    ratio: Figure
    peer: str
    better: str
    low: Figure = None
    high: Figure = None


@dataclass(frozen=True)
class Budget:
    """A model held to a target's limits.

    Attributes:
        decided_by: `measurement` on the device itself, else `prediction`.
        of_export: False for PyTorch's figures.
        measured_here: all figures by the limits' names, whatever decides.
        efficiency: what a prediction that decides was made with.
    """

    target: str
    verdict: Verdict
    limits: list[LimitVerdict]
    tpot_depth_tokens: int | None = None
    decided_by: str = "measurement"
    of_export: bool = True
    measured_here: dict[str, Figure] = field(default_factory=dict)
    efficiency: JsonObject | None = None


@dataclass(frozen=True)
class Bench:
    """The figures of a result that are shown, in ms, s, bytes and tokens per second; None or empty if not measured."""

    directory: Annotated[str, Field(pattern=r"^[^\x00]*$")]
    tpot_ms: dict[_Tokens, Percentiles]
    ttft_ms: ByTokens = field(default_factory=dict)
    decode_tokens_per_s: ByTokens = field(default_factory=dict)
    texts: dict[str, WrittenText] = field(default_factory=dict)
    memory_floor: MemoryFloor = field(default_factory=lambda: MemoryFloor({}))
    prefill_tokens_per_s: Figure = None
    load_s: Figure = None
    file_bytes: Figure = None
    peak_rss_bytes: Figure = None
    peak_rss_context_tokens: int | None = None
    sustained: Sustained | None = None
    against: dict[str, Peer] = field(default_factory=dict)
    against_ratios: dict[str, Ratio] = field(default_factory=dict)
    noise: dict[str, Spread] = field(default_factory=dict)
    noise_reasons: list[str] = field(default_factory=list)
    clean: bool = True
    rounds: int = 1
    parameters: int | None = None
    context_length: int | None = None
    runtime: str = "unknown runtime"
    kernels: str | None = None
    threads: int | None = None
    cpus: list[int] | None = None
    placement: JsonObject | None = None
    machine: JsonObject | None = None
    text: list[str] | None = None
    text_digests: list[str] | None = None
    bits_per_byte: Figure = None
    teacher_bits_per_byte: Figure = None
    quality_loss_percent: Figure = None
    quality_interval_percent: _Interval = None
    quality_documents: int | None = None
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    teacher_tasks: dict[str, TaskScore] = field(default_factory=dict)
    accuracy_loss_points: Figure = None
    accuracy_interval_points: _Interval = None
    kl_nats: Figure = None
    kl_interval_nats: _Interval = None
    top1_changed_percent: Figure = None
    top1_changed_interval_percent: _Interval = None
    budget: Budget | None = None

    @property
    def scored(self) -> Scored | None:
        """Who scored its quality, and on which text; None without one."""
        return None if self.bits_per_byte is None else ("bench", *(self.text_digests or self.text or ()))

    def figures(self, prompt: int | None, depth: int | None) -> dict[str, float | None]:
        """Measured figures by the limits' names, in MB and ms: the first token after a prompt of `prompt` tokens, the
        time per token at `depth`; None if the context is too short."""
        times = self.tpot_ms.get(str(depth))
        return {
            "file_mb": None if self.file_bytes is None else self.file_bytes / 1e6,
            "peak_memory_mb": None if self.peak_rss_bytes is None else self.peak_rss_bytes / 1e6,
            "ttft_ms": self.ttft_ms.get(str(prompt)),
            "tpot_p50_ms": None if times is None else times.p50,
            "tpot_p95_ms": None if times is None else times.p95,
            **{name: getattr(self, name) for name in QUALITIES},
        }

    def intervals(self, prompt: int | None, depth: int | None) -> dict[str, tuple[float, float] | None]:
        """Confidence intervals of the same figures, None if one round or too little text gives none.

        Memory has none: it is the maximum of few processes, which agree within a percent.
        """
        keys = {"ttft_ms": f"ttft_ms.{prompt}"}
        keys |= {f"tpot_{name}_ms": f"tpot_ms.{depth}.{name}" for name in ("p50", "p95")}
        timed = {name: self.noise[key] for name, key in keys.items() if key in self.noise}
        found = {name: None if one.rounds == 1 else (one.low, one.high) for name, one in timed.items()}
        return found | {name: getattr(self, ends) for name, ends in QUALITIES.items()}


def as_bench(data: Mapping[str, Any], where: object = "bench") -> Bench:
    """Check a result; `where` names its file in errors.

    Raises:
        ArtifactError: no result of `bench`, or damaged.
    """
    if not isinstance(data.get("tpot_ms"), dict):
        raise ArtifactError(f"{where}: is not a result of `bench`; write one with bench --out")
    bench = validate(Bench, data, where, _ADVICE)
    if bench.budget is not None and any(limit.name not in LIMITS for limit in bench.budget.limits):
        raise ArtifactError(f"{where}: has an unknown limit; {_ADVICE}")
    return bench


def as_budget(data: Mapping[str, Any]) -> Budget:
    """The `budget` part of a result that was just made."""
    return validate(Budget, data, "budget")


def judge_bench(
    device: Device,
    bench: Bench,
    config: ModelConfig,
    on_device: bool,
    predict: Callable[[Device], Predicted] | None = None,
) -> Budget:
    """Judge a result by a budget: by the measurement on the device itself, else by the prediction.

    Args:
        device, on_device: the budget, and whether this machine is it, recognised or not.
        config: of the measured model; `bench.placement`, if there is one, says on what processor it ran.
        predict: makes the predictions for another device; without it only the files' own figures are known there.
    """
    lengths = limit_lengths(device.limits, config.max_position_embeddings)
    places = lengths.ttft_prompt, lengths.tpot_depth
    measured, intervals = bench.figures(*places), bench.intervals(*places)
    processor = (bench.placement or {}).get("processor", "cpu")
    exported = not bench.runtime.startswith("torch")  # PyTorch's figures are no export's
    here = exported and (on_device or is_this_machine(device, processor))
    predicted = None if predict is None or (here and processor != "gpu") else predict(device)
    deciding = dict(measured) if here else {name: measured[name] for name in MACHINE_INDEPENDENT}
    if processor == "gpu":  # the card's memory was not measured, the process's was
        deciding.pop("peak_memory_mb", None)
    limits = judge(device, deciding, predicted, intervals)
    return Budget(
        target=device.name,
        verdict=worst(limits),
        limits=limits,
        tpot_depth_tokens=lengths.tpot_depth or 0,
        decided_by="measurement" if here else "prediction",
        of_export=exported,
        measured_here=measured,
        efficiency=None if predicted is None else dict(predicted.made_with),
    )
