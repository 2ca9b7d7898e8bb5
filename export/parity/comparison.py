"""The distance of two models' logits, and what the gate reports of it.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sportsllm.inference.decoder import Logits, log_softmax

_POSITIONS_AT_ONCE = 64  # float64 copies of a large vocabulary's logits add up


@dataclass(frozen=True)
class Limits:
    """What a pass may differ by: `relative_error`, `kl` and `greedy_match` of a `Comparison`."""

    error: float
    kl: float
    greedy_match: float


@dataclass(frozen=True)
class Comparison:
    """One kind of reading in one pass."""

    kind: str  # `prefill`, `decode` or `ragged batch`
    positions: int  # logit vectors compared
    max_abs_logit_error: float  # largest difference of two logits
    # That, in units of the reference's spread (standard deviation of one position's logits, averaged), so that a limit
    # means the same for any scale of logits.
    relative_error: float
    kl: float  # mean KL(reference || export), nats
    greedy_match: float  # share of positions whose likeliest token agrees


@dataclass(frozen=True)
class Pass:
    """All kinds of reading by one graph, against one set of limits."""

    name: str
    limits: Limits
    comparisons: tuple[Comparison, ...]

    @property
    def greedy_match(self) -> float:
        """Share over all kinds; a kind alone has too few positions."""
        total = sum(c.positions for c in self.comparisons)
        return sum(c.greedy_match * c.positions for c in self.comparisons) / total

    def failures(self) -> list[str]:
        """One line for each limit that is missed; NaN misses it."""
        lines = []
        for c in self.comparisons:
            figures = {"logit error / spread": (c.relative_error, self.limits.error), "KL": (c.kl, self.limits.kl)}
            for label, (value, limit) in figures.items():
                if not value <= limit:
                    lines.append(f"{self.name} pass, {c.kind}: {label} is {value:.3g}, limit {limit:g}")
        if not self.greedy_match >= self.limits.greedy_match:
            agree, limit = self.greedy_match, self.limits.greedy_match
            lines.append(f"{self.name} pass: {agree:.1%} of greedy choices agree, limit {limit:.0%}")
        return lines


@dataclass(frozen=True)
class ParityReport:
    """What the gate found."""

    precision: str  # `fp32`, `fp16`, `int8` or `int4`: the smallest in the graph
    passes: tuple[Pass, ...]  # exact, deployed where that differs, and native with this program's kernels
    unequal_tables: tuple[str, ...]  # stored tables that differ from the model's
    # Texts that do not survive encoding and decoding; only reported, since normalising tokenizers do that by design.
    tokenizer_changes: tuple[str, ...] | None  # None without a tokenizer

    def failures(self) -> list[str]:
        """One line for each reason not to publish."""
        lines = [f"table {name!r} differs from the model's" for name in self.unequal_tables]
        return lines + [line for item in self.passes for line in item.failures()]

    def only_rounding_failed(self) -> bool:
        """Whether the graph computes what the model does, and rounding its activations costs too much."""
        return not self.unequal_tables and all(
            item.name in ("deployed", "native") for item in self.passes if item.failures()
        )

    @property
    def passed(self) -> bool:
        """Whether the export may be published."""
        return not self.failures()

    def input_rounding(self) -> dict[str, dict[str, float]]:
        """What rounding activations to 8 bits costs, by the kernels that do it: the mean KL in nats a token and the
        share of greedy choices as in PyTorch, over `positions` of all kinds of reading. Empty for dense weights."""
        if not self.precision.startswith("int"):
            return {}
        runs = {"deployed": "portable", "native": "native"}
        cost = {}
        for item in self.passes:
            if item.name in runs:
                whole = merge("", item.comparisons)
                figures = {"kl": whole.kl, "greedy_match": whole.greedy_match, "positions": whole.positions}
                cost[runs[item.name]] = figures
        return cost

    def to_dict(self) -> dict[str, Any]:
        """parity.json; the figures at the top are those of the file as it runs everywhere."""
        last = next((item for item in self.passes if item.name == "deployed"), self.passes[0])
        return {
            "max_abs_logit_error": max(c.max_abs_logit_error for c in last.comparisons),
            "kl": max(c.kl for c in last.comparisons),
            "greedy_match": last.greedy_match,
            "passed": self.passed,
            "failures": self.failures(),
            "input_rounding": self.input_rounding(),
            **asdict(self),
            "tokenizer_changes": None if self.tokenizer_changes is None else list(self.tokenizer_changes),
        }


def compare(expected_TV: Logits, found_TV: Logits) -> Comparison:
    """Compare the logits of one sequence, (T, V) each."""
    cuts = range(_POSITIONS_AT_ONCE, len(expected_TV), _POSITIONS_AT_ONCE)
    pieces = zip(np.split(expected_TV, cuts), np.split(found_TV, cuts), strict=True)
    return merge("", [_compare_piece(*piece) for piece in pieces])


def _compare_piece(expected_TV: Logits, found_TV: Logits) -> Comparison:
    error_T = np.abs(expected_TV - found_TV).max(axis=-1)
    spread = max(float(expected_TV.std(axis=-1).mean()), float(np.finfo(np.float32).tiny))
    log_p, log_q = log_softmax(expected_TV), log_softmax(found_TV)
    kl = float((np.exp(log_p) * (log_p - log_q)).sum(axis=-1, dtype=np.float64).mean())
    match = float((expected_TV.argmax(axis=-1) == found_TV.argmax(axis=-1)).mean())
    error = float(error_T.max())
    return Comparison("", len(expected_TV), error, error / spread, max(kl, 0.0), match)


def merge(kind: str, parts: Sequence[Comparison]) -> Comparison:
    """The largest errors and the means over all positions."""
    positions = np.array([part.positions for part in parts])
    weights = positions / positions.sum()
    return Comparison(
        kind,
        int(positions.sum()),
        float(np.max([part.max_abs_logit_error for part in parts])),
        float(np.max([part.relative_error for part in parts])),
        float(weights @ [part.kl for part in parts]),
        float(weights @ [part.greedy_match for part in parts]),
    )
