"""The low-rank clone: a student whose every matrix is one of the teacher's between projections that are trained.

    W_student = P_out^T W_teacher P_in        P (teacher's width, student's), W_teacher frozen

Source: "A token is worth over 1,000 tokens" (https://arxiv.org/abs/2505.12781). Norms and biases are the student's own.
Each matrix has projections of its own, as in the paper; gate and up share P_out, since a neuron is the product of both.
A width that stays has no projection, but the hidden size always has: it then starts as the identity, so that every
matrix can learn. `compress.distillation.projections` says where the others start.

They are parametrizations: forward pass, optimizer, saving and resuming are those of any model, and `merge_clone` makes
the ordinary student at the end. For each of its layers a clone trains up to 7 D S_D + 2 F S_F + 2 (H E) S_HE + 2 (K E)
S_KE numbers (S_: the student's widths), several times the student's own, and the frozen matrices stay in memory.
Shape suffixes: N tokens, U outputs of a matrix, O outputs and I inputs of the teacher's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.distillation.projections import clone_start, second_moments
from compress.pruning.scores import Scores, importance_scores
from compress.pruning.shapes import Shape
from compress.pruning.slicing import choose
from sportsllm.console import say
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import Block, SportsLLM
from sportsllm.text.packing import IGNORE, Batch
from sportsllm.training.loop import Loss

INITS = ("select", "pca")
_LEAST_SQUARE = 1e-12  # of an activation, so that a row of zeros divides by something
_SHRINKING = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
_KEPT = (
    "attention_kind", "mlp_kind", "qk_norm", "attention_bias", "attention_output_bias", "mlp_bias",
    "tie_word_embeddings", "rope_theta", "rope_scaling",
)  # fmt: skip


class Projected(nn.Module):
    """Parametrization of a weight: its parameters are the projections that are there, P_out before P_in."""

    teacher: Tensor

    def __init__(self, source: str, teacher_OI: Tensor, out: Tensor | None, into: Tensor | None) -> None:
        super().__init__()
        self.source = source
        self.register_buffer("teacher", teacher_OI.detach(), persistent=False)
        self.sides = (out is not None, into is not None)
        self._start = [side.clone() for side in (out, into) if side is not None]  # several matrices start alike

    def right_inverse(self, _weight: Tensor) -> list[Tensor]:
        """The first values of the parameters, asked for once, when the weight is parametrized."""
        start, self._start = self._start, []
        return start

    def forward(self, *projections: Tensor) -> Tensor:
        """The student's weight, in float32 also under autocast."""
        factors = [self.teacher]
        if self.sides[0]:
            factors.insert(0, projections[0].T)
        if self.sides[1]:
            factors.append(projections[-1])
        with torch.autocast(self.teacher.device.type, enabled=False):
            return cast(Tensor, torch.linalg.multi_dot(factors))


