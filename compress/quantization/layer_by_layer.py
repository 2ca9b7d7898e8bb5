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
from functools import reduce
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.layer_fit import LayerPair, LeastSquares, ResidualPair, fit_block
from compress.layerwise import (
    CPU,
    LayerStates,
    input_moment,
    input_squares,
    kept_in,
    mirrored,
    run_layer,
    second_moment,
    summed,
)
from compress.quantization.channel_scaling import scale_block
from compress.quantization.config import UNPACKED
from compress.quantization.gptq import damped_gram
from compress.quantization.packed_checkpoint import ROWS, PackedCheckpoint, round_weight
from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import StoredModel, load_block, read_ends
from sportsllm.formats.safetensors import TensorFiles, all_finite
from sportsllm.inference.calibration import JUDGED_SAMPLES, check_familiar
from sportsllm.models.description import EMBEDDING, HEAD, block_matrices, input_groups
from sportsllm.models.kinds import routed_names, unused_line
from sportsllm.models.language_model import Block
from sportsllm.models.layers import ResidualNorm, Rope
from sportsllm.process_memory import give_back
from sportsllm.training.loss import cross_entropy

PULL = 20.0
"""Pull of the fit towards the given weights (ridge of `compress.layer_fit`), times inputs per calibration token: the
fewer tokens a weight is fitted to, the less it moves.
"""
TABLE_SHARE = 0.5
_TABLE_TOKENS = 8  # per hidden channel: enough for the second moment of a tied head


def round_checkpoint(
    checkpoint: Path, packed: PackedCheckpoint, samples: Sequence[Tensor] = (), device: torch.device = CPU
) -> None:
    """Fill `packed` with a checkpoint's tensors, matrices rounded by its method: `rtn`, `mse`, `balance` or `gptq`.

    Args:
        checkpoint: an unquantized one, read one layer at a time.
        samples: calibration token ids, each (B, T), for the last two.
    """
    if packed.method in ("rtn", "mse"):
        quantize_without_data(checkpoint, packed)
    else:
        quantize_calibrated(checkpoint, packed, samples, device)
    packed.check_complete()


def quantize_without_data(checkpoint: Path, packed: PackedCheckpoint) -> None:
    """Fill `packed`, each value rounded to the nearest."""
    tensors, model = TensorFiles(checkpoint), packed.model
    with progress_bar("quantize", model.num_hidden_layers + 1) as bar:
        for name, tensor in read_ends(tensors, model):
            packed.add(name, tensor)
        bar.advance()
        for layer in range(model.num_hidden_layers):
            block, prefix = load_block(tensors, model, layer), f"model.layers.{layer}"
            for name, tensor in block.named_parameters():
                packed.add(f"{prefix}.{name}", tensor)
            _keep_originals(packed, prefix, block)
            bar.advance()


def _keep_originals(packed: PackedCheckpoint, prefix: str, block: Block) -> None:
    if packed.keep_originals:
        for matrix in block_matrices(block.config):
            weight = block.get_parameter(f"{matrix.name}.weight")
            packed.originals[f"{prefix}.{matrix.name}"] = weight.detach().cpu()


