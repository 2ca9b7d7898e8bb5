"""Quantization layer by layer: memory is that of one layer and the activations.

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
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.pruning.activations import second_moment
from compress.pruning.refit import LayerPair, LeastSquares, Streams, refit_block, run_layer
from compress.quantization.channel_scaling import scale_block
from compress.quantization.config import UNPACKED
from compress.quantization.gptq import gptq_weight
from compress.quantization.grid import fit_grid
from compress.quantization.packed_checkpoint import PackedCheckpoint, stack_rows
from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import EMBEDDING, HEAD, block_matrices
from sportsllm.models.language_model import RMSNorm, Rope
from sportsllm.models.rope import rope_tables
from sportsllm.storage.checkpoint import load_block, read_ends
from sportsllm.storage.safetensors_files import TensorFiles

# Pull towards the given weights, as a share of the inputs' mean square; see `compress.pruning.refit`.
RIDGE = 1e-2
TABLE_SHARE = 0.5
_TABLE_TOKENS = 8  # per hidden channel: enough for the second moment of a tied head
_ROWS = 8192  # rounded together: bounds the memory that a head takes


def quantize_without_data(checkpoint: Path, model: ModelConfig, packed: PackedCheckpoint, search: bool) -> None:
    """Fill `packed` by rounding each matrix by itself.

    Args:
        checkpoint: an unquantized one, read one layer at a time.
        model: its shape.
        packed: empty.
        search: see `compress.quantization.grid.fit_grid`.
    """
    tensors = TensorFiles(checkpoint)
    with progress_bar("quantize", model.num_hidden_layers + 1) as bar:
        for name, tensor in read_ends(tensors, model).items():
            packed.add(name, tensor, search)
        bar.advance()
        for layer in range(model.num_hidden_layers):
            for name, tensor in load_block(tensors, model, layer).named_parameters():
                packed.add(f"model.layers.{layer}.{name}", tensor, search)
            bar.advance()


@torch.no_grad()
def quantize_calibrated(
    checkpoint: Path,
    model: ModelConfig,
    packed: PackedCheckpoint,
    samples: Sequence[Tensor],
    *,
    scaling: str | None = None,
    gptq: bool = True,
    ridge: float = RIDGE,
    originals: dict[str, Tensor] | None = None,
) -> None:
    """Fill `packed` with the quantized model.

    Args:
        checkpoint: an unquantized one; layers are read one after the other.
        model: its shape.
        packed: empty.
        samples: calibration token ids, each (B, T).
        scaling: scale each layer first, by a rule of `compress.quantization.channel_scaling`.
        gptq: fit and round by GPTQ; else by the grid of least squared error, columns counting as their inputs are
            strong.
        ridge: see the module.
        originals: where given, gets the layers' matrices as they were before rounding, scaled, by module.
    """
    tables = rope_tables(model, model.max_position_embeddings)
    rope = torch.from_numpy(tables[0]), torch.from_numpy(tables[1])
    tensors = TensorFiles(checkpoint)
    ends = read_ends(tensors, model)
    norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
    norm.weight.data = ends["model.norm.weight"]
    embedding, head = ends.pop(f"{EMBEDDING}.weight"), ends.pop(f"{HEAD}.weight", None)
    if gptq and head is None and packed.config.bits_for(EMBEDDING) != UNPACKED:
        _round(packed, EMBEDDING, embedding, _tied_gram(tensors, model, samples, embedding, norm, rope), gptq)
    else:
        packed.add_matrix(EMBEDDING, embedding, search=True)
    full_BTD = [embedding[tokens] for tokens in samples]
    stored = packed.matrix(EMBEDDING)
    rounded_BTD = [stored[tokens] for tokens in samples]
    del embedding, stored
    with progress_bar("quantize", model.num_hidden_layers) as bar:
        for layer in range(model.num_hidden_layers):
            source, prefix = load_block(tensors, model, layer), f"model.layers.{layer}"
            if scaling is not None:
                scale_block(source, model, full_BTD, rope, packed.config, prefix, scaling)
            if originals is not None:
                matrices = (matrix.name for matrix in block_matrices(model))
                originals |= {f"{prefix}.{name}": source.get_parameter(f"{name}.weight") for name in matrices}
            block = copy.deepcopy(source)
            following = run_layer(source, full_BTD, rope)

            def solve(name: str, linear: nn.Linear, sums: LeastSquares, prefix: str = prefix) -> None:
                wanted = sums.solve(linear.weight, ridge) if gptq and sums.gram_II.any() else linear.weight
                linear.weight.data = _round(packed, f"{prefix}.{name}", wanted, sums.gram_II.float(), gptq)

            refit_block(LayerPair(block, source, model, rope), Streams(full_BTD, rounded_BTD, following), solve)
            for name, parameter in block.named_parameters():
                if parameter.ndim == 1:
                    packed.add(f"{prefix}.{name}", parameter, search=True)
            rounded_BTD = run_layer(block, rounded_BTD, rope)
            full_BTD = following
            bar.advance()
    for name, tensor in ends.items():
        packed.add(name, tensor, search=True)
    if head is None:
        return
    if gptq and packed.config.bits_for(HEAD) != UNPACKED:
        sums = LeastSquares.over(zip(map(norm, rounded_BTD), map(norm, full_BTD), strict=True))
        wanted = LeastSquares(sums.gram_II, head.double() @ sums.cross_OI).solve(head, ridge)
        _round(packed, HEAD, wanted, sums.gram_II.float(), gptq)
    else:
        packed.add_matrix(HEAD, head, search=True)


def _tied_gram(
    tensors: TensorFiles, model: ModelConfig, samples: Sequence[Tensor], embedding: Tensor, norm: RMSNorm, rope: Rope
) -> Tensor:
    """(D, D): what an error of the tied table counts as head and as embedding, see the module; read from the full
    model.
    """
    sizes = torch.tensor([tokens.numel() for tokens in samples]).cumsum(0)
    count = int((sizes < _TABLE_TOKENS * model.hidden_size).sum()) + 1
    states_BTD = [embedding[tokens] for tokens in samples[:count]]
    for layer in range(model.num_hidden_layers):
        states_BTD = run_layer(load_block(tensors, model, layer), states_BTD, rope)
    gram_DD = torch.stack([second_moment(norm(x_BTD)) for x_BTD in states_BTD]).sum(dim=0)
    return gram_DD / gram_DD.diagonal().mean() + TABLE_SHARE * torch.eye(len(gram_DD))


def _round(packed: PackedCheckpoint, module: str, weight_NK: Tensor, gram_KK: Tensor, gptq: bool) -> Tensor:
    """Quantize one matrix; returns what it stands for, (N, K) float32."""
    if not gram_KK.isfinite().all():
        raise ArtifactError(f"{module}: what it reads of the calibration text overflows; the checkpoint is damaged")
    spec = packed.config.grid_for(module, weight_NK.shape[1])
    if gptq:
        quantized = stack_rows([gptq_weight(rows, gram_KK, *spec) for rows in torch.split(weight_NK, _ROWS)])
    else:
        grid = fit_grid(weight_NK, *spec, search=True, weights_K=gram_KK.diagonal())
        quantized = grid.pack(grid.round(weight_NK))
    packed.add_packed(module, quantized)
    return torch.from_numpy(quantized.dequantize())
