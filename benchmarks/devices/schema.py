"""What a device file may say: the figures of a device, each with its evidence, and the limits of a budget.

Every figure carries its value, unit, source, date and kind. `date` is the day the source was published or the
measurement made (the first day where only a month or a year is known), and where that is not known the day it
was read. 1 MB = 10^6 bytes everywhere.
"""

from __future__ import annotations

from datetime import date
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from benchmarks.devices.figures import (
    Bandwidth,
    BandwidthAt,
    Clock,
    Cores,
    Fact,
    Figure,
    FloatRate,
    IntegerRate,
    Memory,
    Overhead,
    Power,
    Published,
    Share,
    Strict,
    Text,
)
from benchmarks.predict.coefficients import Efficiency

__all__ = ["FORMAT", "LIMIT_UNITS", "Device", "Figure", "Hardware", "Limits", "Published", "Recognise"]

FORMAT = 6
"""2 added `efficiency`, `hardware.bandwidth_by_working_set`, `recognise.processor` and `recognise.instruction_set`, and
made `hardware.power` optional; 3 counts outputs and scores in the rates of `efficiency`, 4 adds
reading and multiplying up for one row, 5 has a share of the bandwidth for each form, and tells apart what caches hold
of a model and what growing caches and standard operators cost."""
EFFICIENCY_FORMAT = 4
"""The first whose `efficiency` means what it does now."""

LIMIT_UNITS = {
    "file_mb": "MB",
    "peak_memory_mb": "MB",
    "ttft_ms": "ms",
    "tpot_p50_ms": "ms",
    "tpot_p95_ms": "ms",
    "quality_loss_percent": "%",
}


class Hardware(Strict):
    """The figures that predictions are made from.

    `memory_usable` is what a model may take beside the system. `memory_bandwidth` is that beyond every cache, and
    `bandwidth_by_working_set`, where known, what smaller working sets reach. The matmul rates are the processor's
    peaks; in a file that `calibrate` wrote the highest that an operator of the runtime reached.
    `bandwidth_share` (of the bandwidth, beside multiplying) and `layer_overhead` (time a layer adds to each token)
    replace the defaults of `benchmarks.predict.coefficients` where they are known for the device.
    """

    memory_total: Memory
    memory_usable: Memory
    cores: Cores
    clock: Clock | None = None
    instruction_set: Fact
    memory_bandwidth: Bandwidth
    int8_matmul_rate: IntegerRate
    fp32_matmul_rate: FloatRate
    power: Power | None = None
    bandwidth_share: Share | None = None
    layer_overhead: Overhead | None = None
    bandwidth_by_working_set: tuple[BandwidthAt, ...] = Field(default=(), strict=False)

    @field_validator("memory_usable")
    @classmethod
    def _part_of_total(cls, figure: Figure, info: ValidationInfo) -> Figure:
        total = info.data.get("memory_total")
        if total is not None and figure.value > total.value:
            raise ValueError(f"{figure.value:g} MB is more than memory_total, {total.value:g} MB")
        return figure

    @field_validator("bandwidth_by_working_set")
    @classmethod
    def _sizes_rise(cls, figures: tuple[BandwidthAt, ...]) -> tuple[BandwidthAt, ...]:
        sizes = [figure.working_set_mb for figure in figures]
        for smaller, larger in pairwise(sizes):
            if larger <= smaller:
                raise ValueError(f"working_set_mb {larger:g} follows {smaller:g}: working sets must rise")
        return figures


class Limits(Strict):
    """What a model may cost. Written down before anything is measured; never taken from a measurement.

    `file_mb` is the weight files and the graph; `peak_memory_mb` the process's peak with a cache of
    `memory_context_tokens`; `ttft_ms` the time to the first token after a prompt of `ttft_prompt_tokens`;
    `tpot_*_ms` the time per further token at `tpot_depth_tokens`; `quality_loss_percent` the rise of bits per
    byte over the fp32 teacher. 1 MB = 10^6 bytes.
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

    @field_validator("peak_memory_mb")
    @classmethod
    def _holds_the_file(cls, value: float, info: ValidationInfo) -> float:
        return _at_least(value, info, "file_mb", "the file is read into that memory")

    @field_validator("tpot_p50_ms")
    @classmethod
    def _one_token_is_less_than_a_prompt(cls, value: float, info: ValidationInfo) -> float:
        prompt = info.data.get("ttft_ms")
        if prompt is not None and value > prompt:
            raise ValueError(f"{value:g} contradicts ttft_ms {prompt:g}: one token cannot take longer than a prompt")
        return value

    @field_validator("tpot_p95_ms")
    @classmethod
    def _percentiles_rise(cls, value: float, info: ValidationInfo) -> float:
        return _at_least(value, info, "tpot_p50_ms", "the 95th percentile cannot be below the 50th")


def _at_least(value: float, info: ValidationInfo, other: str, why: str) -> float:
    lower = info.data.get(other)
    if lower is not None and value < lower:
        raise ValueError(f"{value:g} contradicts {other} {lower:g}: {why}")
    return value


class Recognise(Strict):
    """How a program running on the device can tell. Everything given must hold; `always` needs nothing.

    `device_tree_model` and `android_product` are parts of the names that boards and phones have. `processor` and
    `instruction_set` are a whole processor's, as `calibrate` found them.
    """

    always: bool = False
    device_tree_model: Text | None = None
    android_product: Text | None = None
    processor: Text | None = None
    instruction_set: Text | None = None
    min_memory_mb: float = Field(default=0, ge=0)
    max_memory_mb: float = Field(default=1e9, gt=0)


class Device(Strict):
    """One device file."""

    format: int = Field(ge=1)
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    title: Text
    kind: Text
    description: Text
    processor: Literal["cpu", "gpu"]
    recognise: Recognise | None = None
    hardware: Hardware
    efficiency: Efficiency | None = None
    published: tuple[Published, ...] = Field(default=(), strict=False)
    limits: Limits

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: int) -> int:
        if value > FORMAT:
            raise ValueError(f"{value} is newer than this program's {FORMAT}; upgrade sportsllm-compress")
        return value

    @field_validator("hardware")
    @classmethod
    def _share_of_reading(cls, hardware: Hardware, info: ValidationInfo) -> Hardware:
        if hardware.bandwidth_share is not None and info.data.get("format", FORMAT) < EFFICIENCY_FORMAT:
            raise ValueError(
                f"bandwidth_share is that of reading beside multiplying since format {EFFICIENCY_FORMAT}; leave it "
                f"out, or give what it means now and format = {EFFICIENCY_FORMAT}"
            )
        return hardware

    @field_validator("efficiency")
    @classmethod
    def _said_once(cls, efficiency: Efficiency | None, info: ValidationInfo) -> Efficiency | None:
        hardware = info.data.get("hardware")
        if efficiency is not None and info.data.get("format", FORMAT) < EFFICIENCY_FORMAT:
            raise ValueError("belongs to an older way of predicting; leave it out, or make the file anew: calibrate")
        if efficiency is not None and hardware is not None:
            for name in ("bandwidth_share", "layer_overhead"):
                if getattr(hardware, name) is not None:
                    raise ValueError(f"hardware.{name} says the same thing again; leave it out beside efficiency")
        return efficiency

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
