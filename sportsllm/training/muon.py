"""Muon with the Newton-Schulz iteration in a type that the processor computes in.

`torch.optim.Muon` orthogonalises in bfloat16 whatever the processor. Where bfloat16 is emulated (x86 without
AVX512-BF16) that takes longer than the whole rest of a small model's step, so there it is done in float32, and
matrices of one shape go through the iteration together.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MuonSettings:
    """Momentum, Nesterov's form of it, and the number and coefficients (a, b, c) of the Newton-Schulz steps.

    The defaults are the author's (https://kellerjordan.github.io/posts/muon/).
    """

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)


def newton_schulz(matrices_NRC: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Nearly U V^T of each matrix U S V^T: every singular value is brought to about 0.7 to 1.2.

    x <- a x + (b (x x^T) + c (x x^T)^2) x, from x = m / |m|  (https://kellerjordan.github.io/posts/muon/).

    The iteration runs in the type of the N matrices (R, C); `coefficients` are a, b, c, and norms are at least `eps`.
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
    """`torch.optim.Muon` (the same settings, state and update) with its iteration in `dtype`, shapes batched.

    The rate of a matrix is scaled by sqrt(max(1, rows / columns)), torch's "original" adjustment.
    """

    def __init__(self, params: Any, *, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(params, adjust_lr_fn="original", **settings)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # a closure is refused
        """One update of every matrix that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                update = torch.stack([self._momentum(parameter, group) for parameter in parameters])
                update = newton_schulz(update.to(self.dtype), group["ns_coefficients"], group["ns_steps"], group["eps"])
                rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for parameter, direction in zip(parameters, update, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(direction.to(parameter.dtype), alpha=-rate)

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient = parameter.grad.float()
        buffer = state["momentum_buffer"].float().lerp_(gradient, 1 - group["momentum"])
        state["momentum_buffer"].copy_(buffer)
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
