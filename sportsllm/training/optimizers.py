"""Optimizers and learning-rate schedules: AdamW, or Muon for hidden matrices with AdamW for the rest."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sportsllm.errors import UsageError
from sportsllm.models.language_model import block_weights
from sportsllm.training.muon import Muon, MuonSettings

OPTIMIZERS = ("adamw", "muon")
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
    muon: MuonSettings = _PUBLISHED,
) -> list[torch.optim.Optimizer]:
    """One AdamW, or Muon and AdamW.

    Muon (https://kellerjordan.github.io/posts/muon/) takes the matrices inside the blocks; embedding, head,
    norms and biases stay with AdamW. Its rate is scaled by sqrt(max(1, rows / columns)). Norms and
    biases are not decayed.
    """
    if kind not in OPTIMIZERS:
        raise UsageError(f"optimizer {kind!r} is not known; use one of {', '.join(OPTIMIZERS)}")
    for_muon = {id(weight) for weight in block_weights(model)} if kind == "muon" else set()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    matrices = [parameter for parameter in trained if id(parameter) in for_muon]
    others = [parameter for parameter in trained if parameter.ndim >= 2 and id(parameter) not in for_muon]
    groups = [{"params": others, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=(0.9, 0.95), foreach=True)
    ]
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
