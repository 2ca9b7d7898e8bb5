"""The figures of a device file: a number each, with its unit, the values that can be meant, and its evidence."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["spec", "measured", "estimated"]
Text = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """Part of a device file: unknown fields and numbers written as text are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Figure(Strict):
    """A number somebody can check: `kind` says whether it is a maker's spec, a measurement or an estimate."""

    value: float
    unit: Text
    source: Text
    date: date
    kind: Kind
    note: str = ""


class Fact(Strict):
    """Something known that is no number, with the same evidence as a figure."""

    value: Text
    source: Text
    date: date
    kind: Kind
    note: str = ""


class Published(Figure):
    """Somebody's measured result on this device, kept to check predictions against."""

    what: Text


# A figure with its unit and the values that can be meant; outside them a unit was mistaken.
class Memory(Figure):
    """In MB."""

    unit: Literal["MB"]
    value: float = Field(ge=16, le=4e6)


class Cores(Figure):
    """Processor cores; on a GPU the maker's own count."""

    unit: Literal["cores"]
    value: float = Field(ge=1, le=100_000, multiple_of=1)


class Clock(Figure):
    """In GHz."""

    unit: Literal["GHz"]
    value: float = Field(ge=0.1, le=10)


class Bandwidth(Figure):
    """In GB/s, 10^9 bytes a second."""

    unit: Literal["GB/s"]
    value: float = Field(ge=0.1, le=20_000)


class BandwidthAt(Bandwidth):
    """The same, reading a working set of so many MB again and again."""

    working_set_mb: float = Field(ge=0.001, le=1e6)


class IntegerRate(Figure):
    """In GOP/s, 10^9 multiplications or additions of 8-bit numbers a second."""

    unit: Literal["GOP/s"]
    value: float = Field(ge=1, le=1e7)


class FloatRate(Figure):
    """In GFLOP/s, 10^9 multiplications or additions of 32-bit numbers a second."""

    unit: Literal["GFLOP/s"]
    value: float = Field(ge=1, le=1e7)


class Power(Figure):
    """In W."""

    unit: Literal["W"]
    value: float = Field(ge=0.1, le=2_000)


class Share(Figure):
    """A part of a whole, above 0 and at most 1."""

    unit: Literal["share"]
    value: float = Field(gt=0, le=1)


class Overhead(Figure):
    """In us."""

    unit: Literal["us"]
    value: float = Field(ge=0, le=100_000)
