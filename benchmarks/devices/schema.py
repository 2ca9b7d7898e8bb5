"""What a device file holds: hardware figures, each with its evidence, coefficients of predictions, and limits.

`date` is the day the source was published or the measurement made (the first day if only a month or a year is
known), else the day it was read. 1 MB = 10^6 bytes everywhere.
"""

from __future__ import annotations

import math
from datetime import date
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from benchmarks.labels import LIMITS

FORMAT = 9

HARDWARE_RANGES = {
    "memory_total": ("MB", 16, 4e6),
    "memory_usable": ("MB", 16, 4e6),
    "cores": ("cores", 1, 100_000),
    "clock": ("GHz", 0.1, 10),
    "memory_bandwidth": ("GB/s", 0.1, 20_000),
    "int8_matmul_rate": ("GOP/s", 1, 1e7),
    "fp32_matmul_rate": ("GFLOP/s", 1, 1e7),
    "fp16_matmul_rate": ("GFLOP/s", 1, 1e7),
    "power": ("W", 0.1, 2_000),
    "bandwidth_share": ("share", 0.01, 1),
    "layer_overhead": ("us", 0, 100_000),
}
"""Unit, lowest and highest value of each hardware figure; outside this range a unit was mistaken."""

Kind = Literal["spec", "measured", "estimated"]
Text = Annotated[str, Field(min_length=1)]
Rate = Annotated[float, Field(ge=1e-3, le=1e7)]
MOST_BAND = 10.0
Factor = Annotated[float, Field(ge=1, le=MOST_BAND)]


