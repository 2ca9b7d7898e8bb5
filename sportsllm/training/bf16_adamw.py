"""AdamW whose two moments are kept in bfloat16: half the memory, the same steps but for rounding."""

import math
from typing import Any

import torch
from torch import Tensor


class Bfloat16AdamW(torch.optim.AdamW):
    """AdamW (https://arxiv.org/abs/1711.05101) with states in bfloat16, gradients of any type, arithmetic in float32.

        m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2        w <- (1 - lr d) w - lr m' / (sqrt(v') + eps)

    A moment moves by (1 - b) of its distance to the new value. bfloat16 rounds to 2^-8 of the value, so that a v is
    stuck only within 2^-9 / (1 - b2) of its mean: 4% with b2 = 0.95, and not at all useful with 0.999.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # a closure is refused
        """One update of every tensor that has a gradient, one tensor at a time."""
        if closure is not None:
            raise ValueError("Bfloat16AdamW takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        steps = float(state["step"])
        mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        scale = square.sqrt_().div_(math.sqrt(1 - beta2**steps)).add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**steps))
