"""The token sequences that gates read, and the ways in which they read them. Needs no torch: `verify` reads them too.

Shape suffixes: T tokens, V vocabulary, B sequences, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from export.parity.comparison import Comparison, Limits, Pass, compare, merge
from export.runtime.decoder import OnnxDecoder
from sportsllm.inference.decoder import Decoder, Logits
from sportsllm.models.config import ModelConfig
from sportsllm.text.tokenizer import TextTokenizer

SEED = 20_260
# ONNX Runtime reads the first in several pieces. With a tokenizer the first and the third are text, and the first goes
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
    whole = [compare(want, decoder.logits(row)) for row, want in zip(sequences, expected, strict=True)]
    # A long prompt, which is read in pieces; one that starts from a single token; a single token and no more.
    cases = [(0, len(sequences[0])), (1, STEPS + 1), (1, 1)]
    stepped = [_compare_decoding(decoder, [sequences[i][:cut]], [expected[i][:cut]]) for i, cut in cases]
    # Prompts of 3, 17 and 40 tokens at most, decoded together.
    cuts = [length + STEPS for length in (3, 17, 40)]
    rows = [row[:cut] for row, cut in zip(sequences, cuts, strict=True)]
    together = _compare_decoding(decoder, rows, [want[:cut] for want, cut in zip(expected, cuts, strict=True)])
    kinds = {"prefill": whole, "decode": stepped, "ragged batch": [together]}
    return Pass(name, limits, tuple(merge(kind, parts) for kind, parts in kinds.items()))


def _compare_decoding(decoder: Decoder, rows: Sequence[Sequence[int]], expected: Sequence[Logits]) -> Comparison:
    """Read all but the last steps' tokens of each row as prompts, then those one by one."""
    steps = min(STEPS, min(map(len, rows)) - 1)
    found = [decoder.prefill([row[: len(row) - steps] for row in rows], max_length=max(map(len, rows)))]
    found += [decoder.step([row[len(row) - left] for row in rows]) for left in range(steps, 0, -1)]
    found_SBV = np.stack(found)
    return merge("", [compare(want[-steps - 1 :], found_SBV[:, row]) for row, want in enumerate(expected)])
