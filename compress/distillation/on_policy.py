"""On-policy distillation: the student writes, the teacher judges each token it wrote.

Text of the corpus never shows a student its own mistakes; its own text does. Generalized Knowledge Distillation
(https://arxiv.org/abs/2306.13649), algorithm 1: a share of the batches is the student's continuation of prompts from
the corpus, no gradient through the sampling. Shape suffixes: B rows, T tokens, P of the prompt, L written.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sportsllm.errors import UsageError
from sportsllm.models.attention import KVCache
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import IGNORE, Batch


def is_on_policy(share: float, seed: int, index: int) -> bool:
    """Whether batch `index` is one that the student writes: a draw that depends on seed and index alone."""
    return bool(np.random.default_rng([seed, index]).random() < share)


def prompts(batch: Batch, new_tokens: int, context: int) -> Tensor:
    """The start of the longest document in each row, (B, P), cut to the shortest of them.

    Raises:
        UsageError: no room for a prompt of one token and the new ones.
    """
    rows, length = batch.tokens.shape
    room = min(length, context) - new_tokens
    if room < 1:
        raise UsageError(
            f"--on-policy-tokens {new_tokens} leaves no room for a prompt in sequences of {min(length, context)}; "
            "use fewer"
        )
    spans = []
    ends = sorted({*batch.documents, *(length * row for row in range(1, rows + 1))})
    pieces = list(pairwise((0, *ends)))
    for row in range(rows):
        inside = [piece for piece in pieces if piece[0] // length == row]
        spans.append(max(inside, key=lambda piece: piece[1] - piece[0]))
    width = min(room, *(end - start for start, end in spans))
    flat = batch.tokens.flatten()
    return torch.stack([flat[start : start + width] for start, _ in spans])


@torch.inference_mode()
def write(student: SportsLLM, prompts_BP: Tensor, new_tokens: int, generator: torch.Generator) -> Tensor:
    """Prompts with `new_tokens` sampled from the student at temperature 1 behind each, (B, P + L).

    Args:
        student: left in the mode it is in.
        prompts_BP: on the student's device.
        generator: on the CPU, so that a seed means the same on every device.
    """
    was_training = student.training
    student.eval()
    count, width = prompts_BP.shape
    cache = KVCache(student.config, count, width + new_tokens, device=prompts_BP.device)
    read, written = prompts_BP, [prompts_BP]
    for _ in range(new_tokens):
        logits = student.logits(student.hidden(read, cache=cache)[:, -1])
        chosen = torch.multinomial(torch.softmax(logits.float().cpu(), dim=-1), 1, generator=generator)
        read = chosen.to(prompts_BP.device)
        written.append(read)
    student.train(was_training)
    return torch.cat(written, dim=1)


def written_batch(student: SportsLLM, batch: Batch, new_tokens: int, seed: int, end_id: int | None) -> Batch:
    """A batch of the student's own text: only what it wrote is scored, up to its first end token.

    Args:
        student: writes.
        batch: its documents' starts are the prompts.
        new_tokens: L, in every row.
        seed: with the batch's index it says what is drawn.
        end_id: the end token.

    Returns:
        (B, P + L - 1) tokens, each row one document.
    """
    generator = torch.Generator().manual_seed(int(np.random.default_rng([seed, batch.index, 1]).integers(2**62)))
    prompts_BP = prompts(batch, new_tokens, student.config.max_position_embeddings)
    rows_BT = write(student, prompts_BP, new_tokens, generator).clone()  # free of inference mode
    tokens_BT, targets_BT = rows_BT[:, :-1].contiguous(), rows_BT[:, 1:].clone()
    targets_BT[:, : prompts_BP.shape[1] - 1] = IGNORE
    if end_id is not None:
        own_BL = targets_BT[:, prompts_BP.shape[1] - 1 :]
        ended_BL = (own_BL == end_id).long()
        own_BL[ended_BL.cumsum(dim=1) - ended_BL > 0] = IGNORE
    count, length = tokens_BT.shape
    return Batch(tokens_BT, targets_BT, tuple(range(length, count * length + 1, length)), batch.index)
