"""Quantization layer by layer: memory is that of one layer's matrices and their statistics.

Finished tensors go into the new checkpoint's file and residual streams into scratch files beside it.

With calibration text the quantized model reads it beside the full one. Each matrix is fitted first to give, from the
quantized model's own inputs, what the full model gives (which corrects the errors of the layers before it), then
rounded by `compress.quantization.gptq` under the second moment of those inputs. So is the head. A tied one, which is
the embedding too, is rounded before the layers, under the second moment H of the full model's last states: with
H / mean(H's diagonal) for its use as head plus TABLE_SHARE of the unit matrix for its use as embedding.
Shape suffixes: B sequences, T tokens, D hidden_size, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.layer_fit import LayerPair, LeastSquares, ResidualPair, fit_block
from compress.layerwise import (
    CPU,
    LayerStates,
    first_states,
    input_moment,
    input_squares,
    mirrored,
    run_layer,
    second_moment,
    summed,
)
from compress.quantization.channel_scaling import scale_block
from compress.quantization.config import UNPACKED, QuantizationConfig
from compress.quantization.gptq import damped_gram
from compress.quantization.packed_checkpoint import ROWS, PackedCheckpoint, round_weight
from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import load_block, load_last_norm, load_positions, load_table, read_ends
from sportsllm.formats.safetensors import TensorFiles, all_finite
from sportsllm.inference.calibration import JUDGED_SAMPLES, check_familiar
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, HEAD, POSITIONS, block_matrices, input_groups
from sportsllm.models.kinds import routed_names, unused_line
from sportsllm.models.language_model import Block, rope_of
from sportsllm.models.layers import ResidualNorm, Rope
from sportsllm.process_memory import give_back
from sportsllm.training.loss import cross_entropy

PULL = 20.0
"""Pull of the fit towards the given weights (ridge of `compress.layer_fit`), times inputs per calibration token: the
fewer tokens a weight is fitted to, the less it moves.
"""
TABLE_SHARE = 0.5
_TABLE_TOKENS = 8  # per hidden channel: enough for the second moment of a tied head


@dataclass(frozen=True)
class RoundedWeights:
    """The quantized model's tensors, and the layers' matrices before rounding, scaled, by module, if asked for."""

    packed: PackedCheckpoint
    calibration_tokens: int
    originals: dict[str, Tensor]


def round_checkpoint(
    checkpoint: Path,
    model: ModelConfig,
    config: QuantizationConfig,
    method: str,
    samples: Sequence[Tensor],
    keep_originals: bool,
    path: Path | None = None,
    device: torch.device = CPU,
) -> RoundedWeights:
    """Round a checkpoint's matrices by `rtn`, `mse`, `balance` or `gptq`.

    Args:
        checkpoint: an unquantized one, read one layer at a time.
        method: one of `compress.quantization.plan.METHODS`.
        samples: calibration token ids, each (B, T), for the last two.
        keep_originals: for `compress.quantization.qad`.
        path: the file for the tensors; they stay in memory if None.
    """
    packed, originals = PackedCheckpoint(model, config, path), dict[str, Tensor]()
    kept = originals if keep_originals else None
    if method in ("rtn", "mse"):
        quantize_without_data(checkpoint, model, packed, method == "mse", kept)
    else:
        quantize_calibrated(checkpoint, model, packed, samples, gptq=method == "gptq", originals=kept, device=device)
    packed.check_complete()
    return RoundedWeights(packed, sum(tokens.numel() for tokens in samples), originals)


def quantize_without_data(
    checkpoint: Path,
    model: ModelConfig,
    packed: PackedCheckpoint,
    search: bool,
    originals: dict[str, Tensor] | None = None,
) -> None:
    """Fill `packed` by rounding each matrix by itself; `search` as in `compress.quantization.grid.fit_grid`."""
    tensors = TensorFiles(checkpoint)
    with progress_bar("quantize", model.num_hidden_layers + 1) as bar:
        for name, tensor in read_ends(tensors, model):
            packed.add(name, tensor, search)
        bar.advance()
        for layer in range(model.num_hidden_layers):
            block, prefix = load_block(tensors, model, layer), f"model.layers.{layer}"
            for name, tensor in block.named_parameters():
                packed.add(f"{prefix}.{name}", tensor, search)
            _keep(originals, prefix, block, model.of_layer(layer))
            bar.advance()


def _keep(originals: dict[str, Tensor] | None, prefix: str, block: Block, model: ModelConfig) -> None:
    if originals is not None:
        names = [matrix.name for matrix in block_matrices(model)]
        originals |= {f"{prefix}.{name}": block.get_parameter(f"{name}.weight").detach().cpu() for name in names}


@torch.no_grad()
def quantize_calibrated(
    checkpoint: Path,
    model: ModelConfig,
    packed: PackedCheckpoint,
    samples: Sequence[Tensor],
    *,
    gptq: bool = True,
    originals: dict[str, Tensor] | None = None,
    device: torch.device = CPU,
) -> None:
    """Fill `packed` with the quantized model.

    Args:
        checkpoint: an unquantized one; layers are read one after the other.
        samples: calibration token ids, each (B, T).
        gptq: fit each matrix and round it by GPTQ; else one pass of GPTQ for its inputs in the full model, and routed
            experts without it, columns counting as their inputs are strong. Both scale channels first.
        originals: if given, gets the layers' matrices before rounding, scaled, by module.
    """
    packed.refine = gptq
    pull = PULL / sum(tokens.numel() for tokens in samples)
    rope, tensors = rope_of(model, device), TensorFiles(checkpoint)
    norm, tied = load_last_norm(tensors, model).to(device), model.tie_word_embeddings
    tables = f"{EMBEDDING}.weight", f"{HEAD}.weight"  # all ends are checked here, and those read again for their use
    ends = {name: tensor for name, tensor in read_ends(tensors, model) if name not in tables}
    embedding = load_table(tensors, model, EMBEDDING)
    if gptq and tied and packed.config.bits_for(EMBEDDING) != UNPACKED:
        gram_DD = _tied_gram(packed, tensors, model, samples, embedding, norm, rope, device)
        _round_by_gptq(packed, EMBEDDING, embedding, gram_DD)
    elif gptq or not tied:
        packed.add_matrix(EMBEDDING, embedding, search=True)
    positions = ends.get(f"{POSITIONS}.weight")
    unread: dict[int, list[int]] = {}
    full_BTD = first_states(model, embedding, samples, positions, packed.scratch, device)
    rounded_BTD: Sequence[Tensor] = []
    if gptq:
        used = torch.unique(torch.cat([tokens.flatten() for tokens in samples]))
        places = [torch.searchsorted(used, tokens) for tokens in samples]
        rounded_BTD = first_states(model, packed.matrix(EMBEDDING, used), places, positions, packed.scratch, device)
    del embedding
    with progress_bar("quantize", model.num_hidden_layers) as bar:
        for layer in range(model.num_hidden_layers):
            source = load_block(tensors, model, layer).to(device)
            prefix, own = f"model.layers.{layer}", model.of_layer(layer)
            scale_block(source, own, full_BTD, rope, packed.config, prefix)
            _keep(originals, prefix, source, own)
            if gptq:
                between_BTD, following = LayerStates.of(source, full_BTD, rope)
                rounded_BTD, read = _fit_and_round(
                    packed,
                    prefix,
                    LayerPair(copy.deepcopy(source), source, own, rope, single_use=True),
                    ResidualPair(full_BTD, rounded_BTD, following),
                    between_BTD,
                    pull,
                )
                del between_BTD
            else:
                following, read = _round_alone(packed, prefix, source, own, full_BTD, rope)
            if own.experts is not None:
                names = enumerate(routed_names(own.chosen_experts))
                unread[layer] = [number for number, name in names if f"mlp.{name}.down_proj" not in read]
            for name, parameter in source.named_parameters():
                if parameter.ndim == 1:
                    packed.add(f"{prefix}.{name}", parameter, search=True)
            full_BTD = following
            del source
            give_back()
            bar.advance()
    if (line := unused_line(unread)) is not None:
        log(f"calibration text: {line}; more samples (--set samples=N) may reach them")
    head = load_table(tensors, model, EMBEDDING if tied else HEAD).to(device)
    _check_text(samples, full_BTD, norm, head, model.logit_softcap)
    for name, tensor in ends.items():
        packed.add(name, tensor, search=True)
    if not gptq:
        _round_table(packed, EMBEDDING if tied else HEAD, head, _read_by_head(full_BTD, norm))
    elif not tied and packed.config.bits_for(HEAD) != UNPACKED:
        sums = LeastSquares.over(zip(map(norm, rounded_BTD), map(norm, full_BTD), strict=True))
        for rows_ND in torch.split(head, ROWS):  # in place: float64 products of a whole head would be gigabytes
            own_sums = LeastSquares(sums.gram_II, rows_ND.double() @ sums.cross_OI)
            rows_ND.copy_(own_sums.solve(rows_ND, pull * model.hidden_size))
        _round_by_gptq(packed, HEAD, head, sums.gram_II)
    elif not tied:
        packed.add_matrix(HEAD, head, search=True)


def _read_by_head(last_BTD: Sequence[Tensor], norm: ResidualNorm) -> Tensor:
    """(D, D) the second moment of what the head reads, given the states after the last layer."""
    return reduce(Tensor.add_, (second_moment(norm(x_BTD)) for x_BTD in last_BTD))


def _round_table(packed: PackedCheckpoint, module: str, weight_VD: Tensor, gram_DD: Tensor) -> None:
    """Round the head for what it reads, a tied one as embedding too."""
    if packed.config.bits_for(module) == UNPACKED:
        packed.add_matrix(module, weight_VD, search=True)
    else:
        _round_by_gptq(packed, module, weight_VD, _tied(gram_DD) if module == EMBEDDING else gram_DD)


def _fit_and_round(
    packed: PackedCheckpoint,
    prefix: str,
    pair: LayerPair,
    streams: ResidualPair,
    between_BTD: Sequence[Tensor],
    pull: float,
) -> tuple[Sequence[Tensor], set[str]]:
    """GPTQ of one layer, each matrix fitted before, see `fit_block` and PULL; `pair.block` becomes what is stored.

    Returns:
        The states after the layer, and the matrices that read any text.
    """
    read = set()

    def solve(name: str, linear: nn.Linear, sums: LeastSquares) -> None:
        if sums.gram_II.any():
            read.add(name)
        _check_finite(f"{prefix}.{name}", sums.gram_II)
        wanted, sums.cross_OI = sums.solve(linear.weight, pull * linear.in_features), torch.empty(0)
        gram_KK, sums.gram_II = damped_gram(sums.gram_II), torch.empty(0)  # a wide matrix needs this memory
        packed.add_by_gptq(f"{prefix}.{name}", wanted, gram_KK)
        linear.weight.data = packed.matrix(f"{prefix}.{name}").to(linear.weight.device)

    return fit_block(pair, streams, between_BTD, solve), read


def _round_alone(
    packed: PackedCheckpoint, prefix: str, block: Block, model: ModelConfig, states_BTD: Sequence[Tensor], rope: Rope
) -> tuple[Sequence[Tensor], set[str]]:
    """Round the matrices of a layer by one pass of GPTQ for what they read in the full model.

    Of routed experts, whose second moments would take the memory of the layer again, columns count as their inputs are
    strong.

    Returns:
        See `_fit_and_round`.
    """
    read, matrices = set[str](), [(matrix, group[0]) for group in input_groups(model) for matrix in group]
    sources = {matrix.name: matrix.name if matrix.routed else first.name for matrix, first in matrices}
    statistics = {
        m.name if m.routed else first.name: input_squares if m.routed else input_moment for m, first in matrices
    }
    with summed({name: (block.get_submodule(name), each) for name, each in statistics.items()}) as found:
        following = run_layer(block, states_BTD, rope)
    for name, source in sources.items():
        weight_NK, module, moments = block.get_parameter(f"{name}.weight"), f"{prefix}.{name}", found.get(source)
        if moments is None or not moments.any():
            packed.add_matrix(module, weight_NK, search=True)
            continue
        read.add(name)
        if moments.ndim > 1:
            _round_by_gptq(packed, module, weight_NK, mirrored(moments))
        else:
            _check_finite(module, moments)
            spec = packed.config.grid_for(module)
            packed.add_packed(module, round_weight(weight_NK, spec, search=True, weights_K=moments.float()))
    return following, read


def _check_text(
    samples: Sequence[Tensor], last_BTD: Sequence[Tensor], norm: ResidualNorm, head_VD: Tensor, cap: float | None
) -> None:
    """`check_familiar` of the full model, whose last states are given, on a few samples."""
    few = samples[:JUDGED_SAMPLES]
    nats = sum(
        float(cross_entropy(norm(x_BTD[:, :-1]), head_VD.to(x_BTD), tokens[:, 1:].to(x_BTD.device), softcap=cap))
        for x_BTD, tokens in zip(last_BTD, few, strict=False)
    )
    check_familiar(samples, nats / sum(tokens[:, 1:].numel() for tokens in few))


def _tied_gram(
    packed: PackedCheckpoint,
    tensors: TensorFiles,
    model: ModelConfig,
    samples: Sequence[Tensor],
    embedding: Tensor,
    norm: ResidualNorm,
    rope: Rope,
    device: torch.device,
) -> Tensor:
    """(D, D): what an error of the tied table counts as head and as embedding, see the module; read from the full
    model.
    """
    sizes = torch.tensor([tokens.numel() for tokens in samples]).cumsum(0)
    count = int((sizes < _TABLE_TOKENS * model.hidden_size).sum()) + 1
    positions = load_positions(tensors, model)
    states_BTD = first_states(model, embedding, samples[:count], positions, packed.scratch, device)
    for layer in range(model.num_hidden_layers):
        states_BTD = run_layer(load_block(tensors, model, layer).to(device), states_BTD, rope)
    return _tied(_read_by_head(states_BTD, norm))


def _tied(gram_DD: Tensor) -> Tensor:
    """What an error of a tied table counts, given the second moment of what it reads as head."""
    return gram_DD / gram_DD.diagonal().mean() + TABLE_SHARE * torch.eye(len(gram_DD), device=gram_DD.device)


def _round_by_gptq(packed: PackedCheckpoint, module: str, weight_NK: Tensor, gram_KK: Tensor) -> None:
    _check_finite(module, gram_KK)
    packed.add_by_gptq(module, weight_NK, damped_gram(gram_KK))


def _check_finite(module: str, moments: Tensor) -> None:
    if not all_finite(moments):
        raise ArtifactError(f"{module}: its activations on the calibration text overflow; the checkpoint is damaged")
