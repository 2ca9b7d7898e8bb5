"""Candidates: for each way to cut a teacher and each weight format, the largest model within the budget.

Ways are nothing, one dimension alone, all widths evenly, and a smaller vocabulary. Quality is not estimated: trials
decide which candidate is best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import known
from benchmarks.model_size import ModelFormat, file_bytes
from benchmarks.predict.latency import predict_figures
from compress.pruning.shapes import Shape, head_counts, hidden_sizes, shape_for_share, widths
from export.graph.decoder import CACHE_KINDS, check_kinds, computes_in_half
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.memory import BLOCK_SIZES, usual_cache

WHOLE = "nothing cut"
ANCHORS = ("feed-forward", "depth", "evenly")
"""The simplest cuts, which are tried before all others."""
_EVEN_SHARES = range(5, 100, 5)  # percent of the parameters
_EXPERT_SHARES = (2, 4)  # half and a quarter of the experts


@dataclass(frozen=True)
class Size:
    """Dimensions and vocabulary size after pruning."""

    shape: Shape
    vocab_size: int

    def applied_to(self, teacher: ModelConfig) -> ModelConfig:
        """The config of a teacher that is cut to it."""
        return self.shape.applied_to(teacher).with_changes(vocab_size=self.vocab_size)

    @property
    def name(self) -> str:
        """Dimensions by their letters: l5-h96-f160-a3-k3-v4096, and of a mixture e4 behind them."""
        shape = self.shape
        letters = {"l": shape.layers, "h": shape.hidden, "f": shape.intermediate, "a": shape.heads, "k": shape.kv_heads}
        letters |= {"v": self.vocab_size} | ({"e": shape.experts} if shape.experts else {})
        return "-".join(f"{letter}{value}" for letter, value in letters.items())


@dataclass(frozen=True)
class Candidate:
    """A model that the search may make.

    Attributes:
        way: what is cut: a name of `ways`, or `mixed`.
        size, format: its dimensions and its weight format.
        parameters: number of parameters.
        predicted: predicted figures on the device, by the limits' names.
        bound_by: the limits that the next larger model of its way misses.
        closed_to: loaders that cannot open it.
    """

    way: str
    size: Size
    format: ModelFormat
    parameters: int
    predicted: Mapping[str, float]
    bound_by: tuple[str, ...] = ()
    closed_to: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique, for tables and directories."""
        return f"{self.size.name}-{self.format.name}"

    def record(self) -> dict[str, Any]:
        """For the result's `candidates`."""
        return {
            "name": self.name,
            "way": self.way,
            "shape": {**self.size.shape.sizes(), "vocab_size": self.size.vocab_size},
            "precision": self.format.name,
            "parameters": self.parameters,
            "predicted": {name: float(f"{value:.5g}") for name, value in self.predicted.items()},
            "bound_by": list(self.bound_by),
            "closed_to": list(self.closed_to),
        }


def candidate_of(way: str, size: Size, format: ModelFormat, teacher: ModelConfig, device: Device) -> Candidate:
    """A size in a format, with predictions for `device`."""
    config = size.applied_to(teacher)
    # optimum takes the heads' size from the hidden size, and makes its own cache.
    optimum = config.hidden_size == config.query_size and format.cache != "int8"
    found = predict_figures(config, device, format)
    predicted = known(found.figures)
    predicted["file_mb"] *= found.band["file_mb"]  # the most that it may be
    return Candidate(way, size, format, config.parameters, predicted, closed_to=() if optimum else ("optimum",))


def formats(teacher: ModelConfig, processor: str = "cpu") -> list[ModelFormat]:
    """Weight formats of candidates, finest first: dense, INT8 and INT4 in blocks of 64, and the smallest INT4, each
    with the caches that exports have. A GPU computes in float16.

    Raises:
        UsageError: an export has no graph of this kind of model, or none in float16 for a GPU.
    """
    check_kinds(teacher)
    if processor != "cpu" and not computes_in_half(teacher):
        raise UsageError("--provider: GPUs compute in float16, and this kind of model has no such graph; leave it out")
    caches = ["int8"] if teacher.attention_kind in CACHE_KINDS["int8"] else []
    smallest = min(
        (ModelFormat("int4", block_size, head_bits=4) for block_size in BLOCK_SIZES),
        key=lambda each: (file_bytes(teacher, each), each.block_size),
    )
    int8, int4 = (ModelFormat(name, min(64, smallest.block_size)) for name in ("int8", "int4"))
    if processor != "cpu":
        return [replace(each, cache="fp16") for each in (ModelFormat("fp16"), int8, int4, smallest)]
    return [
        replace(each, cache=cache)
        for each in (ModelFormat("fp32"), int8, int4, smallest)
        for cache in (usual_cache(teacher, each.quantized), *caches)
    ]


def ways(teacher: ModelConfig, vocabularies: Iterable[int] = ()) -> dict[str, list[Size]]:
    """The ways to make a teacher smaller, by name: sizes that can be cut, largest first.

    Each of the smaller `vocabularies` is cut alone, with the FFN, and with all widths.
    """
    full = Shape.of(teacher)
    groups = [pair for pair in head_counts(teacher) if pair[0] * full.kv_heads == pair[1] * full.heads]
    lines = {
        "feed-forward": [replace(full, intermediate=width) for width in widths(full.intermediate)],
        "evenly": [one for percent in _EVEN_SHARES if (one := _even_cut(teacher, percent / 100))],
        "depth": [replace(full, layers=count) for count in range(1, full.layers)],
        "hidden size": [replace(full, hidden=width) for width in hidden_sizes(teacher)],
        "heads": [replace(full, heads=heads, kv_heads=kv_heads) for heads, kv_heads in groups],
        "experts": [replace(full, experts=count) for count in expert_counts(teacher)],
        "evenly and depth": [
            replace(even, layers=layers)
            for layers in range(1, full.layers)
            if (even := _even_cut(teacher, layers / full.layers))
        ],
    }
    cuts = {
        way: [shape for shape in dict.fromkeys(reversed(line)) if shape != full and can_be_cut(shape, teacher)]
        for way, line in lines.items()
    }
    found = {WHOLE: [Size(full, teacher.vocab_size)]}
    found |= {way: [Size(shape, teacher.vocab_size) for shape in line] for way, line in cuts.items()}
    for tokens in vocabularies:
        found[f"{tokens:,} tokens"] = [Size(full, tokens)]
        for way in ("feed-forward", "evenly"):
            found[f"{tokens:,} tokens, {way}"] = [Size(shape, tokens) for shape in cuts[way]]
    return {way: sizes for way, sizes in found.items() if sizes}


def expert_counts(teacher: ModelConfig) -> list[int]:
    """How many experts a candidate may have, fewest first: a quarter, half, all; no fewer than a token is sent to."""
    experts = teacher.experts
    if experts is None or experts.groups > 1:
        return [experts.count] if experts else [0]
    fewer = (experts.count // share for share in reversed(_EXPERT_SHARES))
    return [*(count for count in fewer if count >= experts.active), experts.count]


def _even_cut(teacher: ModelConfig, share: float) -> Shape | None:
    """The cut of all widths alike to a share of the parameters, if there is one so small."""
    try:
        return shape_for_share(teacher, share)
    except UsageError:
        return None


def can_be_cut(shape: Shape, teacher: ModelConfig) -> bool:
    """Whether pruning can make a shape of a teacher."""
    try:
        shape.applied_to(teacher)
    except UsageError:
        return False
    return True
