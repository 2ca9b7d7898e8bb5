"""The distance of two models' logits, what each pass of the gate allows and why, and the sequences that it reads.

Needs no torch: `verify --provider` compares an export on two of ONNX Runtime's providers with it.
Shape suffixes: T tokens, V vocabulary, B sequences, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from export.runtime.decoder import OnnxDecoder
from export.runtime.providers import Placement, find_provider
from sportsllm.files import read_json
from sportsllm.inference.decoder import Decoder, Logits, log_softmax
from sportsllm.models.config import ModelConfig
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer

PARITY_FILE = "parity.json"
_POSITIONS_AT_ONCE, _ROWS_AT_ONCE = 64, 8  # copies of a large vocabulary's logits add up


@dataclass(frozen=True)
class Limits:
    """What a pass may differ by: `relative_error`, `kl` and `greedy_match` of a `Comparison`."""

    error: float
    kl: float
    greedy_match: float


# Float32 in another order of additions. Measured: 2e-6 to 1e-5 of the spread for 5 to 12 layers, trained or fresh;
# 5e-6 for 32 fresh layers, and 1e-4 where these have weights six times as large, so that they amplify any difference.
EXACT = Limits(error=3e-4, kl=1e-6, greedy_match=0.99)
# With an INT8 cache a number near the middle between two steps goes either way with the order of additions, and then
# differs by a whole step. Measured: error 1e-3 to 2e-2, KL up to 3e-6; 30 layers of SmolLM2-135M, which amplify any
# difference, 0.16 and 2e-4. What such differences cost a model is measured (`int8_cache_limits`).
EXACT_INT8_CACHE = Limits(error=0.1, kl=1e-4, greedy_match=0.98)
# Float32's order of additions moves keys and values by about as much: a few units in the last place.
MOVED = 1e-6
_TIMES_MOVED = 3
# The deployed pass bounds what rounding costs; finding mistakes is the exact pass's work. Where a fresh model's best
# token leads by less than the rounding noise, greedy choices differ although nothing is wrong: `greedy_match` is low.
DEPLOYED = {
    # Over a float16 cache, where ONNX Runtime's operator computes scores and sums in float16. Measured: error 1e-3 to
    # 3e-2, KL up to 1.4e-6.
    "fp32": Limits(error=0.3, kl=1e-3, greedy_match=0.9),
    # Weights rounded to 11 bits. Measured: error 2e-3 to 5e-3, KL up to 1e-6, all but 0.3% of choices agree.
    "fp16": Limits(error=0.1, kl=1e-3, greedy_match=0.9),
    # Activations rounded to int8 in blocks; the weights' own bits play no part, the reference has the same. Measured:
    # error 0.03 to 0.13, KL up to 9e-4 (trained, block 128), 95% (97M, fresh) to 99% (trained) of choices agree.
    "int8": Limits(error=1.0, kl=1e-2, greedy_match=0.75),
    "int4": Limits(error=1.0, kl=1e-2, greedy_match=0.75),
}
# A GGUF file read back: scales rounded to 11 bits, and codes of -128 moved by one. Measured: error up to 0.11.
READ_BACK = Limits(error=0.3, kl=5e-3, greedy_match=0.9)
# A token whose experts are nearly level is sent to another one by any rounding; its logits are then another model's.
# Measured, fresh: error up to 2.5 in one token of 200, KL as without experts.
EXPERTS_ERROR = 10.0
# Where blocks of tokens have nearly level scores, the order of additions chooses others, and the token sees them.
# Measured, fresh, with four blocks: error 1.3 in one token of 430, KL of 11 decoded ones 9e-3; with an index key of
# the wrong sign KL 0.026 to 0.036. What sees no more than is selected keeps the limits of the exact pass.
SELECTED = Limits(error=10.0, kl=1.5e-2, greedy_match=0.75)
# The same with int8 activations. Measured: error 2.2, KL 3e-3, 73% of 11 choices agree.
SELECTED_DEPLOYED = Limits(error=10.0, kl=5e-2, greedy_match=0.6)


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

    def figures(self) -> dict[str, float]:
        """The largest logit error and KL of all kinds of reading, and `greedy_match`."""
        return {
            "max_abs_logit_error": max(c.max_abs_logit_error for c in self.comparisons),
            "kl": max(c.kl for c in self.comparisons),
            "greedy_match": self.greedy_match,
        }

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
    passes: tuple[Pass, ...]  # exact, deployed if that differs, and native with this program's kernels
    unequal_tables: tuple[str, ...]  # stored tables that differ from the model's
    # Texts that do not survive encoding and decoding; only reported, since normalising tokenizers do that by design.
    tokenizer_changes: tuple[str, ...] | None  # None without a tokenizer

    def failures(self) -> list[str]:
        """One line for each reason not to publish."""
        lines = [f"table {name!r} differs from the model's" for name in self.unequal_tables]
        return lines + [line for item in self.passes for line in item.failures()]

    def only_rounding_failed(self) -> bool:
        """Whether the graph computes what the model does, and rounding its activations costs too much."""
        failed = {item.name for item in self.passes if item.failures()}
        return not self.unequal_tables and failed <= {"deployed", "native"}

    def excess(self) -> float:
        """Mean square of the rounding errors relative to what the limits allow, by the figure that is furthest off."""
        return max(
            max((c.relative_error / item.limits.error) ** 2, c.kl / item.limits.kl)
            for item in self.passes
            if item.name in ("deployed", "native")
            for c in item.comparisons
        )

    @property
    def passed(self) -> bool:
        """Whether the export may be published."""
        return not self.failures()

    def input_rounding(self) -> dict[str, dict[str, float]]:
        """What rounding activations to 8 bits costs, by the kernels that do it: the mean KL in nats a token and the
        share of greedy choices as in PyTorch, over `positions` of all kinds of reading. Empty for dense weights."""
        kernels = {"deployed": "portable", "native": "native"} if self.precision.startswith("int") else {}
        cost = {kernels[item.name]: merge("", item.comparisons) for item in self.passes if item.name in kernels}
        figures = ("kl", "greedy_match", "positions")
        return {name: {figure: getattr(whole, figure) for figure in figures} for name, whole in cost.items()}

    def to_dict(self) -> dict[str, Any]:
        """parity.json; the figures at the top are those of the file as it runs everywhere."""
        last = next((item for item in self.passes if item.name == "deployed"), self.passes[0])
        return {
            **last.figures(),
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
    cuts = range(_ROWS_AT_ONCE, len(expected_TV), _ROWS_AT_ONCE)
    rows = zip(np.split(expected_TV, cuts), np.split(found_TV, cuts), strict=True)
    figures = zip(*(_compare_rows(*each) for each in rows), strict=True)
    error_T, spread_T, kl_T, match_T = (np.concatenate(each) for each in figures)
    error, spread = float(error_T.max()), max(float(spread_T.mean()), float(np.finfo(np.float32).tiny))
    return Comparison("", len(expected_TV), error, error / spread, max(float(kl_T.mean()), 0.0), float(match_T.mean()))


def _compare_rows(expected_TV: Logits, found_TV: Logits) -> tuple[npt.NDArray[Any], ...]:
    """By position: the largest error, the reference's spread, KL in nats, whether the likeliest token agrees."""
    log_p, log_q = log_softmax(expected_TV), log_softmax(found_TV)
    kl_T = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1, dtype=np.float64)
    match_T = expected_TV.argmax(axis=-1) == found_TV.argmax(axis=-1)
    return np.abs(expected_TV - found_TV).max(axis=-1), expected_TV.std(axis=-1), kl_T, match_T


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


