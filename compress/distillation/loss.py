"""The loss of a student and its settings: KL divergence from its teacher, cross-entropy, and matched hidden states.

With p the teacher's distribution and q the student's, the first is KL(p || q) (Hinton et al.,
https://arxiv.org/abs/1503.02531, at temperature 1). `sportsllm.training.loss.head_loss` runs it on one chunk of logits
at a time. Its gradient is written by hand, which is 1.5 times as fast as autograd.
Shape suffixes: B rows, T tokens, N tokens of a batch in one row, C tokens of a chunk, V vocabulary, D student's
hidden_size, E teacher's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compress.distillation.teacher import teacher_logits
from sportsllm import processes
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject
from sportsllm.formats.manifest import manifest_of
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.settings import DISTILLATION, check_value
from sportsllm.text.documents import tokens_per_parameter
from sportsllm.text.packing import IGNORE, Batch
from sportsllm.training.loop import Loss
from sportsllm.training.loss import (
    ChunkLoss,
    cross_entropy_chunk,
    head_loss,
    scored_sum_,
    softcapped_chunk,
    softmax_into,
)
from sportsllm.training.settings import Start
from sportsllm.training.sharding import forget_gathered

if TYPE_CHECKING:
    from compress.distillation.teacher_cache import TeacherCache


HIDDEN_WEIGHT = 3.0
_LEAST_TRAINING = 2.0  # tokens per parameter above which states are worth copying; measured: 0.6 loses, 2.6 gains
LayerMap = tuple[tuple[int, int], ...]
"""(student's state, teacher's state), each from 0, the embedding's output, to the number of layers."""
TeacherLogits = Callable[[int, int], Tensor]
"""(first token, number of tokens) -> the teacher's finite logits, (C, V) float32, the caller's to overwrite."""
_RIDGE = 1e-3  # of a fitted projection, as a share of the states' mean square
_LEAST_SQUARE = 1e-12  # of a teacher's state, so that a state of zeros divides by something


def default_kl_weight(start: Start, sampled: bool = False) -> float:
    """The KL's default share of the loss, by the student's start and whether a model wrote the text.

    Half, since the text teaches too: students pruned by a third end 1.4% instead of 2.1% behind a teacher of 20 tokens
    per parameter, and 12.6% instead of 14.8% behind SmolLM2-135M. Text `sampled` from the teacher says nothing that it
    does not: there half ends up to 2.6% behind 1 (docs/results). Quantized weights only undo their rounding: 1. Random
    weights take 0.9 (Minitron, https://arxiv.org/abs/2407.14679). So do barely trained ones, which cannot surpass their
    teacher yet: half leaves them up to 15% farther from it.
    """
    if start is Start.QUANTIZED or (sampled and start is not Start.RANDOM):
        return 1.0
    return 0.9 if start in (Start.RANDOM, Start.BARELY_TRAINED) else 0.5


def default_hidden_weight(
    start: Start, kl_weight: float, signals: Path | None, tokens_per_parameter: float | None
) -> float:
    """The default weight of hidden-state matching: above 0 for pruned weights, whose states the refit has made similar
    to the teacher's, if the teacher runs and has read enough for its states to be worth copying.

    With it students pruned by a third and recovered on 300,000 tokens end 14.4% instead of 17.5%, and 18.5% instead of
    20.3% behind their teachers; weights of 1 and 10 gain less. With a teacher of 0.6 tokens per parameter the student
    ends 2.3% worse (docs/results).
    """
    taught = signals is None and kl_weight > 0.0
    barely = tokens_per_parameter is not None and tokens_per_parameter < _LEAST_TRAINING
    return HIDDEN_WEIGHT if start is Start.PRUNED and taught and not barely else 0.0


def distillation_config(
    start: Start, teacher: Path, given: Mapping[str, object], corpus: Sequence[Path] = ()
) -> DistillationConfig:
    """The settings of a student that starts from `start`; `given` are options by name, None if not given.

    The defaults depend on how much text the teacher has read, and whether a model wrote the corpus, as manifests say.
    """
    found: JsonObject = {name: value for name, value in given.items() if value is not None}
    read = tokens_per_parameter(teacher)
    sampled = bool(corpus) and all(map(_is_sampled, corpus))
    weight = found.setdefault("kl_weight", default_kl_weight(start, sampled))
    found.setdefault("hidden_weight", default_hidden_weight(start, weight, found.get("signals"), read))
    return DistillationConfig(exact_logits=start is Start.QUANTIZED, **found)


def _is_sampled(text: Path) -> bool:
    """Whether `data sample` wrote a text: the teacher, or a model that it was made from."""
    with suppress(ArtifactError):  # another program's manifest.json
        return manifest_of(text if text.is_dir() else text.parent).command == "data sample"
    return False


