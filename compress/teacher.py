"""The frozen teacher: full precision, bfloat16, or INT8 / NF4 through bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.losses import TeacherLogits
from sportsllm.checkpoint import load_checkpoint
from sportsllm.console import say
from sportsllm.data import Batch
from sportsllm.errors import UsageError
from sportsllm.model import SportsLLM
from sportsllm.train import resolve_precision

PRECISIONS = ("auto", "fp32", "bf16", "int8", "nf4")


def load_teacher(directory: Path, precision: str) -> SportsLLM:
    """Open a checkpoint for forward passes only.

    Args:
        directory: the teacher's checkpoint.
        precision: `fp32`; `bf16`; `int8` and `nf4` quantize the blocks' matrices with bitsandbytes and keep the
            rest in bfloat16; `auto` is bf16 where the processor computes in it, else fp32.

    Raises:
        UsageError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"--teacher-precision {precision!r} is not known; use one of {', '.join(PRECISIONS)}")
    if precision == "auto":
        native = resolve_precision("auto", torch.device("cpu")) is not None
        precision = "bf16" if native else "fp32"
        say(f"teacher precision: {precision}")
    model = load_checkpoint(directory).requires_grad_(False)
    if precision != "fp32":
        model.model.to(torch.bfloat16)
        if model.lm_head is not None:
            model.lm_head.to(torch.bfloat16)
    if precision in ("int8", "nf4"):
        _quantize_blocks(model, precision)
    return model


def _quantize_blocks(model: SportsLLM, precision: str) -> None:
    import bitsandbytes

    for name, module in list(model.model.layers.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        bias = module.bias is not None
        if precision == "int8":
            layer: Any = bitsandbytes.nn.Linear8bitLt(
                module.in_features, module.out_features, bias=bias, has_fp16_weights=False
            )
            layer.weight = bitsandbytes.nn.Int8Params(module.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            layer = bitsandbytes.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=bias,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            layer.weight = bitsandbytes.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            # The AVX512-BF16 kernel wants input sizes that are multiples of 64.
            if module.in_features % 64 or module.out_features % 16:
                layer.support_avx512bf16_for_cpu = False
        if bias:
            layer.bias = module.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.model.layers.get_submodule(parent), leaf, layer.to("cpu").eval())


def teacher_logits(teacher: SportsLLM, batch: Batch, states: list[Tensor] | None = None) -> TeacherLogits:
    """Run the teacher once on a batch; logits are made for one chunk at a time, when asked.

    Args:
        teacher: frozen, on the batch's device.
        batch: what it reads.
        states: where given, gets the residual stream, see `SportsLLM.hidden`.
    """
    weight = teacher.head_weight
    device = weight.device.type
    with torch.inference_mode(), torch.autocast(device, enabled=False):
        hidden_ND = teacher.hidden(batch.tokens, batch.documents, states=states).flatten(0, 1)

    def logits(start: int, count: int) -> Tensor:
        with torch.inference_mode():
            part = hidden_ND[start : start + count] @ weight.T
        return part.float().clone()

    return logits