def clone_student(
    teacher: SportsLLM,
    config: ModelConfig,
    *,
    layer_map: Sequence[int] | None = None,
    init: str = "select",
    scores: Scores | None = None,
    samples: Sequence[Tensor] = (),
) -> SportsLLM:
    """A student that computes its weights from the teacher's.

    Args:
        teacher: float32, on the CPU; its matrices are shared, not copied, and never changed.
        config: the student's shape.
        layer_map: the teacher's layer for each of the student's, rising; evenly spread, both ends kept, if None.
        init: `select` starts as the pruned model, `pca` from principal directions and least squares.
        scores: which neurons and heads start (and channels, for `select`); computed from the samples if None.
        samples: calibration token ids, each (B, T).

    Returns:
        The student on the CPU, in evaluation mode.

    Raises:
        UsageError: a width or depth beyond the teacher's, another kind of model, or settings that lack samples.
        ArtifactError: another vocabulary, or a quantized teacher.
    """
    kept_layers = _check(teacher, config, layer_map)
    if init not in INITS:
        raise UsageError(f"clone init {init!r} is not known; use one of {', '.join(INITS)}")
    if not samples and (scores is None or init == "pca"):
        raise UsageError(f"clone init {init!r} reads calibration text; give samples" + (" or scores" * (init != "pca")))
    if layer_map is None and len(kept_layers) < teacher.config.num_hidden_layers:
        say(f"the clone's layers start from the teacher's {', '.join(map(str, kept_layers))}")
    kept = choose(teacher.config, scores or importance_scores(teacher, samples), Shape.of(config), kept_layers)
    start = clone_start(teacher, config, kept, second_moments(teacher, samples, kept) if init == "pca" else None)
    student = SportsLLM(config)
    with torch.no_grad():
        for name, vector in start.vectors.items():
            student.get_parameter(name).copy_(vector)
    for name, (out, into) in start.projections.items():
        matrix = teacher.get_parameter(f"{start.sources[name]}.weight")
        projected = Projected(start.sources[name], matrix, out, into)
        parametrize.register_parametrization(student.get_submodule(name), "weight", projected)
    if config.intermediate_size < teacher.config.intermediate_size:
        for block in cast("list[Block]", list(student.model.layers)):
            gate, up = cast(Any, block.mlp.gate_proj), cast(Any, block.mlp.up_proj)
            up.parametrizations.weight.original0 = gate.parametrizations.weight.original0
    trained = sum(parameter.numel() for parameter in student.parameters())
    say(f"clone: {trained:,} trained numbers stand for a student of {config.parameters:,}")
    return student.eval()


def _check(teacher: SportsLLM, config: ModelConfig, layer_map: Sequence[int] | None) -> list[int]:
    """The layer map, or why there can be no clone."""
    theirs = teacher.config
    if config.vocab_size != theirs.vocab_size:
        raise ArtifactError(
            f"student has {config.vocab_size} tokens, teacher {theirs.vocab_size}; a clone needs the same tokenizer"
        )
    for name in _SHRINKING:
        ours, limit = getattr(config, name), getattr(theirs, name)
        if ours > limit:
            raise UsageError(f"the student's {name} is {ours}, the teacher's {limit}; a clone can only shrink it")
    for name in _KEPT:
        ours, wanted = getattr(config, name), getattr(theirs, name)
        if ours != wanted:
            raise UsageError(f"the student's {name} is {ours!r}, the teacher's {wanted!r}; a clone keeps it")
    if Shape.of(config).merges_kv_heads(theirs):
        raise UsageError(
            f"the student has {config.num_attention_heads} query heads on {config.num_key_value_heads}, the teacher "
            f"{theirs.num_attention_heads} on {theirs.num_key_value_heads}; merge the teacher's key/value heads first"
        )
    for name, module in teacher.named_modules():
        plain = type(module) in (nn.Linear, nn.Embedding) and cast(Tensor, module.weight).dtype == torch.float32
        if name.endswith(("_proj", "embed_tokens", "lm_head")) and not plain:
            raise ArtifactError(f"teacher: {name} is not a float32 matrix; clone the unquantized float32 checkpoint")
    ours, limit = config.num_hidden_layers, theirs.num_hidden_layers
    if layer_map is None:
        return [round(layer * (limit - 1) / max(1, ours - 1)) for layer in range(ours)]
    layers = list(layer_map)
    if len(layers) != ours or layers != sorted({layer for layer in layers if 0 <= layer < limit}):
        raise UsageError(f"layer map {layers}: give {ours} layers of the teacher's 0 to {limit - 1}, rising")
    return layers


@torch.no_grad()
def merge_clone(student: SportsLLM) -> SportsLLM:
    """The ordinary student with the same weights, free of the teacher."""
    merged = SportsLLM(student.config)
    for name, parameter in merged.named_parameters():
        module, _, leaf = name.rpartition(".")
        parameter.copy_(getattr(student.get_submodule(module), leaf))
    return merged.to(student.head_weight.device).eval()