def int8_cache_limits(moved: Comparison) -> Limits:
    """Limits of the exact pass with an INT8 cache, never wider than those of the deployed pass.

    Args:
        moved: the reference beside itself with keys and values moved by `MOVED` before they are rounded.
    """
    least, most = EXACT_INT8_CACHE, DEPLOYED["int8"]
    return Limits(
        error=min(max(least.error, _TIMES_MOVED * moved.relative_error), most.error),
        kl=min(max(least.kl, _TIMES_MOVED * moved.kl), most.kl),
        greedy_match=max(min(least.greedy_match, 1 - _TIMES_MOVED * (1 - moved.greedy_match)), most.greedy_match),
    )


SEED = 20_260
# ONNX Runtime reads the first in several chunks. With a tokenizer the first and the third are text, and the first goes
# on with random tokens if the text ends; the second is random, so that it visits many rows of the embedding.
SEQUENCE_LENGTHS = (300, 56, 48)
BEYOND_WINDOW = 64
"""Tokens of the first sequence behind the longest sliding window."""
PARAGRAPH = """\
The match had been level for most of the second half when the referee stopped play near the halfway line. \
Both captains walked over, the crowd of 24,310 grew quiet, and for a minute nobody knew what would happen next. "We \
had to keep our heads," the manager said afterwards, "because one mistake could cost us the season." In the 87th \
minute her side won a corner on the left. Martinez took it quickly, low and hard, and the ball fell to Okafor, who \
turned once and scored from eight metres. It was her eleventh goal in fourteen games.

The visitors came back at once. They sent two defenders forward, won three free kicks in stoppage time, and hit the \
post with the last of them. At the final whistle the score was 2-1, and the home side moved up to third place in the \
table, four points behind the leaders with five matches left to play. Next week they travel north for the second leg \
of the cup semi-final; the first, in March, ended without a goal. Rain is expected, and the groundsman has already \
covered half of the pitch. Tickets are on sale until Friday at 18:00, from 12 pounds for children and 25 for adults.
"""
STEPS = 4  # few, since exact steps are slow: at 8 bits each one unpacks all the weights
TEXTS = (
    "The home side won 3-1 after extra time.",
    "First line\nsecond line:  two spaces, a\ttab and “quotes”.",
    "Zoë ran 57½ metres, très vite! ⚽🏏",
)