def default_layer_map(student_layers: int, teacher_layers: int) -> LayerMap:
    """Each student state and the teacher state at the same relative depth (TinyBERT's uniform map)."""
    return tuple(
        (layer, (2 * layer * teacher_layers + student_layers) // (2 * student_layers))
        for layer in range(student_layers + 1)
    )


@dataclass(frozen=True)
class DistillationConfig:
    """How a student is taught.

    Attributes:
        kl_weight: share of the KL; the rest is cross-entropy with the text.
        hidden_weight: of hidden-state matching, 0 for none; `layer_map` says which states, evenly spread if None.
        signals: directory of the teacher cache to learn from instead of the running teacher; made if missing.
        teacher_precision: see `load_teacher`.
        exact_logits: logits are float32 sums on a CPU too, for a KL near bfloat16's rounding error.
    """

    kl_weight: float = 1.0
    hidden_weight: float = 0.0
    layer_map: LayerMap | None = None
    signals: Path | None = None
    teacher_precision: str = "auto"
    exact_logits: bool = False

    def __post_init__(self) -> None:
        for name, setting in DISTILLATION.items():
            if (value := getattr(self, name)) is not None:
                check_value(f"{name}={value}", value, setting)
        if self.signals is not None and not self.kl_weight:
            raise UsageError("signals are read for the KL divergence, but kl_weight is 0; leave one of them out")

    @property
    def asks_the_teacher(self) -> bool:
        """Whether a teacher runs in every step; a cache and plain cross-entropy need none."""
        return bool((self.signals is None and self.kl_weight) or self.hidden_weight)

    def layers(self, student: ModelConfig, teacher: ModelConfig) -> LayerMap:
        """The pairs of states that are matched."""
        return self.layer_map or default_layer_map(student.num_hidden_layers, teacher.num_hidden_layers)

    def matching_kept(self, kept: Sequence[int], layers: int) -> DistillationConfig:
        """The same for a student with the teacher's layers `kept`: the inputs of these layers are matched.

        So the layer before a dropped one learns to replace it too, as in the refit. A given map stays.
        """
        if not self.hidden_weight or self.layer_map is not None:
            return self
        return dataclasses.replace(self, layer_map=tuple(enumerate([*kept, layers])))

    def settings(self) -> JsonObject:
        """For a manifest."""
        return {**vars(self), "signals": None if self.signals is None else str(self.signals)}


def distillation_loss(config: DistillationConfig, teacher: SportsLLM | None, cache: TeacherCache | None = None) -> Loss:
    """The training loss, summed over scored tokens; neither model's logits exist as a whole.

    w * KL(teacher || student) + (1 - w) * cross-entropy + hidden_weight * `HiddenMatching`

    Args:
        config: with hidden_weight, the student's `matching` is attached.
        teacher: None if it does not have to run.
        cache: to learn from instead of the teacher's logits.
    """

    def loss(student: SportsLLM, batch: Batch) -> Tensor:
        theirs: list[Tensor] | None = [] if config.hidden_weight else None
        ours: list[Tensor] | None = [] if config.hidden_weight else None
        logits = None if teacher is None else teacher_logits(teacher, batch, theirs, config.exact_logits)
        hidden = student.hidden(batch.tokens, batch.documents, states=ours)
        if cache is not None:
            chunk_loss = cache.chunk_loss(batch, config.kl_weight)
        else:
            chunk_loss = kl_chunk(batch.targets.flatten(), logits, config.kl_weight)
        chunk_loss = softcapped_chunk(chunk_loss, student.config.logit_softcap)
        total = head_loss(hidden.flatten(0, 1), student.head_weight, chunk_loss, exact=config.exact_logits)
        if ours and theirs:
            assert isinstance(student.matching, HiddenMatching)
            total = total + config.hidden_weight * student.matching(ours, theirs, batch.targets)
        return total

    return loss


def kl_chunk(targets_N: Tensor, teacher: TeacherLogits | None, kl_weight: float = 1.0) -> ChunkLoss:
    """kl_weight * KL(p || q) + (1 - kl_weight) * cross-entropy, 0 if the target is IGNORE.

    One softmax of the student serves both: with w = kl_weight the gradient is
    w * (q - p) + (1 - w) * (q - onehot) = q - w * p - (1 - w) * onehot.

    Args:
        teacher: not asked if kl_weight is 0.
    """
    if kl_weight == 0.0:
        return cross_entropy_chunk(targets_N)

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        assert teacher is not None, "a KL has a teacher"
        count = len(logits_CV)
        teacher_CV, targets_C = teacher(start, count), targets_N[start : start + count]
        index_C1 = targets_C.clamp(min=0)[:, None]
        chosen_C1 = logits_CV.gather(1, index_C1)
        losses_C, log_z_C1 = _forward_kl(logits_CV, teacher_CV, kl_weight)
        if kl_weight < 1.0:
            losses_C.mul_(kl_weight).add_((log_z_C1 - chosen_C1)[:, 0], alpha=1 - kl_weight)
            logits_CV.scatter_add_(1, index_C1, torch.full_like(chosen_C1, kl_weight - 1))
        return scored_sum_(losses_C, logits_CV, targets_C), logits_CV

    return chunk_loss


def _forward_kl(student_CV: Tensor, teacher_CV: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum_v p * (log p - log q), (C,), and the logarithm of the student's normaliser, (C, 1).

    The student's logits become q - weight * p, the gradient if the weight is 1; the teacher's are used up.
    """
    p_CV = torch.empty_like(teacher_CV)
    log_zt_C1 = softmax_into(p_CV, teacher_CV)
    log_ratio_CV = teacher_CV.sub_(student_CV)
    log_zs_C1 = softmax_into(student_CV, student_CV)
    log_ratio_CV.sub_(log_zt_C1 - log_zs_C1)
    student_CV.sub_(p_CV, alpha=weight)
    return log_ratio_CV.mul_(p_CV).sum(dim=-1), log_zs_C1


def hidden_matching_loss(
    student_ND: Tensor, teacher_NE: Tensor, targets_N: Tensor, projection_ED: Tensor | None = None
) -> Tensor:
    """Sum over scored tokens of |P s - t|^2 / |t|^2, for the student's state s and the teacher's t.

    FitNets' hint loss (https://arxiv.org/abs/1412.6550) with a linear regressor. Division by the token's own |t|^2
    makes every token and every layer count alike: a zero P s costs 1 everywhere. In a plain mean square the few tokens
    with massive activations (https://arxiv.org/abs/2402.17762) would be all. P is the identity if None.
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
    """Hidden-state matching, with a learned projection for each pair of layers if the hidden sizes differ.

    While it is `attached` to the student, the projections are trained with it, by AdamW like the head.
    """

    def __init__(self, student: ModelConfig, teacher: ModelConfig, layer_map: LayerMap, seed: int = 0) -> None:
        """The projections start as isometries of the smaller space into the larger."""
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
    def fit(self, student: SportsLLM, teacher: SportsLLM, batch: Batch) -> None:
        """Fit the projections to one batch by least squares: a short run would mostly learn them otherwise."""
        if not self.projections:
            return
        states: tuple[list[Tensor], list[Tensor]] = ([], [])
        student.eval()  # without dropout, which training turns on again
        for model, found in zip((student, teacher), states, strict=True):
            model.hidden(batch.tokens, batch.documents, states=found)
        forget_gathered(student)  # a copy into gathered projections would be lost
        scored = batch.targets.flatten() != IGNORE
        for projection_ED, (ours, theirs) in zip(self.projections, self.layer_map, strict=False):
            s_ND, t_NE = (one.flatten(0, 1)[scored].double() for one in (states[0][ours], states[1][theirs]))
            size_N1 = t_NE.square().sum(dim=-1, keepdim=True).clamp(min=_LEAST_SQUARE)
            gram_DD = s_ND.T @ (s_ND / size_N1)
            gram_DD += _RIDGE * gram_DD.diagonal().mean() * torch.eye(len(gram_DD), device=gram_DD.device)
            fitted_ED = torch.linalg.solve(gram_DD, s_ND.T @ (t_NE / size_N1)).T
            projection_ED.copy_(processes.sharded_like(fitted_ED, projection_ED))

    def forward(self, student_states: Sequence[Tensor], teacher_states: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Mean over the pairs of `hidden_matching_loss`; states are (B, T, D) and (B, T, E) each, targets (B, T)."""
        total = student_states[0].new_zeros((), dtype=torch.float32)
        for number, (student, teacher) in enumerate(self.layer_map):
            projection_ED = self.projections[number] if len(self.projections) else None
            s_ND, t_NE = student_states[student].flatten(0, 1), teacher_states[teacher].flatten(0, 1)
            total = total + hidden_matching_loss(s_ND, t_NE, targets.flatten(), projection_ED)
        return total / len(self.layer_map)


@contextmanager
def attached(student: SportsLLM, module: HiddenMatching | None) -> Iterator[None]:
    """Inside the `with`, `module` is the student's `matching`; the training loop trains and saves it."""
    if module is None:
        yield
        return
    student.matching = module
    try:
        yield
    finally:
        del student.matching
