"""Optimizers and learning-rate schedules: AdamW, or Muon for hidden matrices with AdamW for the rest."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from sportsllm.errors import UsageError
from sportsllm.models.language_model import block_weights
from sportsllm.models.training_memory import OPTIMIZERS, check_optimizer_bits
from sportsllm.training.bf16_adamw import Bfloat16AdamW
from sportsllm.training.muon import Muon, MuonSettings

SCHEDULES = ("cosine", "wsd")
_PUBLISHED = MuonSettings()


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a share of its peak, by step.

    `cosine`: linear warm-up, then a cosine from 1 to `floor`. `wsd` (warm-up, stable, decay): 1 until the last
    `decay_fraction` of the steps, then a straight line to `floor` (https://arxiv.org/abs/2404.06395).
    """

    kind: str
    steps: int
    warmup: int
    floor: float = 0.1
    decay_fraction: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise UsageError(f"schedule {self.kind!r} is not known; use one of {', '.join(SCHEDULES)}")

    def factor(self, step: int) -> float:
        """Share of the peak rate at `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "cosine":
            progress = (step - self.warmup) / max(1, self.steps - self.warmup)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        decay = max(1, round(self.steps * self.decay_fraction))
        return 1.0 - (1.0 - self.floor) * max(0.0, min(1.0, (step - (self.steps - decay)) / decay))


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies in bfloat16; emulated products are slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    flags = Path("/proc/cpuinfo")
    text = flags.read_text(encoding="utf-8", errors="replace") if flags.exists() else ""
    return any(flag in text for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def build_optimizers(
    model: nn.Module,
    kind: str,
    learning_rate: float,
    muon_learning_rate: float,
    weight_decay: float,
    bits: int = 32,
    muon: MuonSettings = _PUBLISHED,
) -> list[torch.optim.Optimizer]:
    """One AdamW, or Muon and AdamW.

    Muon (https://kellerjordan.github.io/posts/muon/) takes the matrices inside the blocks; embedding, head,
    norms and biases stay with AdamW. Its rate is scaled by sqrt(max(1, rows / columns)). Norms and biases are not
    decayed.

    With `bits` 16 states and gradients are bfloat16, which the trained parameters are told. With 8 the states are
    bitsandbytes' (https://arxiv.org/abs/2110.02861), of tensors with 4,096 numbers or more.

    Raises:
        UsageError: an unknown optimizer, or bits that it cannot have.
    """
    if kind not in OPTIMIZERS:
        raise UsageError(f"optimizer {kind!r} is not known; use one of {', '.join(OPTIMIZERS)}")
    check_optimizer_bits(kind, bits)
    for_muon = {id(weight) for weight in block_weights(model)} if kind == "muon" else set()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad_dtype = torch.bfloat16 if bits == 16 else parameter.dtype
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    matrices = [parameter for parameter in trained if id(parameter) in for_muon]
    others = [parameter for parameter in trained if parameter.ndim >= 2 and id(parameter) not in for_muon]
    groups = [{"params": others, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers = [_adamw([g for g in groups if g["params"]], learning_rate, bits)]
    if matrices:
        optimizers.append(
            Muon(
                matrices,
                dtype=torch.bfloat16 if computes_in_bfloat16(matrices[0].device) else torch.float32,
                lr=muon_learning_rate,
                weight_decay=weight_decay,
                momentum=muon.momentum,
                nesterov=muon.nesterov,
                ns_coefficients=muon.coefficients,
                ns_steps=muon.steps,
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _adamw(groups: list[dict[str, Any]], learning_rate: float, bits: int) -> torch.optim.Optimizer:
    betas = (0.9, 0.95)
    if bits == 8:
        from bitsandbytes.optim import AdamW8bit

        return cast(torch.optim.Optimizer, AdamW8bit(groups, lr=learning_rate, betas=betas))
    if bits == 16:
        return Bfloat16AdamW(groups, lr=learning_rate, betas=betas)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, foreach=True)
