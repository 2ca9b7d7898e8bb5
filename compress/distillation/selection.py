"""Token selection (experimental): turns a model that attends to all tokens into one that attends to selected tokens.

Its indexer (`sportsllm.models.selection`) is made of the model's own queries and keys, in closed form. Then the whole
model trains with the selection on, and the indexer with it, each by its own loss, as DeepSeek-V3.2 does it
(https://arxiv.org/abs/2512.02556). For the normed inputs x of a layer, over samples of the text, and each rotary pair
that the index key has:

    key         the `parts` pairs that those of the layer's key heads are best linear functions of
    queries     each query head as it reads these; if there are fewer index heads, means of a share of them

so that an index head's scores are as near to attention's own as so small a key can have them. Biases are one more input
that is always 1. Heads that are normalised are no linear functions of x; functions of least squared error replace them.
Shape suffixes: J index heads, I their size, H query heads, K key/value heads, E head_dim, P rotary pairs, C `parts`,
D hidden_size, A the inputs of queries and keys: D, and 1 if they have biases, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from compress.distillation.starts import Checkpoint, Fresh
from compress.distillation.student import StudentText, StudentTraining
from compress.layer_fit import LeastSquares
from compress.layerwise import blocks_of, run_layer, summed
from compress.pruning.heads import as_complex, as_real, shared_pairs
from sportsllm.errors import UsageError
from sportsllm.files import JsonObject
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.models.config import ModelConfig, Selection
from sportsllm.models.kinds import index_pairs
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.layers import GroupedQueryAttention
from sportsllm.models.selection import SelectedAttention
from sportsllm.training import settings

_INDEX_PARTS = 2
# Heads of 32 pairs choose as well by the slower half of them as by all; of 16 pairs the half keeps 93.5% of the
# attention that the best choice keeps, all of them 100%.
_LEAST_PAIRS = 16
_SAMPLES, _SAMPLE_LENGTH = 16, 1_024


@dataclass(frozen=True)
class Selecting(Checkpoint):
    """A student of a checkpoint's weights and an indexer."""

    name: ClassVar[str] = "selection"
    weights: str | None = "trained weights with a new indexer"
    # The model is to stay what it was, as after rounding, rather than to learn more.
    kind: settings.Start = settings.Start.QUANTIZED

    def record(self) -> JsonObject:
        return super().record() | {"selection": dataclasses.asdict(self.shape.chosen_selection)}

    def build(self, training: StudentTraining, text: StudentText) -> tuple[SportsLLM, StudentTraining]:
        selection, sequence = self.shape.chosen_selection, training.config.sequence
        longest = int(np.diff(text.documents.ends, prepend=0).max())
        if min(longest, sequence) <= selection.tokens:
            what = f"--sequence is {sequence}" if sequence <= longest else f"the longest document has {longest} tokens"
            raise UsageError(f"--select-tokens {selection.tokens}: {what}, all of which are selected; use longer ones")
        model = load_checkpoint(self.inputs[0])
        student = SportsLLM(self.shape)
        student.initialize(training.config.seed)
        student.load_state_dict(model.state_dict(), strict=False)
        ids, length = text.documents.ids, min(sequence, _SAMPLE_LENGTH)
        starts = np.linspace(0, max(0, len(ids) - length), max(1, min(_SAMPLES, len(ids) // length))).astype(np.int64)
        samples = [torch.from_numpy(ids[start : start + length].astype(np.int64))[None] for start in starts]
        start_index(student, model, samples)
        return student, training


def selecting(start: Fresh, tokens: int) -> Selecting:
    """The start of a student that is to select `tokens`.

    `start` is what --student and --start ask for. The indexer has as many heads as the model, and two parts of half the
    rotary pairs.

    Raises:
        UsageError: there are no weights to start from, or their attention is of another kind.
    """
    if not isinstance(start, Checkpoint):
        raise UsageError("--select-tokens starts from trained weights; leave --student and --start out")
    if start.shape.attention_kind != "grouped_query":
        kind = start.shape.attention_kind
        raise UsageError(
            f"--select-tokens: {start.inputs[0]} has {kind} attention; it is for grouped-query attention to all tokens"
        )
    parts, pairs = min(_INDEX_PARTS, start.shape.num_key_value_heads), start.shape.head_dim // 2
    pairs = min(pairs, max(_LEAST_PAIRS, pairs // 2))
    try:
        selection = Selection(tokens, heads=start.shape.num_attention_heads, parts=parts, pairs=pairs)
        shape = start.shape.with_changes(attention_kind="selected", selection=selection)
    except UsageError as error:
        raise UsageError(f"--select-tokens {tokens}: {error}") from None
    if tokens >= shape.max_position_embeddings:
        raise UsageError(
            f"--select-tokens is {tokens}, the context {shape.max_position_embeddings}: nothing would be "
            "left out; choose fewer"
        )
    return Selecting(shape, start.inputs)


@torch.no_grad()
def start_index(student: SportsLLM, model: SportsLLM, samples: Sequence[Tensor]) -> None:
    """Set the indexer of `student`, which has the weights of `model`, in place; samples are token ids, (1, T) each."""
    states_BTD: Sequence[Tensor] = [model.embedded(tokens) for tokens in samples]
    selectors = [module for module in student.modules() if isinstance(module, SelectedAttention)]
    for block, ours in zip(blocks_of(model), selectors, strict=True):
        attention = block.self_attn
        assert isinstance(attention, GroupedQueryAttention)
        with summed({0: (attention, partial(_sums, attention))}) as sums:
            states_BTD = run_layer(block, states_BTD, model.rope)
        found = _indexer(attention, sums[0], student.config)
        for linear, weight_IA in zip((ours.index_q_proj, ours.index_k_proj), found, strict=True):
            linear.weight.data = weight_IA[:, : linear.in_features].float().contiguous()
            if linear.bias is not None:
                linear.bias.data = weight_IA[:, -1].float()


def _sums(attention: GroupedQueryAttention, x_BTD: Tensor, _output: Tensor) -> Tensor:
    """Over all tokens of x, float64: a a^T of the inputs, (A, A); below it, of normalised heads, [q; k] a^T."""
    config = attention.config
    inputs_BTA = nn.functional.pad(x_BTD, (0, 1), value=1.0) if config.attention_bias else x_BTD
    read = [inputs_BTA]
    if config.qk_norm:
        for linear, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
            read.append(norm(linear(x_BTD).unflatten(-1, (-1, config.head_dim))).flatten(2))
    return (torch.cat(read, dim=-1).flatten(0, 1).T @ inputs_BTA.flatten(0, 1)).double()


def _heads(attention: GroupedQueryAttention, sums: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads (H, E, A) and key heads (K, E, A) as linear functions of the inputs, and these' moment (A, A)."""
    linears = attention.q_proj, attention.k_proj
    moment_AA = sums[: sums.shape[1]]
    if config.qk_norm:
        rows = sums[sums.shape[1] :]
        both = LeastSquares(moment_AA, rows).solve(torch.zeros_like(rows)).double()
        found = list(torch.split(both, [linear.out_features for linear in linears]))
    else:
        columns = [[linear.weight, *([linear.bias[:, None]] if config.attention_bias else [])] for linear in linears]
        found = [torch.cat(parts, dim=1).detach().double() for parts in columns]
    queries, keys = (rows.view(-1, config.head_dim, rows.shape[1]) for rows in found)
    return queries, keys, moment_AA


def _indexer(attention: GroupedQueryAttention, sums: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """One layer's index queries (H I, A) and key (I, A), as `SelectedAttention` has them."""
    selection, (query_HEA, key_KEA, moment_AA) = config.chosen_selection, _heads(attention, sums, config)
    query_HPA, key_KPA = (as_complex(heads)[:, -index_pairs(config) :] for heads in (query_HEA, key_KEA))
    moment = moment_AA.to(key_KPA.dtype)
    energy_HP = ((query_HPA @ moment) * query_HPA.conj()).real.sum(dim=-1).clamp(min=0.0)
    weight_KP = energy_HP.view(len(key_KPA), -1, energy_HP.shape[1]).sum(dim=1).sqrt()
    weight_KP = weight_KP.clamp(min=1e-6 * float(weight_KP.max()) or 1.0)
    pairs = [
        shared_pairs(own_KA @ moment @ own_KA.mH, w_K, selection.parts)
        for own_KA, w_K in zip(key_KPA.unbind(dim=1), weight_KP.unbind(dim=1), strict=True)
    ]
    read_CKP, into_KCP = (torch.stack(parts, dim=-1) for parts in zip(*pairs, strict=True))
    key_CPA = torch.einsum("ckp,kpa->cpa", read_CKP, key_KPA)
    of_heads_HCP = into_KCP.conj().repeat_interleave(len(query_HPA) // len(key_KPA), dim=0)
    query_HCPA = of_heads_HCP[..., None] * query_HPA[:, None]
    return as_real(query_HCPA).flatten(0, 2), as_real(key_CPA).flatten(0, 1)
