"""Matching of what happens inside: a student's hidden states and attention relations against its teacher's.

Both losses are sums over scored tokens, as those over the vocabulary are, and make their gradients chunk by chunk in
the forward pass; neither keeps anything of the size of its intermediate results.
Shape suffixes: N tokens of a packed batch in one row, C tokens of a chunk, D student's hidden_size, E teacher's,
W width of all of one layer's queries (keys, values) together, A relation heads, L tokens of a document, R query rows of
a chunk, S keys that they see, P width of a relation head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from compress.distillation.divergences import forward_kl_rows
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import Block, SportsLLM
from sportsllm.text.packing import IGNORE
from sportsllm.training.chunked_loss import ChunkLoss, chunk_tokens, head_loss, scored_sum_

# (student's state, teacher's state), each from 0, the embedding's output, to the number of layers
LayerMap = tuple[tuple[int, int], ...]
# "q", "k", "v" -> what one layer's projection made, before rotation, (B, T, W)
Projected = dict[str, Tensor]
_LEAST_SQUARE = 1e-12  # of a teacher's state, so that a state of zeros divides by something
_LEAST_RELATION_WIDTH = 16
_RELATION_SCORES = 2**20  # scores of one model that exist at once
_UNSEEN = -1e30  # the same finite score in both models: probability 0, difference 0


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            loss, gradient = compute(x.float())
        ctx.gradient = gradient.to(x.dtype)
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient * grad, None


def _gradient_in_forward(x: Tensor, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    return cast(Tensor, cast(Any, _GradientInForward).apply(x, compute))


def default_layer_map(student_layers: int, teacher_layers: int) -> LayerMap:
    """Every student state with the teacher state at the same share of the depth (TinyBERT's uniform map)."""
    return tuple(
        (layer, (2 * layer * teacher_layers + student_layers) // (2 * student_layers))
        for layer in range(student_layers + 1)
    )


def check_layer_map(layer_map: Sequence[tuple[int, int]], student_layers: int, teacher_layers: int) -> LayerMap:
    """The map itself.

    Raises:
        UsageError: it is empty, names a student's state twice or one that does not exist.
    """
    students = [student for student, _ in layer_map]
    if not students or len(set(students)) < len(students):
        raise UsageError(f"--layer-map {_shown(layer_map)!r} must name at least one student layer, and none twice")
    for student, teacher in layer_map:
        if not (0 <= student <= student_layers and 0 <= teacher <= teacher_layers):
            raise UsageError(
                f"--layer-map has {student}:{teacher}; student layers go from 0 (the embedding) to {student_layers}, "
                f"teacher layers to {teacher_layers}"
            )
    return tuple(layer_map)


def parse_layer_map(text: str, student_layers: int, teacher_layers: int) -> LayerMap:
    """`0:0,2:4,6:12`, student layer : teacher layer.

    Raises:
        UsageError: another form, or see `check_layer_map`.
    """
    try:
        pairs = [(int(student), int(teacher)) for student, teacher in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise UsageError(f"--layer-map {text!r} is not of the form STUDENT:TEACHER,… such as 0:0,2:4") from None
    return check_layer_map(pairs, student_layers, teacher_layers)


def _shown(layer_map: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"{student}:{teacher}" for student, teacher in layer_map)


def relative_error_chunk(teacher_NE: Tensor, targets_N: Tensor) -> ChunkLoss:
    """|y - t|^2 / |t|^2 of each scored token, y what stands in for the teacher's state t.

    Division by the token's own |t|^2 makes every token and every layer count alike: a zero y costs 1 everywhere. In a
    plain mean square the few tokens with massive activations (https://arxiv.org/abs/2402.17762) would be all.
    """

    def chunk_loss(start: int, y_CE: Tensor) -> tuple[Tensor, Tensor]:
        part = slice(start, start + y_CE.shape[0])
        t_CE = teacher_NE[part].float()
        scale_C1 = t_CE.square().sum(dim=-1, keepdim=True).clamp_(min=_LEAST_SQUARE).reciprocal_()
        error_CE = y_CE.sub_(t_CE)
        losses_C = (error_CE.square().sum(dim=-1, keepdim=True) * scale_C1)[:, 0]
        gradient_CE = error_CE.mul_(2 * scale_C1)
        return scored_sum_(losses_C, gradient_CE, targets_N[part]), gradient_CE

    return chunk_loss


def hidden_matching_loss(
    student_ND: Tensor, teacher_NE: Tensor, targets_N: Tensor, projection_ED: Tensor | None = None
) -> Tensor:
    """Sum over scored tokens of |P s - t|^2 / |t|^2, for the student's state s and the teacher's t.

    FitNets' hint loss (https://arxiv.org/abs/1412.6550) with a linear regressor, made free of scale.

    Args:
        student_ND: states of one layer; they get a gradient.
        teacher_NE: states of the teacher's layer.
        targets_N: IGNORE where nothing is scored.
        projection_ED: P, which gets a gradient; the identity if None, where D is E.
    """
    chunk_loss = relative_error_chunk(teacher_NE, targets_N)
    if projection_ED is not None:
        return head_loss(student_ND, projection_ED, chunk_loss)

    def compute(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        total, gradient_ND = x_ND.new_zeros(()), torch.empty_like(x_ND)
        chunk = chunk_tokens(x_ND.shape[1], x_ND.device.type)
        for start in range(0, x_ND.shape[0], chunk):
            part_CD = gradient_ND[start : start + chunk].copy_(x_ND[start : start + chunk])
            total += chunk_loss(start, part_CD)[0]  # leaves its gradient in the part
        return total, gradient_ND

    return _gradient_in_forward(student_ND, compute)


class HiddenMatching(nn.Module):
    """Hidden-state matching with its learned projections, one a pair of layers.

    Attached to the student (`attach`) the projections are trained with it: two dimensions and not inside the blocks, so
    AdamW takes them under either optimizer, as it takes the head.
    """

    def __init__(
        self,
        student: ModelConfig,
        teacher: ModelConfig,
        layer_map: Sequence[tuple[int, int]] | None = None,
        always_project: bool = False,
        seed: int = 0,
    ) -> None:
        """Make the projections.

        Args:
            student: its shape.
            teacher: its shape.
            layer_map: pairs of states; `default_layer_map` if None.
            always_project: learn projections, identities at first, even where both hidden sizes are the same.
            seed: of the projections where they differ: an isometry, that of the smaller space into the larger.

        Raises:
            UsageError: see `check_layer_map`.
        """
        super().__init__()
        depths = (student.num_hidden_layers, teacher.num_hidden_layers)
        self.layer_map = default_layer_map(*depths) if layer_map is None else check_layer_map(layer_map, *depths)
        same = student.hidden_size == teacher.hidden_size
        generator = torch.Generator().manual_seed(seed)
        self.projections = nn.ParameterList()
        if same and not always_project:
            return
        for _ in self.layer_map:
            matrix_ED = torch.eye(teacher.hidden_size, student.hidden_size)
            if not same:
                nn.init.orthogonal_(matrix_ED, generator=generator)
            self.projections.append(nn.Parameter(matrix_ED))

    def forward(self, student_states: Sequence[Tensor], teacher_states: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Sum over scored tokens of `hidden_matching_loss`, its mean over the pairs.

        Args:
            student_states: (B, T, D) each, as `SportsLLM.hidden` collects them.
            teacher_states: (B, T, E) each.
            targets: (B, T).
        """
        total = student_states[0].new_zeros((), dtype=torch.float32)
        for number, (student, teacher) in enumerate(self.layer_map):
            projection = self.projections[number] if len(self.projections) else None
            total = total + hidden_matching_loss(
                student_states[student].flatten(0, 1),
                teacher_states[teacher].flatten(0, 1),
                targets.flatten(),
                projection,
            )
        return total / len(self.layer_map)


def attach(student: SportsLLM, module: nn.Module) -> None:
    """Make `module` the student's `matching`, on its device, so that the training loop trains and saves it too."""
    if hasattr(student, "matching"):
        raise ValueError("the student has a matching module already; detach it first")
    student.add_module("matching", module.to(student.head_weight.device))


def detach(student: SportsLLM) -> None:
    """Take the student's `matching` away again, before the student is saved as a checkpoint."""
    del student.matching


@contextmanager
def projected(model: SportsLLM, layer: int) -> Iterator[Projected]:
    """Catch what q_proj, k_proj and v_proj of a layer, counted from 0, make in a forward pass inside the `with`."""
    attention = cast(Block, model.model.layers[layer]).self_attn
    caught: Projected = {}

    def catch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            caught[name] = output

        return hook

    modules = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}
    handles = [module.register_forward_hook(catch(name)) for name, module in modules.items()]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()


def relation_heads(student: ModelConfig, teacher: ModelConfig, heads: int | None = None) -> int:
    """The number of relation heads: `heads`, or the most that fit all widths and are 16 wide or wider.

    MiniLMv2 takes more of them than either model has attention heads.

    Raises:
        UsageError: `heads` does not divide both models' queries, keys and values evenly.
    """
    widths = [width for config in (student, teacher) for width in (config.query_size, config.key_value_size)]
    common = math.gcd(*widths)
    if heads is None:
        most = max(1, min(widths) // _LEAST_RELATION_WIDTH)
        return max(count for count in range(1, most + 1) if common % count == 0)
    if heads < 1 or common % heads:
        raise UsageError(
            f"--relation-heads {heads} must divide queries and keys of both models "
            f"({', '.join(map(str, widths))} wide); choose a divisor of {common}"
        )
    return heads


def relation_loss(
    student_NW: Tensor, teacher_NW: Tensor, targets_N: Tensor, documents: Sequence[int], heads: int
) -> Tensor:
    """Sum over scored tokens of KL(teacher's relation || student's), its mean over relation heads.

    relation of head a = softmax(x_a x_a^T / sqrt(P)), each token with itself and those before it in its document; x are
    queries, keys or values (MiniLMv2, https://arxiv.org/abs/2012.15828). Of the (A, L, L) scores of a document some
    rows exist at a time. With G the gradient by the scores, that by x is (G + G^T) x / sqrt(P).

    Args:
        student_NW: the student's; gets a gradient.
        teacher_NW: the teacher's, of another width as a rule.
        targets_N: IGNORE where nothing is scored.
        documents: ends of the documents in the row of N tokens.
        heads: relation heads, a divisor of both widths; see `relation_heads`.
    """

    def compute(x_NW: Tensor) -> tuple[Tensor, Tensor]:
        total, gradient_NW = x_NW.new_zeros(()), torch.zeros_like(x_NW)
        for start, end in pairwise((0, *documents)):
            ignored_L = targets_N[start:end] == IGNORE
            student_ALP, teacher_ALP = (_split(x[start:end], heads) for x in (x_NW, teacher_NW))
            loss, gradient_ALP = _document_relations(student_ALP, teacher_ALP, ignored_L)
            total += loss / heads
            gradient_NW[start:end] = gradient_ALP.transpose(0, 1).flatten(1)
        return total, gradient_NW.div_(heads)

    return _gradient_in_forward(student_NW, compute)


def _split(x_LW: Tensor, heads: int) -> Tensor:
    return x_LW.float().view(x_LW.shape[0], heads, -1).transpose(0, 1).contiguous()


def _document_relations(student_ALP: Tensor, teacher_ALP: Tensor, ignored_L: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of one document's divergences over scored tokens and heads, and its gradient by the student's x."""
    heads, length, _ = student_ALP.shape
    student_scale, teacher_scale = (x.shape[-1] ** -0.5 for x in (student_ALP, teacher_ALP))
    total, gradient_ALP = student_ALP.new_zeros(()), torch.zeros_like(student_ALP)
    rows = max(1, min(length, _RELATION_SCORES // (heads * length)))
    for first in range(0, length, rows):
        last = min(first + rows, length)
        now, seen = slice(first, last), slice(0, last)
        future_RS = torch.ones(last - first, last, dtype=torch.bool, device=ignored_L.device).triu_(first + 1)
        scores = (
            torch.bmm(x[:, now], x[:, seen].mT).mul_(scale).masked_fill_(future_RS, _UNSEEN)
            for x, scale in ((student_ALP, student_scale), (teacher_ALP, teacher_scale))
        )
        student_ARS, teacher_ARS = scores
        losses, _ = forward_kl_rows(student_ARS.flatten(0, 1), teacher_ARS.flatten(0, 1))
        ignored_R = ignored_L[now].nonzero()[:, 0]
        total += losses.view(heads, -1).index_fill_(1, ignored_R, 0.0).sum()
        by_scores_ARS = student_ARS.index_fill_(1, ignored_R, 0.0).mul_(student_scale)
        gradient_ALP[:, now].baddbmm_(by_scores_ARS, student_ALP[:, seen])
        gradient_ALP[:, seen].baddbmm_(by_scores_ARS.mT, student_ALP[:, now])
    return total, gradient_ALP


def attention_matching_loss(
    student: Projected, teacher: Projected, targets: Tensor, documents: Sequence[int], heads: int
) -> Tensor:
    """`relation_loss` of the queries, of the keys and of the values, added up.

    Args:
        student: caught by `projected` around the student's forward pass.
        teacher: the same of the teacher.
        targets: (B, T).
        documents: `Batch.documents`.
        heads: from `relation_heads`.
    """
    losses = [
        relation_loss(part.flatten(0, 1), teacher[name].flatten(0, 1), targets.flatten(), documents, heads)
        for name, part in student.items()
    ]
    return torch.stack(losses).sum()
