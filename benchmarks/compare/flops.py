"""Training cost in floating-point operations (FLOPs), from shapes alone; one multiply-add is two.

Counted are the products with weight matrices and attention, that is nearly all (Kaplan et al., appendix B of
https://arxiv.org/abs/2001.08361; PaLM's appendix B, https://arxiv.org/abs/2204.02311, calls it model FLOPs). Not
counted: norms, rotations, the softmax over the vocabulary, the optimizer, validation and anything computed twice to
save memory. Letters: T tokens of a sequence, L layers, D hidden_size, V vocabulary, H query heads, E head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_matrices
from sportsllm.models.size import block_numbers

# The backward pass is two products for each one of the forward pass (Kaplan et al., section 2.1).
FORWARDS_PER_STEP = 3


def matmul_parameters(config: ModelConfig) -> int:
    """N, the numbers each token is multiplied by: the blocks' matrices and the (V, D) head.

    The embedding is a look-up and free; a tied head is multiplied by all the same and counts.
    """
    in_blocks = block_numbers(config)
    return in_blocks + config.vocab_size * config.hidden_size


def forward_flops_per_token(config: ModelConfig, sequence: int) -> int:
    """FLOPs of reading one token, the mean over a sequence of T = `sequence` tokens.

        2 N + 4 L (H E) c    with c = (T + 1) / 2, the mean number of positions a token attends to

    Each attended position costs 2 H E for its score and 2 H E for its value. PaLM and Chinchilla's appendix F
    (https://arxiv.org/abs/2203.15556) have c = T; causal attention needs half. Packed documents attend inside
    themselves only, so for them this is an upper bound.
    """
    return 2 * matmul_parameters(config) + 2 * config.num_hidden_layers * config.query_size * (sequence + 1)


def training_flops_per_token(config: ModelConfig, sequence: int) -> int:
    """FLOPs of training on one token, 6 N + 12 L (H E) (T + 1) / 2: forward, and twice that backward."""
    return FORWARDS_PER_STEP * forward_flops_per_token(config, sequence)


def clone_flops_per_batch(teacher: ModelConfig, student: ModelConfig) -> int:
    """FLOPs of a low-rank clone's weights, made once a batch, and of their gradients, twice that.

    P_out^T W P_in costs 2 o O I + 2 o I i or 2 O I i + 2 o O i, whichever is less, for W of O outputs and I inputs in
    the teacher and o, i in the student. A side that stays as it is has no product, which this upper bound ignores.
    """
    total = 2 * teacher.vocab_size * teacher.hidden_size * student.hidden_size  # the embedding has P_in alone
    for theirs, ours in zip(block_matrices(teacher), block_matrices(student), strict=True):
        big_o, big_i, small_o, small_i = theirs.rows, theirs.columns, ours.rows, ours.columns
        out_first = small_o * big_o * big_i + small_o * big_i * small_i
        total += 2 * student.num_hidden_layers * min(out_first, big_o * big_i * small_i + small_o * big_o * small_i)
    return FORWARDS_PER_STEP * total


def repair_flops_per_token(full: ModelConfig, cut: ModelConfig, sequence: int) -> int:
    """FLOPs of fitting a cut model's matrices to the full one's values (`prune` with repair), for a calibration token.

        2 forward(full) + 2 forward(cut) + sum over the cut model's matrices of 2 I (I + O)

    An estimate: every block runs about twice in either model, and each matrix of I inputs and O outputs adds its
    inputs' (I, I) and (I, O) products. Heads are not run.
    """
    regression = 2 * cut.num_hidden_layers * sum(m.columns * (m.columns + m.rows) for m in block_matrices(cut))
    blocks = sum(
        forward_flops_per_token(config, sequence) - 2 * config.vocab_size * config.hidden_size for config in (full, cut)
    )
    return 2 * blocks + regression


def cut_flops(
    full: ModelConfig, cut: ModelConfig, sequence: int, *, tokens: int, scored: bool, candidates: int, repaired: bool
) -> int:
    """FLOPs of a cut on calibration text. Merging key/value heads and solving the repair's equations are left out.

    Args:
        full: the model before.
        cut: the model after.
        sequence: tokens of one sample.
        tokens: of the calibration text.
        scored: whether the full model read it once to score its units; scores saved by an earlier cut count again.
        candidates: runs of layers that were left out on trial, one pass each.
        repaired: see `repair_flops_per_token`.
    """
    shorter = full.with_changes(num_hidden_layers=cut.num_hidden_layers)
    per_token = candidates * forward_flops_per_token(shorter, sequence)
    per_token += forward_flops_per_token(full, sequence) if scored else 0
    per_token += repair_flops_per_token(full, cut, sequence) if repaired else 0
    return tokens * per_token


@dataclass(frozen=True)
class TrainingCost:
    """FLOPs of one run by what they are for.

    `start` was spent by the runs it starts from, `importance` on scoring units before a cut and repairing it, and
    `signals` on the teacher's one pass over tokens whose signals are stored; all three before the first step.
    `student_per_token` and `teacher_per_token` are spent on each token of training; the teacher's is 0 where it does
    not run along.
    """

    student_per_token: int
    teacher_per_token: int = 0
    start: int = 0
    importance: int = 0
    signals: int = 0

    def at(self, tokens: int) -> int:
        """FLOPs spent once the run has trained on `tokens` tokens."""
        per_token = self.student_per_token + self.teacher_per_token
        return self.start + self.importance + self.signals + per_token * tokens

    def parts(self, tokens: int) -> dict[str, int]:
        """The same by part; they add up to `at`."""
        return {
            "start": self.start,
            "importance": self.importance,
            "signals": self.signals,
            "student": self.student_per_token * tokens,
            "teacher": self.teacher_per_token * tokens,
        }