@torch.no_grad()
def quantize_calibrated(
    checkpoint: Path, packed: PackedCheckpoint, samples: Sequence[Tensor], device: torch.device = CPU
) -> None:
    """Fill `packed` by a method with calibration text. Both methods scale channels first.

    `gptq` fits each matrix and rounds it by GPTQ. `balance` is one pass of GPTQ for a matrix's inputs in the full
    model; routed experts are rounded without it, columns weighted by the squares of their inputs.
    """
    model, gptq = packed.model, packed.method == "gptq"
    full = StoredModel(TensorFiles(checkpoint), model, device)
    pull = PULL / sum(tokens.numel() for tokens in samples)
    tables = f"{EMBEDDING}.weight", f"{HEAD}.weight"  # all ends are checked here, and those read again for their use
    ends = {name: tensor for name, tensor in read_ends(full.tensors, model) if name not in tables}
    embedding = full.table(EMBEDDING)
    full_BTD: Sequence[Tensor] = kept_in(packed.scratch, full.first_states(embedding, samples))
    rounded_BTD: Sequence[Tensor] = []
    if gptq:
        rounded_BTD = _round_embedding(packed, full, embedding, samples, full_BTD)
    elif not model.tie_word_embeddings:
        packed.add_matrix(EMBEDDING, embedding)
    del embedding
    unread: dict[int, list[int]] = {}
    with progress_bar("quantize", model.num_hidden_layers) as bar:
        for layer in range(model.num_hidden_layers):
            block, prefix = full.block(layer), f"model.layers.{layer}"
            scale_block(block, full_BTD, full.rope, packed.config, prefix)
            _keep_originals(packed, prefix, block)
            if gptq:
                full_BTD, rounded_BTD, read = _fit_and_round(
                    packed, prefix, block, full.rope, full_BTD, rounded_BTD, pull
                )
            else:
                full_BTD, read = _round_alone(packed, prefix, block, full_BTD, full.rope)
            if (experts := block.config.experts) is not None:
                names = enumerate(routed_names(experts))
                unread[layer] = [number for number, name in names if f"mlp.{name}.down_proj" not in read]
            for name, parameter in block.named_parameters():
                if parameter.ndim == 1:
                    packed.add(f"{prefix}.{name}", parameter)
            del block
            give_back()
            bar.advance()
    if (line := unused_line(unread)) is not None:
        log(f"calibration text: {line}; more samples (--set samples=N) may reach them")
    head = full.table(full.head_name).to(device)
    _check_text(samples, full_BTD, full.last_norm, head, model.logit_softcap)
    for name, tensor in ends.items():
        packed.add(name, tensor)
    if not gptq:
        _round_head(packed, full, head, full_BTD)
    elif not model.tie_word_embeddings:
        _fit_and_round_head(packed, full, head, full_BTD, rounded_BTD, pull)