def clone_loss(student: SportsLLM, teacher: SportsLLM, batch: Batch) -> Tensor:
    """How far the student's inner activations are from the teacher's, summed over scored tokens.

    For each output y of the student's q, k, v, o, gate, up and down, and the output t of the teacher's matrix it
    projects:

        |y - P_out^T t|^2 / |P_out^T t|^2        mean over these outputs, summed over tokens

    The paper's squared error, but each as a share of what it should be: the residual stream's parts differ in size by
    layer and token. P_out learns through y only; it could otherwise shrink the target instead of reaching it.

    Args:
        student: from `clone_student`.
        teacher: the one it was cloned from, in any precision.
        batch: B sequences of T tokens; tokens without a target are not scored.
    """
    names = _projected(student)
    with parametrize.cached(), _activations(student, teacher, names) as (made, wanted):
        student.hidden(batch.tokens, batch.documents)
        _run(teacher, batch)
    return _distance(made, wanted, batch)


def with_clone_loss(loss: Loss, teacher: SportsLLM | None, weight: float) -> Loss:
    """`loss + weight * clone_loss` for the training loop, from the same forward passes.

    Projected weights are computed once a batch, also where a tied embedding is read twice. The student's activations
    that are compared stay in memory, also with activation checkpointing.

    Args:
        loss: runs the student once, and the teacher once or (from stored signals) not at all.
        teacher: the one the student was cloned from, in any precision; None where the weight is 0.
        weight: 0 leaves the activations alone.

    Raises:
        UsageError: weight is negative or not finite.
    """
    if not 0.0 <= weight < math.inf:
        raise UsageError(f"the weight of the clone loss is {weight}; it must be 0 or more")

    if weight and teacher is None:
        raise UsageError("the clone loss compares with a teacher; give one, or weight 0")

    def combined(student: SportsLLM, batch: Batch) -> Tensor:
        with parametrize.cached():
            if weight == 0.0 or teacher is None:
                return loss(student, batch)
            with _activations(student, teacher, _projected(student)) as (made, wanted):
                total = loss(student, batch)
                if not wanted:
                    _run(teacher, batch)
        return total + weight * _distance(made, wanted, batch)

    return combined


def _projected(student: SportsLLM) -> dict[str, tuple[str, Tensor | None]]:
    """The teacher's module and P_out of each projected matrix in the student's blocks, by the student's module."""
    found: dict[str, tuple[str, Tensor | None]] = {}
    for name, module in student.named_modules():
        if ".layers." in name and parametrize.is_parametrized(module, "weight"):
            weight = cast(Any, module).parametrizations.weight
            projected = cast(Projected, weight[0])
            found[name] = (projected.source, weight.original0.detach() if projected.sides[0] else None)
    return found


@contextmanager
def _activations(
    student: SportsLLM, teacher: SportsLLM, names: dict[str, tuple[str, Tensor | None]]
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Outputs of the student's matrices and the teacher's, projected as they come, each (N, U)."""
    made: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            made[name] = output.flatten(0, -2)

        return hook

    def project(name: str, out: Tensor | None) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            target_NU = output.flatten(0, -2).float()
            wanted[name] = target_NU if out is None else target_NU @ out

        return hook

    with ExitStack() as hooks:
        for name, (source, out) in names.items():
            hooks.callback(student.get_submodule(name).register_forward_hook(keep(name)).remove)
            hooks.callback(teacher.get_submodule(source).register_forward_hook(project(name, out)).remove)
        yield made, wanted


def _run(teacher: SportsLLM, batch: Batch) -> None:
    with torch.inference_mode(), torch.autocast(batch.tokens.device.type, enabled=False):
        teacher.hidden(batch.tokens, batch.documents)


def _distance(made: dict[str, Tensor], wanted: dict[str, Tensor], batch: Batch) -> Tensor:
    """Empties `wanted` as it goes, so that targets and differences are not in memory together."""
    scored_N = (batch.targets != IGNORE).flatten()
    total = torch.zeros((), device=scored_N.device)
    for name, made_NU in made.items():
        wanted_NU = wanted.pop(name).clone()  # made in inference mode, which autograd cannot save
        share_N = scored_N / wanted_NU.square().sum(dim=-1).clamp(min=_LEAST_SQUARE)
        total = total + ((made_NU.float() - wanted_NU).square().sum(dim=-1) * share_N).sum()
    return total / len(made)
