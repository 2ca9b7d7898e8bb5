"""Round to nearest on the runtime's grid: the plain baseline every cleverer method is measured against."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sportsllm.artifacts import Stage, run_stage
from sportsllm.checkpoint import load_checkpoint, quantization_config, save_checkpoint
from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.linear import QuantizedEmbedding, QuantizedLinear
from sportsllm.model import SportsLLM
from sportsllm.quantized import BITS, BLOCK_SIZES, FloatArray, QuantizedWeight, pack
from sportsllm.stages import manifest_setting

METHODS = ("rtn",)
HEAD_BITS = (4, 8, 32)
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def quantize_weight(weight_NK: FloatArray, bits: int, block_size: int, symmetric: bool = True) -> QuantizedWeight:
    """Round each number of a block to the nearest multiple of the block's scale.

    symmetric:   scale = the number largest in size / -2^(bits-1), zero point 2^(bits-1)  (the full range is used)
    asymmetric:  scale = (max - min) / (2^bits - 1), zero point = round(-min / scale), both reaching to 0

    Args:
        weight_NK: (N, K) float32, rows are outputs.
        bits: 4 or 8.
        block_size: numbers of one row that share a scale; the last block may be partly empty.
        symmetric: whether zero is the middle of the range.

    Returns:
        The packed matrix; its blocks are padded with the zero point, which stands for 0.

    Raises:
        UsageError: bits or block size that the runtime does not have.
    """
    check_grid(bits, block_size)
    rows, columns = weight_NK.shape
    groups = -(-columns // block_size)
    padded = np.zeros((rows, groups * block_size), dtype=np.float32)
    padded[:, :columns] = weight_NK
    blocks = padded.reshape(rows, groups, block_size)
    scales, zeros = block_grid(blocks, bits, symmetric)
    safe = np.where(scales == 0, 1, scales)[:, :, None]
    quants = np.clip(np.rint(blocks / safe) + zeros[:, :, None], 0, 2**bits - 1).astype(np.uint8)
    return QuantizedWeight(
        packed=pack(quants, bits),
        scales=scales,
        zero_points=None if symmetric else pack(zeros.astype(np.uint8), bits),
        bits=bits,
        block_size=block_size,
        in_features=columns,
    )


def block_grid(blocks: FloatArray, bits: int, symmetric: bool) -> tuple[FloatArray, FloatArray]:
    """Scale and zero point of each block, (N, G) from (N, G, block_size), both float32."""
    if symmetric:
        index = np.abs(blocks).argmax(axis=-1)[:, :, None]
        largest = np.take_along_axis(blocks, index, axis=-1)[:, :, 0]
        scales = (largest / -(2.0 ** (bits - 1))).astype(np.float32)
        return scales, np.full_like(scales, 2.0 ** (bits - 1))
    low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    scales = ((high - low) / (2.0**bits - 1)).astype(np.float32)
    zeros = np.rint(-low / np.where(scales == 0, 1, scales))
    return scales, np.clip(zeros, 0, 2**bits - 1).astype(np.float32)


def check_grid(bits: int, block_size: int) -> None:
    """Refuse what MatMulNBits has no kernel for."""
    if bits not in BITS:
        raise UsageError(f"--bits is {bits}; choose one of {', '.join(map(str, BITS))}")
    if block_size not in BLOCK_SIZES:
        raise UsageError(f"--block-size is {block_size}; choose one of {', '.join(map(str, BLOCK_SIZES))}")


def quantize_model(
    model: SportsLLM, bits: int, block_size: int, head_bits: int, symmetric: bool = True
) -> dict[str, Any]:
    """Replace every matrix of `model` by its packed form, in place.

    Args:
        model: float32; biases and norms stay as they are.
        bits: of the blocks' matrices.
        block_size: of all matrices.
        head_bits: of the embedding and the head; 32 leaves them alone.
        symmetric: see `quantize_weight`.

    Returns:
        What config.json's quantization_config records.
    """
    check_grid(bits, block_size)
    if head_bits not in HEAD_BITS:
        raise UsageError(f"--head-bits is {head_bits}; choose one of {', '.join(map(str, HEAD_BITS))}")
    modules: dict[str, dict[str, int]] = {}
    names = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    with progress_bar("quantize", len(names)) as bar:
        for name in names:
            module = model.get_submodule(name)
            width = head_bits if name in (EMBEDDING, HEAD) else bits
            bar.advance()
            if width == 32:
                continue
            weight = cast(Tensor, module.weight).detach().numpy()
            packed = quantize_weight(weight, width, block_size, symmetric)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, _packed_module(module, packed))
            modules[name] = {"bits": width, "block_size": block_size}
    return {
        "bits": bits,
        "block_size": block_size,
        "head_bits": head_bits,
        "symmetric": symmetric,
        "modules": modules,
    }


def _packed_module(module: nn.Module, packed: QuantizedWeight) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(packed)
    bias = cast("Tensor | None", module.bias)
    return QuantizedLinear(packed, None if bias is None else bias.detach())


def quantize(
    *, checkpoint: Path, out: Path, bits: int, method: str, block_size: int, head_bits: int, symmetric: bool
) -> dict[str, Any]:
    """Quantize a checkpoint directory into a new one.

    Args:
        checkpoint: an unquantized checkpoint.
        out: directory to make.
        bits, block_size, head_bits, symmetric: see `quantize_model`.
        method: `rtn`.

    Returns:
        The results, as `quantize --json` prints them.
    """
    if method not in METHODS:
        raise UsageError(f"--method {method!r} is not known; choose one of {', '.join(METHODS)}")
    check_grid(bits, block_size)
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized already; give the unquantized checkpoint")
    settings = {
        "checkpoint": str(checkpoint),
        "bits": bits,
        "method": method,
        "block_size": block_size,
        "head_bits": head_bits,
        "symmetric": symmetric,
        "corpus": manifest_setting(checkpoint, "corpus"),
        "valid": manifest_setting(checkpoint, "valid"),
    }
    stage = Stage("quantize", settings, [checkpoint])

    def make(directory: Path) -> dict[str, Any]:
        import time

        started = time.perf_counter()
        model = load_checkpoint(checkpoint)
        with torch.inference_mode():
            record = quantize_model(model, bits, block_size, head_bits, symmetric)
        save_checkpoint(directory, model, checkpoint, {"method": method, **record})
        weights = model.config.parameters
        return {
            "parameters": weights,
            "bits": bits,
            "block_size": block_size,
            "head_bits": head_bits,
            "symmetric": symmetric,
            "seconds": time.perf_counter() - started,
        }

    return run_stage(out, stage, make)
