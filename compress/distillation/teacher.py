"""The frozen teacher: full precision, bfloat16, or INT8 / NF4 through bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sportsllm import processes
from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import load_block, load_checkpoint, read_ends
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed import quantization_config
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.models.language_model import Block, SportsLLM
from sportsllm.models.layers import softcapped
from sportsllm.text.packing import Batch
from sportsllm.training.loop import resolve_precision
from sportsllm.training.loss import float32_product
from sportsllm.training.sharding import place

if TYPE_CHECKING:
    from compress.distillation.loss import TeacherLogits

NF4_BLOCKS = (64, 32)
"""Block sizes, of which the first that divides a matrix's rows is used: bitsandbytes 0.50's AVX512 kernel gives wrong
values for blocks that run from one row into the next."""


def resolve_teacher_precision(precision: str, device: torch.device) -> str:
    """The precision that `auto` means on a device: bf16 if it computes in it natively, else fp32."""
    if precision != "auto":
        return precision
    return "fp32" if resolve_precision("auto", device) is None else "bf16"  # emulated bfloat16 is six times slower


def load_teacher(directory: Path, precision: str, device: torch.device | None = None, shard: bool = False) -> SportsLLM:
    """Open a checkpoint for forward passes only.

    Args:
        precision: `fp32`, `bf16`, `auto` (`resolve_teacher_precision`), or `int8` or `nf4`, which quantize the blocks'
            matrices with bitsandbytes. All else, and matrices whose rows `nf4` cannot divide into blocks, then have
            `auto`'s dtype.

    Raises:
        UsageError: the checkpoint is quantized already, or would be in parts.
    """
    device = device or torch.device("cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for a float32 teacher
    native = resolve_teacher_precision("auto", device)
    if precision == "auto":
        precision = native
        log(f"teacher precision: {precision}")
    dtype = torch.bfloat16 if "bf16" in (precision, native) and precision != "fp32" else torch.float32
    if precision in ("int8", "nf4"):
        if shard and processes.count() > 1:
            raise UsageError(f"--set teacher_precision={precision}: cannot be sharded; use bf16 or leave shard out")
        return _load_quantized(directory, precision, dtype).to(device)
    model = load_checkpoint(directory).requires_grad_(False)
    model.model.to(dtype)
    if model.lm_head is not None:
        model.lm_head.to(dtype)
    place(model, device, shard)
    return model


def _load_quantized(directory: Path, precision: str, dtype: torch.dtype) -> SportsLLM:
    """Layer by layer, so that no more than one of them is ever there in full precision."""
    if quantization_config(directory) is not None:
        raise UsageError(f"--set teacher_precision={precision}: {directory} is quantized already; leave it out")
    config = load_config(directory)
    with torch.device("meta"):
        model = SportsLLM(config)
    tensors = TensorFiles(directory)
    ends = {name: _own(tensor, dtype) for name, tensor in read_ends(tensors, config)}
    model.load_state_dict(ends, strict=False, assign=True)
    for number in range(config.num_hidden_layers):
        block = load_block(tensors, config, number)
        for vector in (parameter for parameter in block.parameters() if parameter.ndim == 1):
            vector.data = _own(vector.data, dtype)
        _quantize_matrices(block, precision, dtype)
        model.model.layers[number] = block
    if precision == "nf4":
        left = [name for name, layer in model.model.layers.named_modules() if type(layer) is nn.Linear]
        if left:
            kind = str(dtype).removeprefix("torch.")
            log(f"{directory}: {len(left)} matrices stay in {kind}: rows no multiple of {NF4_BLOCKS[-1]}")
    return model.requires_grad_(False).eval()


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy: a single tensor that is read in place would keep the whole file in memory."""
    return tensor.to(dtype, copy=True)


def _quantize_matrices(block: Block, precision: str, dtype: torch.dtype) -> None:
    import bitsandbytes

    for name, module in list(block.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        bias = module.bias is not None
        block_size = next((size for size in NF4_BLOCKS if module.in_features % size == 0), None)
        if precision == "int8":
            layer = bitsandbytes.nn.Linear8bitLt(
                module.in_features, module.out_features, bias=bias, has_fp16_weights=False
            )
            layer.weight = bitsandbytes.nn.Int8Params(module.weight.data, requires_grad=False, has_fp16_weights=False)
        elif block_size is None:
            module.weight.data = _own(module.weight.data, dtype)  # a bias is converted already
            continue
        else:
            layer = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=bias, compute_dtype=dtype, quant_type="nf4"
            )
            layer.weight = bitsandbytes.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", blocksize=block_size
            )
            # The AVX512-BF16 kernel wants input sizes that are multiples of 64.
            if module.in_features % 64 or module.out_features % 16:
                layer.support_avx512bf16_for_cpu = False
        if bias:
            layer.bias = module.bias
        parent, _, leaf = name.rpartition(".")
        setattr(block.get_submodule(parent), leaf, layer.to("cpu").eval())


def teacher_logits(
    teacher: SportsLLM, batch: Batch, states: list[Tensor] | None = None, exact: bool = False
) -> TeacherLogits:
    """Run a frozen teacher once on a batch of its device; logits are computed one chunk at a time, on request.

    `states`, if given, gets the residual stream; with `exact` sums are float32 on a CPU too (`float32_product`).
    """
    with torch.inference_mode(), torch.autocast(teacher.head_weight.device.type, enabled=False):
        hidden_ND = teacher.hidden(batch.tokens, batch.documents, states=states).flatten(0, 1)
    weight = teacher.head_weight  # gathered by now, if it is sharded

    def logits(start: int, count: int) -> Tensor:
        h_CD = hidden_ND[start : start + count]
        with torch.inference_mode():
            logits_CV = h_CD.new_empty(len(h_CD), len(weight), dtype=torch.float32)
            float32_product(h_CD, weight.T, logits_CV, exact)
            capped_CV = softcapped(logits_CV, teacher.config.logit_softcap)
        return capped_CV.clone()  # out here, so that the caller may change it in place

    return logits
