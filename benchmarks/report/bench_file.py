"""Bench results as files: read, and checked for what the report shows of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from benchmarks.labels import LIMITS
from sportsllm.errors import ArtifactError
from sportsllm.formats.json_files import JsonObject, read_json, validate

_Figure = Annotated[float, Field(allow_inf_nan=False)] | None
_Verdict = Literal["pass", "fail", "uncertain"]
_Tokens = Annotated[str, Field(pattern=r"^[1-9]\d{0,8}$")]


@dataclass(frozen=True)
class _Limit:
    name: str
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    unit: str
    verdict: _Verdict
    value: _Figure
    low: _Figure = None
    high: _Figure = None
    source: str | None = None


@dataclass(frozen=True)
class _Budget:
    target: str
    verdict: _Verdict
    limits: list[_Limit]
    tpot_depth_tokens: int | None = None
    decided_by: str | None = None


@dataclass(frozen=True)
class _Bench:
    """The fields that the report reads. Others are shown as they are, or not at all."""

    directory: str
    tpot_ms: dict[_Tokens, dict[str, _Figure]]
    ttft_ms: dict[_Tokens, _Figure] = field(default_factory=dict)
    decode_tokens_per_s: dict[_Tokens, _Figure] | None = None
    budget: _Budget | None = None
    parameters: int | None = None
    file_bytes: _Figure = None
    bits_per_byte: _Figure = None
    teacher_bits_per_byte: _Figure = None
    peak_rss_bytes: _Figure = None
    peak_rss_context_tokens: int | None = None
    context_length: int | None = None
    threads: int | None = None
    clean: bool = True
    text: list[str] | None = None
    machine: dict[str, Any] | None = None
    memory_floor: JsonObject | None = None
    memory_split: dict[str, Any] | None = None
    sustained: JsonObject | None = None
    raw: JsonObject | None = None
    roofs: JsonObject | None = None


def read_bench(path: Path) -> JsonObject:
    """A result of `bench` with what the report needs.

    Raises:
        ArtifactError: damaged, or no result of `bench`.
    """
    data = read_json(path)
    if not isinstance(data.get("tpot_ms"), dict):
        raise ArtifactError(f"{path}: is not a result of `bench`; write one with bench --out")
    checked = validate(_Bench, data, path, "measure again with bench --out")
    unknown = [limit.name for limit in (checked.budget.limits if checked.budget else []) if limit.name not in LIMITS]
    if unknown or any(percentiles.get("p50") is None for percentiles in checked.tpot_ms.values()):
        raise ArtifactError(f"{path}: has a limit or a time that is not known; measure again with bench --out")
    return data