def make_sequences(config: ModelConfig, tokenizer: TextTokenizer | None) -> list[list[int]]:
    """Three token sequences, of different lengths if the context allows; the same every time.

    The first is longer than what is selected, and than any sliding window.
    """
    rng, context = np.random.default_rng(SEED), config.max_position_embeddings
    selected = 0 if config.selection is None else config.selection.tokens
    window = max(config.window(layer) or 0 for layer in range(config.num_hidden_layers))
    longest = max(SEQUENCE_LENGTHS[0] + selected, window + BEYOND_WINDOW)
    lengths = (longest, *SEQUENCE_LENGTHS[1:])
    sequences: list[list[int]] = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
    if tokenizer is not None:
        text = [tokenizer.begin_id, *tokenizer.encode(PARAGRAPH)][:longest]
        sequences[0][: len(text)] = text
        sequences[2] = [tokenizer.begin_id, *tokenizer.encode("\n".join(TEXTS))]
    return [sequence[:context] for sequence in sequences]


def run_pass(
    name: str, decoder: OnnxDecoder, sequences: Sequence[Sequence[int]], expected: Sequence[Logits], limits: Limits
) -> Pass:
    """Read the sequences of `make_sequences` in every way and compare with the expected logits, (T, V) each.

    What comes before a token does not change with what follows, so their beginnings serve as shorter prompts.
    """
    whole = [_compare_prompt(decoder, row, want) for row, want in zip(sequences, expected, strict=True)]
    # A long prompt, which is read in chunks; one that starts from a single token; a single token and no more.
    cases = [(0, len(sequences[0])), (1, STEPS + 1), (1, 1)]
    stepped = [_compare_decoding(decoder, [sequences[i][:cut]], [expected[i][:cut]]) for i, cut in cases]
    # Prompts of 3, 17 and 40 tokens at most, decoded together.
    cuts = [length + STEPS for length in (3, 17, 40)]
    rows = [row[:cut] for row, cut in zip(sequences, cuts, strict=True)]
    together = _compare_decoding(decoder, rows, [want[:cut] for want, cut in zip(expected, cuts, strict=True)])
    kinds = {"prefill": whole, "decode": stepped, "ragged batch": [together]}
    return Pass(name, limits, tuple(merge(kind, parts) for kind, parts in kinds.items()))


def _compare_prompt(decoder: Decoder, row: Sequence[int], expected_TV: Logits) -> Comparison:
    """Read a prompt whole; only a chunk of its logits is held."""
    parts, start = list[Comparison](), 0
    for found_TV in decoder.stream_logits(row):
        parts.append(compare(expected_TV[start : start + len(found_TV)], found_TV))
        start += len(found_TV)
    return merge("", parts)


def _compare_decoding(decoder: Decoder, rows: Sequence[Sequence[int]], expected: Sequence[Logits]) -> Comparison:
    """Read all but the last steps' tokens of each row as prompts, then those one by one."""
    steps = min(STEPS, min(map(len, rows)) - 1)
    found = [decoder.prefill([row[: len(row) - steps] for row in rows], max_length=max(map(len, rows)))]
    found += [decoder.step([row[len(row) - left] for row in rows]) for left in range(steps, 0, -1)]
    found_SBV = np.stack(found)
    return merge("", [compare(want[-steps - 1 :], found_SBV[:, row]) for row, want in enumerate(expected)])


def check_provider(directory: Path, provider: str, threads: int | None = None) -> tuple[Placement | None, Pass]:
    """Read the gate's sequences on a provider and on the CPU's, and compare the logits.

    Returns:
        Where the nodes run, None on the CPU provider; and the comparison, within the limits of the export's own
        deployed pass, which bound what fewer bits of activations cost; float16's if there is none.

    Raises:
        ArtifactError: the export is damaged.
        UsageError, ResourceError: the provider is not there, or cannot run the graph.
    """
    decoder = OnnxDecoder(directory, threads, kernels="portable", provider=find_provider(provider))
    reference = OnnxDecoder(directory, threads, kernels="portable")
    tokenizer = load_tokenizer(directory, decoder.config) if (directory / "tokenizer.json").exists() else None
    sequences = make_sequences(decoder.config, tokenizer)
    expected = [reference.logits(row) for row in sequences]
    passes = read_json(directory / PARITY_FILE)["passes"] if (directory / PARITY_FILE).exists() else []
    deployed = [Limits(**item["limits"]) for item in passes if item["name"] == "deployed"]
    limits = deployed[0] if deployed else DEPLOYED["fp16" if passes else "int4"]
    return decoder.placement, run_pass(f"provider {provider}", decoder, sequences, expected, limits)