def _round_embedding(
    packed: PackedCheckpoint,
    full: StoredModel,
    embedding_VD: Tensor,
    samples: Sequence[Tensor],
    states_BTD: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Round the embedding, a tied one by GPTQ as head and as embedding, see the module.

    Returns:
        The residual stream before the quantized model's first layer; `states_BTD` is that of the full model.
    """
    if full.config.tie_word_embeddings and packed.config.bits_for(EMBEDDING) != UNPACKED:
        sizes = torch.tensor([tokens.numel() for tokens in samples]).cumsum(0)
        enough = int((sizes < _TABLE_TOKENS * full.config.hidden_size).sum()) + 1
        states_BTD = kept_in(packed.scratch, islice(states_BTD, enough))
        for layer in range(full.config.num_hidden_layers):
            states_BTD = run_layer(full.block(layer), states_BTD, full.rope)
        _round_by_gptq(packed, EMBEDDING, embedding_VD, _tied(_read_by_head(states_BTD, full.last_norm)))
    else:
        packed.add_matrix(EMBEDDING, embedding_VD)
    used = torch.unique(torch.cat([tokens.flatten() for tokens in samples]))
    places = [torch.searchsorted(used, tokens) for tokens in samples]
    return kept_in(packed.scratch, full.first_states(packed.matrix(EMBEDDING, used), places))


def _tied(gram_DD: Tensor) -> Tensor:
    """What an error of a tied table counts, given the second moment of what it reads as head."""
    return gram_DD / gram_DD.diagonal().mean() + TABLE_SHARE * torch.eye(len(gram_DD), device=gram_DD.device)


def _read_by_head(last_BTD: Sequence[Tensor], norm: ResidualNorm) -> Tensor:
    """(D, D) the second moment of what the head reads, given the states after the last layer."""
    return reduce(Tensor.add_, (second_moment(norm(x_BTD)) for x_BTD in last_BTD))


def _round_head(packed: PackedCheckpoint, full: StoredModel, head_VD: Tensor, last_BTD: Sequence[Tensor]) -> None:
    """Round the head for what it reads in the full model, a tied one as embedding too."""
    name, gram_DD = full.head_name, _read_by_head(last_BTD, full.last_norm)
    if packed.config.bits_for(name) == UNPACKED:
        packed.add_matrix(name, head_VD)
    else:
        _round_by_gptq(packed, name, head_VD, _tied(gram_DD) if name == EMBEDDING else gram_DD)


def _fit_and_round_head(
    packed: PackedCheckpoint,
    full: StoredModel,
    head_VD: Tensor,
    full_BTD: Sequence[Tensor],
    rounded_BTD: Sequence[Tensor],
    pull: float,
) -> None:
    """Fit an untied head to give, from the quantized model's last states, what the full model gives; then round it."""
    if packed.config.bits_for(HEAD) == UNPACKED:
        packed.add_matrix(HEAD, head_VD)
        return
    sums = LeastSquares.over(zip(map(full.last_norm, rounded_BTD), map(full.last_norm, full_BTD), strict=True))
    for rows_ND in torch.split(head_VD, ROWS):  # in place: float64 products of a whole head would be gigabytes
        own_sums = LeastSquares(sums.gram_II, rows_ND.double() @ sums.cross_OI)
        rows_ND.copy_(own_sums.solve(rows_ND, pull * full.config.hidden_size))
    _round_by_gptq(packed, HEAD, head_VD, sums.gram_II)


def _fit_and_round(
    packed: PackedCheckpoint,
    prefix: str,
    block: Block,
    rope: Rope,
    full_BTD: Sequence[Tensor],
    rounded_BTD: Sequence[Tensor],
    pull: float,
) -> tuple[Sequence[Tensor], Sequence[Tensor], set[str]]:
    """GPTQ of one layer, each matrix fitted before, see `fit_block` and PULL.

    Returns:
        The states after the layer in the full and in the quantized model, and the matrices that read any text.
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

    between_BTD, following = LayerStates.of(block, full_BTD, rope)
    pair = LayerPair(copy.deepcopy(block), block, block.config, rope, single_use=True)
    return following, fit_block(pair, ResidualPair(full_BTD, rounded_BTD, following), between_BTD, solve), read


def _round_alone(
    packed: PackedCheckpoint, prefix: str, block: Block, states_BTD: Sequence[Tensor], rope: Rope
) -> tuple[Sequence[Tensor], set[str]]:
    """Round the matrices of a layer by one pass of GPTQ for what they read in the full model.

    Of routed experts, whose second moments would take the memory of the layer again, columns count as their inputs are
    strong.

    Returns:
        The states after the layer, and the matrices that read any text.
    """
    read, matrices = set[str](), [(matrix, group[0]) for group in input_groups(block.config) for matrix in group]
    sources = {matrix.name: matrix.name if matrix.routed else first.name for matrix, first in matrices}
    statistics = {sources[m.name]: input_squares if m.routed else input_moment for m, _ in matrices}
    with summed({name: (block.get_submodule(name), each) for name, each in statistics.items()}) as found:
        following = run_layer(block, states_BTD, rope)
    for name, source in sources.items():
        weight_NK, module, moments = block.get_parameter(f"{name}.weight"), f"{prefix}.{name}", found.get(source)
        if moments is None or not moments.any():
            packed.add_matrix(module, weight_NK)
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


def _round_by_gptq(packed: PackedCheckpoint, module: str, weight_NK: Tensor, gram_KK: Tensor) -> None:
    _check_finite(module, gram_KK)
    packed.add_by_gptq(module, weight_NK, damped_gram(gram_KK))


def _check_finite(module: str, moments: Tensor) -> None:
    if not all_finite(moments):
        raise ArtifactError(f"{module}: its activations on the calibration text overflow; the checkpoint is damaged")
