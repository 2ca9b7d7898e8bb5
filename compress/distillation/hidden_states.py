"""Matching of hidden states: a student's residual stream against its teacher's.

Shape suffixes: B rows, T tokens, N tokens of a packed batch in one row, D student's hidden_size, E teacher's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compress.distillation.settings import LayerMap
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import IGNORE

_RIDGE = 1e-3  # of a fitted projection, as a share of the states' mean square
_LEAST_SQUARE = 1e-12  # of a teacher's state, so that a state of zeros divides by something


def hidden_matching_loss(
    student_ND: Tensor, teacher_NE: Tensor, targets_N: Tensor, projection_ED: Tensor | None = None
) -> Tensor:
    """Sum over scored tokens of |P s - t|^2 / |t|^2, for the student's state s and the teacher's t.

    FitNets' hint loss (https://arxiv.org/abs/1412.6550) with a linear regressor. Division by the token's own |t|^2
    makes every token and every layer count alike: a zero P s costs 1 everywhere. In a plain mean square the few tokens
    with massive activations (https://arxiv.org/abs/2402.17762) would be all.

    Args:
        student_ND: states of one layer; they get a gradient.
        teacher_NE: states of the teacher's layer.
        targets_N: IGNORE where nothing is scored.
        projection_ED: P, which gets a gradient; the identity if None, where D is E.
    """
    with torch.autocast(student_ND.device.type, enabled=False):
        predicted_NE = student_ND.float()
        if projection_ED is not None:
            predicted_NE = predicted_NE @ projection_ED.T
        t_NE = teacher_NE.float()
        size_N = t_NE.square().sum(dim=-1).clamp(min=_LEAST_SQUARE)
        errors_N = (predicted_NE - t_NE).square().sum(dim=-1) / size_N
        return errors_N[targets_N != IGNORE].sum()


class HiddenMatching(nn.Module):
    """Hidden-state matching with its learned projections, one a pair of layers; none where the sizes are equal.

    Attached to the student the projections are trained with it: two dimensions and not inside the blocks, so AdamW
    takes them under either optimizer, as it takes the head.
    """

    def __init__(self, student: ModelConfig, teacher: ModelConfig, layer_map: LayerMap, seed: int = 0) -> None:
        """Make the projections.

        Args:
            student: its shape.
            teacher: its shape.
            layer_map: pairs of states.
            seed: of the projections, isometries of the smaller space into the larger at first.
        """
        super().__init__()
        self.layer_map = layer_map
        self.projections = nn.ParameterList()
        if student.hidden_size == teacher.hidden_size:
            return
        generator = torch.Generator().manual_seed(seed)
        for _ in self.layer_map:
            matrix_ED = torch.empty(teacher.hidden_size, student.hidden_size)
            nn.init.orthogonal_(matrix_ED, generator=generator)
            self.projections.append(nn.Parameter(matrix_ED))

    @torch.no_grad()
    def fit(self, student_states: Sequence[Tensor], teacher_states: Sequence[Tensor], targets: Tensor) -> None:
        """Give the projections the least loss on one batch; arguments are those of `forward`.

        From random ones a short run of training would mostly learn them.
        """
        scored = targets.flatten() != IGNORE
        for projection_ED, (student, teacher) in zip(self.projections, self.layer_map, strict=False):
            s_ND, t_NE = (
                states.flatten(0, 1)[scored].double() for states in (student_states[student], teacher_states[teacher])
            )
            size_N1 = t_NE.square().sum(dim=-1, keepdim=True).clamp(min=_LEAST_SQUARE)
            gram_DD = s_ND.T @ (s_ND / size_N1)
            gram_DD += _RIDGE * gram_DD.diagonal().mean() * torch.eye(len(gram_DD), device=gram_DD.device)
            projection_ED.copy_(torch.linalg.solve(gram_DD, s_ND.T @ (t_NE / size_N1)).T)

    def forward(self, student_states: Sequence[Tensor], teacher_states: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Sum over scored tokens of `hidden_matching_loss`, its mean over the pairs.

        Args:
            student_states: (B, T, D) each, as `SportsLLM.hidden` collects them.
            teacher_states: (B, T, E) each.
            targets: (B, T).
        """
        total = student_states[0].new_zeros((), dtype=torch.float32)
        for number, (student, teacher) in enumerate(self.layer_map):
            total = total + hidden_matching_loss(
                student_states[student].flatten(0, 1),
                teacher_states[teacher].flatten(0, 1),
                targets.flatten(),
                self.projections[number] if len(self.projections) else None,
            )
        return total / len(self.layer_map)


@contextmanager
def attached(student: SportsLLM, module: nn.Module | None) -> Iterator[None]:
    """Inside the `with`, `module` is the student's `matching`, on its device; the training loop trains and saves it."""
    if module is None:
        yield
        return
    if hasattr(student, "matching"):
        raise ValueError("the student has a matching module already")
    student.add_module("matching", module.to(student.head_weight.device))
    try:
        yield
    finally:
        del student.matching
