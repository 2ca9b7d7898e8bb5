"""Quantization that looks at calibration text, layer by layer; memory is one layer's, and the activations'.

The quantized model reads the text beside the full one. Each matrix is fitted first to give, from the quantized
model's own inputs, what the full model gives (so that it takes back what the layers before it lost), then rounded by
`compress.quantization.gptq` under the second moment of those inputs.
Shape suffixes: B sequences, T tokens, D hidden_size, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.pruning.refit import LayerPair, LeastSquares, Streams, refit_block, run_layer
from compress.quantization.channel_scaling import scale_block
from compress.quantization.gptq import gptq_weight
from compress.quantization.grid import fit_grid
from compress.quantization.packed_checkpoint import EMBEDDING, HEAD, PackedTensors
from sportsllm.console import progress_bar
from sportsllm.models.config import ModelConfig
from sportsllm.models.rope import rope_tables
from sportsllm.storage.checkpoint import load_block, read_ends
from sportsllm.storage.safetensors_files import TensorFiles

# Pull towards the given weights, as a share of the inputs' mean square; see `compress.pruning.refit`.
RIDGE = 1e-2


@torch.no_grad()
def quantize_calibrated(
    checkpoint: Path,
    config: ModelConfig,
    packed: PackedTensors,
    samples: Sequence[Tensor],
    *,
    scaled: str | None = None,
    fitted: bool = True,
    ridge: float = RIDGE,
) -> None:
    """Fill `packed` with the quantized model.

    Args:
        checkpoint: an unquantized one; layers are read one after the other.
        config: its shape.
        packed: empty.
        samples: calibration token ids, each (B, T).
        scaled: scale each layer first, by a rule of `compress.quantization.channel_scaling`.
        fitted: by fit and GPTQ; else by the grid of least squared error, columns counting as their inputs are strong.
        ridge: see the module.
    """
    rope = tuple(map(torch.from_numpy, rope_tables(config, config.max_position_embeddings)))
    tensors = TensorFiles(checkpoint)
    ends = read_ends(tensors, config)
    embedding = ends.pop(f"{EMBEDDING}.weight")
    packed.add_matrix(EMBEDDING, embedding, search=True)
    full_BTD = [embedding[tokens] for tokens in samples]
    stored = packed.matrix(EMBEDDING)
    cut_BTD = [stored[tokens] for tokens in samples]
    del embedding, stored
    with progress_bar("quantize", config.num_hidden_layers) as bar:
        for layer in range(config.num_hidden_layers):
            source, prefix = load_block(tensors, config, layer), f"model.layers.{layer}"
            if scaled is not None:
                scale_block(source, full_BTD, (rope[0], rope[1]), packed.precision, prefix, scaled)
            block = copy.deepcopy(source)
            following = run_layer(source, full_BTD, (rope[0], rope[1]))
            names = {id(module): f"{prefix}.{name}" for name, module in block.named_modules()}

            def solve(_name: str, linear: nn.Linear, sums: LeastSquares, names: dict[int, str] = names) -> None:
                wanted = sums.solve(linear.weight, ridge) if fitted else linear.weight
                linear.weight.data = _add(packed, names[id(linear)], wanted, sums.gram_II.float(), fitted)

            pair = LayerPair(block, source, config, (rope[0], rope[1]))
            refit_block(pair, Streams(full_BTD, cut_BTD, following), solve)
            for name, parameter in block.named_parameters():
                if parameter.ndim == 1:
                    packed.add(f"{prefix}.{name}", parameter)
            cut_BTD = run_layer(block, cut_BTD, (rope[0], rope[1]))
            full_BTD = following
            bar.advance()
    for name, tensor in ends.items():
        if name == f"{HEAD}.weight":
            packed.add_matrix(HEAD, tensor, search=True)
        else:
            packed.add(name, tensor)


def _add(packed: PackedTensors, module: str, weight_NK: Tensor, gram_KK: Tensor, fitted: bool) -> Tensor:
    """Quantize one matrix; returns what it stands for, (N, K) float32."""
    how = packed.precision.grid(module, weight_NK.shape[1])
    if fitted:
        quantized = gptq_weight(weight_NK, gram_KK, *how)
    else:
        grid = fit_grid(weight_NK, *how, search=True, weights_K=gram_KK.diagonal())
        quantized = grid.pack(grid.round(weight_NK))
    packed.add_packed(module, quantized)
    return torch.from_numpy(quantized.dequantize())
