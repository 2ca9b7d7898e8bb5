"""Optimizers and learning-rate schedules: AdamW, or Muon for hidden matrices with AdamW for the rest.

Shape suffixes: N matrices, R rows, C columns.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sportsllm import processes
from sportsllm.models.language_model import block_weights
from sportsllm.processors import cpuinfo
from sportsllm.training.settings import TrainConfig

_BETAS = (0.9, 0.95)
_FLAGS = {torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"}, torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"}}
ParameterGroup = dict[str, Any]


def rate_factor(config: TrainConfig, step: int) -> float:
    """Learning rate at `step`, counted from 0, as a fraction of its peak.

    `cosine`: linear warm-up, then a cosine from 1 to `min_lr_ratio`. `wsd` (warm-up, stable, decay): 1 until the last
    `decay_fraction` of the steps, then a straight line to `min_lr_ratio` (https://arxiv.org/abs/2404.06395).
    """
    floor = config.min_lr_ratio
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "cosine":
        progress = (step - config.warmup) / max(1, config.steps - config.warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    decay = max(1, round(config.steps * config.decay_fraction))
    return 1.0 - (1.0 - floor) * max(0.0, min(1.0, (step - (config.steps - decay)) / decay))


def computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies in a dtype; emulated products are slower than float32."""
    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return dtype not in _FLAGS or not _FLAGS[dtype].isdisjoint((cpuinfo("flags", "Features") or "").split())


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """One AdamW, or Muon and AdamW; each group keeps its rate as `peak_lr` too.

    Muon (https://kellerjordan.github.io/posts/muon/) trains the matrices inside the blocks, routers aside. Embedding,
    head, routers, norms and biases stay with AdamW. Norms and biases have no weight decay.

    With 8 `optimizer_bits` AdamW's states are bitsandbytes' (https://arxiv.org/abs/2110.02861), for tensors of at least
    4,096 values.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Without routers: each of their rows is an expert, not a direction among others.
    for_muon = {id(weight) for weight in block_weights(model)} if config.optimizer == "muon" else set()
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    matrices = [parameter for parameter in trained if id(parameter) in for_muon]
    others = [parameter for parameter in trained if parameter.ndim >= 2 and id(parameter) not in for_muon]
    decays = ((others, config.weight_decay), (vectors, 0.0))
    groups: list[ParameterGroup] = [{"params": own, "weight_decay": decay} for own, decay in decays if own]
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer_bits == 8:
        from bitsandbytes.optim import AdamW8bit

        optimizers.append(AdamW8bit(groups, lr=config.learning_rate, betas=_BETAS))
    else:
        fused = processes.copies() == processes.stages()  # not tensors of several meshes, as with `tensor_parallel`
        optimizers.append(torch.optim.AdamW(groups, config.learning_rate, _BETAS, fused=fused, foreach=False))
    if matrices:
        optimizers.append(Muon(matrices, config))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def newton_schulz(matrices_NRC: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Nearly U V^T of each matrix U S V^T: every singular value is brought to about 0.7 to 1.2.

    x <- a x + (b (x x^T) + c (x x^T)^2) x, from x = m / |m|  (https://kellerjordan.github.io/posts/muon/).

    Runs in the dtype of the N matrices (R, C); `coefficients` are a, b, c, and norms are at least `eps`.
    """
    a, b, c = coefficients
    tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    x = matrices_NRC.mT if tall else matrices_NRC
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` (the same settings, state and update) that batches matrices of one shape.

    torch's own iterates in bfloat16 on every processor. If bfloat16 is emulated (x86 without AVX512-BF16), that takes
    longer than the rest of a small model's step, so the iteration runs in float32 there. The rate of a matrix is
    scaled by sqrt(max(1, rows / columns)), torch's "original" adjustment.
    """

    def __init__(self, matrices: Sequence[Tensor], config: TrainConfig) -> None:
        super().__init__(
            matrices,
            lr=config.muon_learning_rate,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            adjust_lr_fn="original",
        )
        self.dtype = torch.bfloat16 if computes_in(torch.bfloat16, matrices[0].device) else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                momenta = torch.stack([self._momentum(parameter, group) for parameter in parameters])
                update = self._orthogonal(momenta, group)
                rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for parameter, direction in zip(parameters, update, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(direction.to(parameter.dtype), alpha=-rate)

    def _orthogonal(self, momenta_NRC: Tensor, group: ParameterGroup) -> Tensor:
        """Their `newton_schulz`; of sharded matrices each process computes some whole ones."""
        iterate = partial(
            newton_schulz, coefficients=group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"]
        )
        if processes.is_sharded(momenta_NRC):
            from torch.distributed.tensor import DTensor, Shard

            own_NRC = momenta_NRC.redistribute(placements=[Shard(0)]).to_local().to(self.dtype)
            update_NRC = iterate(own_NRC) if len(own_NRC) else own_NRC
            mesh, shape, stride = momenta_NRC.device_mesh, momenta_NRC.shape, momenta_NRC.stride()
            update = DTensor.from_local(update_NRC, mesh, [Shard(0)], shape=shape, stride=stride)
            return update.redistribute(placements=[Shard(1)])
        return iterate(momenta_NRC.to(self.dtype))

    def _momentum(self, parameter: Tensor, group: ParameterGroup) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer: Tensor = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
        return parameter.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
