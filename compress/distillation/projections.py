"""Where a clone's projections start: W_student = P_out^T W_teacher P_in, each P of shape (teacher's width, student's).

Without calibration text, one-hot columns: the units that `compress.pruning.slicing` keeps, so the clone is the
pruned model.
With it, the clone keeps what most of the text's energy needs:

    residual stream   x_student = Q^T x, Q the principal directions of the normed stream. RMSNorm commutes with a
                      rotation only without its weights (SliceGPT, https://arxiv.org/abs/2401.15024), so those, g, move
                      into the matrices that read the norm: P_in = diag(g) R, where R = argmin E|x - R Q^T x|^2 gives
                      back from Q^T x what it still tells of x there. The student's norm divides by the root mean
                      square of fewer channels with less energy; its weights start at the number that mends it.
    tied head         has no matrix for g to move into; the last norm's weights are the least-squares ones.
    o_proj, down_proj P_in is such an R too: the kept heads' and neurons' columns stand in for the dropped ones.

Heads that shrink keep whole rotary pairs of q and k. A width that stays as it is keeps its channels, unrotated.
Shape suffixes: B samples, T tokens, N all of them, D hidden_size, E head_dim, U units of a width, S student's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.pruning.slicing import Kept
from sportsllm.console import progress_bar
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import RMSNorm, SportsLLM

_RIDGE = 1e-3  # pull towards the encoder itself, as a share of the mean energy kept


@dataclass(frozen=True)
class Start:
    """A clone's first weights.

    Attributes:
        projections: P_out and P_in of each matrix, by the student's module; None where that width is the teacher's.
        sources: the teacher's module whose matrix is projected, by the student's module.
        vectors: norms and biases, which are the student's own, by parameter name.
    """

    projections: dict[str, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)


def selection(kept_S: Tensor, size: int) -> Tensor:
    """The (size, S) matrix for which x @ matrix is x[..., kept]."""
    return torch.eye(size)[:, kept_S]


def rotary_channels(teacher_dim: int, student_dim: int) -> Tensor:
    """Channels of a teacher's head that a smaller one takes, (student_dim,), for half-split rotary pairs.

    Pair i of E / 2 turns by theta^(-2 i / E) a position, so the pair nearest in log-frequency has the nearest i / E;
    of two equally near the faster one. No pair is taken twice, since the student's lie further apart.
    """
    wanted = torch.arange(student_dim // 2)[:, None] * teacher_dim
    nearest = (torch.arange(teacher_dim // 2) * student_dim - wanted).abs().argmin(dim=1)
    return torch.cat([nearest, nearest + teacher_dim // 2])


def principal_directions(moment_UU: Tensor, count: int) -> Tensor:
    """The `count` orthonormal directions with most energy, (U, S), strongest first."""
    directions = cast(Tensor, torch.linalg.eigh(moment_UU.double()).eigenvectors)
    return directions.flip(-1)[:, :count].float()


def decoder(cross_US: Tensor, encoder_US: Tensor) -> Tensor:
    """R = argmin_R E|x - R A^T x|^2 + ridge |R - A|^2, (U, S).

    Args:
        cross_US: E[x (A^T x)^T].
        encoder_US: A, with orthonormal columns.
    """
    encoder, cross = encoder_US.double(), cross_US.double()
    kept_SS = encoder.T @ cross
    # A silent unit would otherwise divide zero by zero.
    ridge = _RIDGE * kept_SS.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    damped = kept_SS + ridge * torch.eye(len(kept_SS), dtype=torch.float64)
    return cast(Tensor, torch.linalg.solve(damped, cross + ridge * encoder, left=False)).float()


@torch.no_grad()
def second_moments(teacher: SportsLLM, samples: Sequence[Tensor], kept: Kept) -> dict[str, Tensor]:
    """E[x x^T] over calibration text, float64, by the teacher's module that reads x.

    Norms: their input at unit root mean square, (D, D). o_proj: (H E, H E). down_proj: x against its kept neurons
    only, (F, S), since the neurons of a wide teacher squared would not fit a small machine.
    """
    sums: dict[str, Tensor] = {}

    def add(name: str, columns: Tensor | None) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            x_NU = args[0].flatten(0, -2).float()
            if isinstance(module, RMSNorm):
                x_NU = nn.functional.rms_norm(x_NU, x_NU.shape[-1:], eps=module.eps)
            product = (x_NU.T @ (x_NU if columns is None else x_NU[:, columns])).double()
            sums[name] = sums[name] + product if name in sums else product

        return hook

    readers: dict[str, Tensor | None] = {"model.norm": None}
    for layer, neurons in zip(kept.layers, kept.neurons, strict=True):
        for reader in ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj"):
            readers[f"model.layers.{layer}.{reader}"] = None
        readers[f"model.layers.{layer}.mlp.down_proj"] = neurons
    with ExitStack() as hooks, progress_bar("second moments", len(samples)) as bar:
        for name, columns in readers.items():
            hooks.callback(teacher.get_submodule(name).register_forward_pre_hook(add(name, columns)).remove)
        for tokens_BT in samples:
            teacher.hidden(tokens_BT)
            bar.advance()
    tokens = sum(tokens_BT.numel() for tokens_BT in samples)
    return {name: total / tokens for name, total in sums.items()}


@torch.no_grad()
def clone_start(
    teacher: SportsLLM, config: ModelConfig, kept: Kept, moments: Mapping[str, Tensor] | None = None
) -> Start:
    """Projections, norms and biases with which a clone begins.

    Args:
        teacher: float32; read only.
        config: the student's shape; no width larger than the teacher's.
        kept: units and layers that stay, from `compress.pruning.slicing.choose`.
        moments: from `second_moments`; None to select units and nothing more.
    """
    return _Builder(teacher, config, kept, moments).build()


class _Builder:
    """Holds what every layer's start is made of."""

    def __init__(
        self, teacher: SportsLLM, config: ModelConfig, kept: Kept, moments: Mapping[str, Tensor] | None
    ) -> None:
        self.old, self.new, self.kept, self.moments = teacher.config, config, kept, moments
        self.state = dict(teacher.named_parameters())
        self.start = Start()
        # A rotation without a cut would only spoil what the tied head can represent.
        self.rotated = moments is not None and config.hidden_size < self.old.hidden_size
        self.encoder_DS = selection(kept.hidden, self.old.hidden_size)
        if moments is not None and self.rotated:
            norms = [moment for name, moment in moments.items() if name.endswith("norm")]
            self.encoder_DS = principal_directions(torch.stack(norms).sum(dim=0), config.hidden_size)

    def build(self) -> Start:
        self._matrix("model.embed_tokens", "model.embed_tokens", None, self.encoder_DS)
        if self.new.tie_word_embeddings and self.rotated:
            self.start.vectors["model.norm.weight"] = self._tied_norm()
        else:
            read_DS, self.start.vectors["model.norm.weight"] = self._read("model.norm")
            if not self.new.tie_word_embeddings:
                self._matrix("lm_head", "lm_head", None, read_DS)
        for new, old in enumerate(self.kept.layers):
            self._attention(new, old)
            self._feed_forward(new, old)
        return self.start

    def _matrix(self, name: str, source: str, out: Tensor | None, into: Tensor | None) -> None:
        """One matrix's projections, and its bias, which only P_out changes."""
        self.start.projections[name], self.start.sources[name] = (out, into), source
        if f"{source}.bias" in self.state:
            bias = self.state[f"{source}.bias"]
            self.start.vectors[f"{name}.bias"] = bias.clone() if out is None else out.T @ bias

    def _read(self, norm: str) -> tuple[Tensor, Tensor]:
        """P_in of the matrices that read a norm of the teacher, and the student's weights of that norm."""
        weight = self.state[f"{norm}.weight"]
        if self.moments is None or not self.rotated:
            return self.encoder_DS, self.encoder_DS.T @ weight
        cross_DS = self.moments[norm] @ self.encoder_DS.double()
        student_norm = torch.full((self.new.hidden_size,), self._gain(cross_DS))
        return weight[:, None] * decoder(cross_DS, self.encoder_DS), student_norm

    def _gain(self, cross_DS: Tensor) -> float:
        """sqrt(E[mean((Q^T x)^2)]) for x of unit root mean square: what the student's norm divides by in excess."""
        return math.sqrt(float((self.encoder_DS * cross_DS).sum()) / self.new.hidden_size)

    def _tied_norm(self) -> Tensor:
        """argmin_n E|M Q diag(n) y - M diag(g) x|^2, M the embedding, y = Q^T x / c the student's normed stream."""
        assert self.moments is not None
        encoder = self.encoder_DS.double()
        cross_DS = self.moments["model.norm"] @ encoder
        gain = self._gain(cross_DS)
        embedding = self.state["model.embed_tokens.weight"].double()
        gram_SD = encoder.T @ (embedding.T @ embedding)
        normal_SS = (gram_SD @ encoder) * (encoder.T @ cross_DS) / gain**2
        wanted_S = ((gram_SD * self.state["model.norm.weight"]) * cross_DS.T / gain).sum(dim=1)
        ridge = _RIDGE * normal_SS.diagonal().mean() * torch.eye(len(normal_SS), dtype=torch.float64)
        flat = torch.full_like(wanted_S, gain * float(self.state["model.norm.weight"].mean()))
        return cast(Tensor, torch.linalg.solve(normal_SS + ridge, wanted_S + ridge @ flat)).float()

    def _attention(self, new: int, old: int) -> None:
        theirs, ours = f"model.layers.{old}.self_attn.", f"model.layers.{new}.self_attn."
        read_DS, norm = self._read(f"model.layers.{old}.input_layernorm")
        self.start.vectors[f"model.layers.{new}.input_layernorm.weight"] = norm
        queries, groups = self.kept.queries[new], self.kept.groups[new]
        whole = self.new.head_dim == self.old.head_dim
        channels = rotary_channels(self.old.head_dim, self.new.head_dim)
        turned = selection(channels, self.old.head_dim)
        for name in ("q_norm", "k_norm"):
            if self.new.qk_norm:
                self.start.vectors[f"{ours}{name}.weight"] = self.state[f"{theirs}{name}.weight"][channels]
        values = [torch.eye(self.old.head_dim) if whole else self._value_directions(theirs, int(g)) for g in groups]
        members = len(queries) // len(groups)
        per_query = [value for value in values for _ in range(members)]
        old_heads, old_groups = self.old.num_attention_heads, self.old.num_key_value_heads
        mixed = _heads(per_query, queries, old_heads)
        into = mixed
        if self.moments is not None and mixed is not None:
            into = decoder(self.moments[f"{theirs}o_proj"] @ mixed.double(), mixed)
        self._matrix(f"{ours}q_proj", f"{theirs}q_proj", _heads([turned] * len(queries), queries, old_heads), read_DS)
        self._matrix(f"{ours}k_proj", f"{theirs}k_proj", _heads([turned] * len(groups), groups, old_groups), read_DS)
        self._matrix(f"{ours}v_proj", f"{theirs}v_proj", _heads(values, groups, old_groups), read_DS)
        self._matrix(f"{ours}o_proj", f"{theirs}o_proj", self.encoder_DS, into)

    def _value_directions(self, prefix: str, group: int) -> Tensor:
        """The (E, S) of a value head that o_proj needs most: principal directions, or the strongest channels."""
        size, members = self.old.head_dim, self.old.num_attention_heads // self.old.num_key_value_heads
        rows = torch.arange(group * members * size, (group + 1) * members * size).view(members, size)
        if self.moments is not None:
            moment = self.moments[f"{prefix}o_proj"]
            return principal_directions(sum((moment[r][:, r] for r in rows), torch.zeros(())), self.new.head_dim)
        value = self.state[f"{prefix}v_proj.weight"][group * size : (group + 1) * size]
        read = self.state[f"{prefix}o_proj.weight"][:, rows].square().sum(dim=(0, 1))
        strongest = torch.topk(value.square().sum(dim=1) * read, self.new.head_dim).indices
        return selection(strongest.sort().values, size)

    def _feed_forward(self, new: int, old: int) -> None:
        theirs, ours = f"model.layers.{old}.mlp.", f"model.layers.{new}.mlp."
        read_DS, norm = self._read(f"model.layers.{old}.post_attention_layernorm")
        self.start.vectors[f"model.layers.{new}.post_attention_layernorm.weight"] = norm
        neurons = into = None
        if self.new.intermediate_size < self.old.intermediate_size:
            neurons = into = selection(self.kept.neurons[new], self.old.intermediate_size)
            if self.moments is not None:
                into = decoder(self.moments[f"{theirs}down_proj"], neurons)
        self._matrix(f"{ours}gate_proj", f"{theirs}gate_proj", neurons, read_DS)
        self._matrix(f"{ours}up_proj", f"{theirs}up_proj", neurons, read_DS)
        self._matrix(f"{ours}down_proj", f"{theirs}down_proj", self.encoder_DS, into)


def _heads(blocks: Sequence[Tensor], heads: Tensor, count: int) -> Tensor | None:
    """Each kept head's block at its place, (count * E, heads * S); None where nothing is cut.

    Args:
        blocks: (E, S) for each kept head.
        heads: indices of the kept heads.
        count: the teacher's heads.
    """
    old_size, new_size = blocks[0].shape
    if len(heads) == count and old_size == new_size:
        return None
    matrix = torch.zeros(count, old_size, len(heads), new_size)
    matrix[heads, :, torch.arange(len(heads))] = torch.stack(list(blocks))
    return matrix.flatten(2).flatten(0, 1)