class Strict(BaseModel):
    """Part of a device file: unknown fields and numbers written as text are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Quantity(Strict):
    """A number with its evidence; `kind` says whether it is specified, measured or estimated."""

    value: float
    unit: Text
    source: Text
    date: date
    kind: Kind
    note: str = ""


class SourcedText(Strict):
    """A text with the same evidence as a quantity."""

    value: Text
    source: Text
    date: date
    kind: Kind
    note: str = ""


class Published(Quantity):
    """A result somebody measured on this device, to check predictions against."""

    what: Text


class Hardware(Strict):
    """The figures that predictions are made from.

    `memory_usable` is what a model may take beside the system. The bandwidth is that beyond every cache, and the
    matmul rates are the processor's peaks, `fp16_matmul_rate` with sums in float32, as training does them; without it
    that of float32 stands for it. `bandwidth_share` (of the bandwidth, reading weights) and `layer_overhead`
    (of a layer, for each token) replace those of `benchmarks.predict.latency` if the device's are known.
    """

    memory_total: Quantity
    memory_usable: Quantity
    cores: Quantity
    clock: Quantity | None = None
    instruction_set: SourcedText
    memory_bandwidth: Quantity
    int8_matmul_rate: Quantity
    fp32_matmul_rate: Quantity
    fp16_matmul_rate: Quantity | None = None
    power: Quantity | None = None
    bandwidth_share: Quantity | None = None
    layer_overhead: Quantity | None = None

    @field_validator(*HARDWARE_RANGES)
    @classmethod
    def _in_range(cls, quantity: Quantity | None, info: ValidationInfo) -> Quantity | None:
        unit, low, high = HARDWARE_RANGES[str(info.field_name)]
        if quantity is not None and quantity.unit != unit:
            raise ValueError(f"is in {quantity.unit!r}; give it in {unit}")
        if quantity is not None and not low <= quantity.value <= high:
            raise ValueError(f"{quantity.value:g} {unit} is not between {low:g} and {high:g}")
        return quantity

    @field_validator("memory_usable")
    @classmethod
    def _part_of_total(cls, quantity: Quantity, info: ValidationInfo) -> Quantity:
        total = info.data.get("memory_total")
        if total is not None and quantity.value > total.value:
            raise ValueError(f"{quantity.value:g} MB is more than memory_total, {total.value:g} MB")
        return quantity


class Band(Strict):
    """The factor, either way, that holds 90% of predictions: 1.3 means from value / 1.3 to value * 1.3.

    `source` says where the factors come from, and `measured` whether they do from measurements.
    """

    tpot: Factor
    ttft: Factor
    memory: Factor
    source: Text
    measured: bool


class Coefficients(Strict):
    """What a runtime reaches on a device, for the formulas of `benchmarks.predict.latency`.

    Attributes:
        bandwidth_gb_per_s: of reading weights, cache and activations.
        int8_gop_per_s, fp32_gop_per_s: arithmetic with packed weights, and with others and in attention.
        layer_us: fixed time of each layer.
        runtime_mb: the process without weights.
        weight_copies: memory that weights take at the peak, as a multiple of what they usually take.
        band: how far predictions made with these are off.
    """

    source: Text
    date: date
    kind: Kind
    bandwidth_gb_per_s: Rate
    int8_gop_per_s: Rate
    fp32_gop_per_s: Rate
    layer_us: Annotated[float, Field(ge=0, le=100_000)]
    runtime_mb: Annotated[float, Field(ge=1, le=100_000)]
    weight_copies: Annotated[float, Field(ge=0.1, le=10)]
    band: Band


class Limits(Strict):
    """What a model may cost. Written down before anything is measured; never taken from a measurement.

    `file_mb` is the weight files and the graph; `peak_memory_mb` the process's peak with a cache of
    `memory_context_tokens`; `ttft_ms` the time to the first token after a prompt of `ttft_prompt_tokens`;
    `tpot_*_ms` the time per further token at `tpot_depth_tokens`; `quality_loss_percent` the rise of bits per
    byte over the fp32 teacher. These may be left out: `accuracy_loss_points`, the percentage points of accuracy that
    tasks lose against it; `kl_nats`, the mean KL divergence from it per token; `top1_changed_percent`, the share of
    tokens before which it expects another one most. 1 MB = 10^6 bytes.
    """

    reason: Text
    source: Text
    date: date
    kind: Literal["decision"]
    memory_context_tokens: Literal[1024] = 1024
    ttft_prompt_tokens: Literal[512] = 512
    tpot_depth_tokens: Literal[512] = 512
    file_mb: float = Field(ge=0.01, le=1e6)
    peak_memory_mb: float = Field(ge=1, le=4e6)
    ttft_ms: float = Field(ge=1, le=3.6e6)
    tpot_p50_ms: float = Field(ge=0.01, le=3.6e6)
    tpot_p95_ms: float = Field(ge=0.01, le=3.6e6)
    quality_loss_percent: float = Field(gt=0, le=100)
    accuracy_loss_points: float | None = Field(default=None, gt=0, le=100)
    kl_nats: float | None = Field(default=None, gt=0, le=100)
    top1_changed_percent: float | None = Field(default=None, gt=0, le=100)

    def given(self) -> dict[str, float]:
        """Those that there are, by name."""
        found = {name: getattr(self, name) for name in LIMITS}
        return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}

    @field_validator("peak_memory_mb", "tpot_p50_ms", "tpot_p95_ms")
    @classmethod
    def _agrees(cls, value: float, info: ValidationInfo) -> float:
        """The file is read into that memory; one token takes no longer than a prompt; percentiles rise."""
        other, sign, why = _ORDER[str(info.field_name)]
        bound = info.data.get(other)
        if bound is not None and sign * value < sign * bound:
            raise ValueError(f"must be at {'least' if sign > 0 else 'most'} {other}, {bound:g} ({why})")
        return value


_ORDER = {
    "peak_memory_mb": ("file_mb", 1, "the file is read into that memory"),
    "tpot_p50_ms": ("ttft_ms", -1, "one token cannot take longer than a prompt"),
    "tpot_p95_ms": ("tpot_p50_ms", 1, "the 95th percentile cannot be below the 50th"),
}


class Recognise(Strict):
    """How a program running on the device can tell. Everything given must hold; `always` needs nothing.

    `device_tree_model` and `android_product` are parts of the names that boards and phones have. `processor` and
    `instruction_set` are a processor's whole names, as `calibrate` found them.
    """

    always: bool = False
    device_tree_model: Text | None = None
    android_product: Text | None = None
    processor: Text | None = None
    instruction_set: Text | None = None
    min_memory_mb: float = Field(default=0, ge=0)
    max_memory_mb: float = Field(default=1e9, gt=0)


class Device(Strict):
    """One device file. One that is always recognised has no `hardware`: predictions measure this machine instead."""

    format: int
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    title: Text
    kind: Text
    description: Text
    processor: Literal["cpu", "gpu"]
    recognise: Recognise | None = None
    hardware: Hardware | None = Field(default=None, validate_default=True)
    coefficients: Coefficients | None = None
    published: tuple[Published, ...] = Field(default=(), strict=False)
    limits: Limits

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: int) -> int:
        if value > FORMAT:
            raise ValueError(f"{value} is newer than this program's {FORMAT}; upgrade sportsllm-compress")
        if value < FORMAT:
            raise ValueError(f"{value} is older than this program's {FORMAT}; write the file again, or use `calibrate`")
        return value

    @field_validator("hardware")
    @classmethod
    def _of_this_device(cls, hardware: Hardware | None, info: ValidationInfo) -> Hardware | None:
        rule = info.data.get("recognise")
        always = rule is not None and rule.always
        if hardware is None and not always and "recognise" in info.data:
            raise ValueError("is missing; only a device that is always recognised can leave it out")
        if hardware is not None and always:
            raise ValueError("has figures of one machine, but every machine is recognised as this one; leave it out")
        return hardware

    @field_validator("limits")
    @classmethod
    def _fits_the_device(cls, limits: Limits, info: ValidationInfo) -> Limits:
        hardware = info.data.get("hardware")
        if hardware is not None and limits.peak_memory_mb > hardware.memory_usable.value:
            raise ValueError(
                f"peak_memory_mb {limits.peak_memory_mb:g} is more than the device's memory_usable, "
                f"{hardware.memory_usable.value:g} MB"
            )
        return limits
