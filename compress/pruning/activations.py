"""Sums over calibration text of what passes through modules: the one place of pruning that hangs hooks on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Key = TypeVar("Key")
Statistic = Callable[[Tensor, Tensor], Tensor]
"""From the input and the output of one call of a module to what is added up."""


@contextmanager
def summed(modules: Mapping[Key, nn.Module], statistics: Mapping[Key, Statistic]) -> Iterator[dict[Key, Tensor]]:
    """Sums over all calls of the modules inside the `with`; a module that is not called has none."""
    sums: dict[Key, Tensor] = {}

    def catch(key: Key) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, output: Tensor) -> None:
            value = statistics[key](args[0], output)
            sums[key] = sums[key] + value if key in sums else value

        return hook

    with ExitStack() as hooks:
        for key, module in modules.items():
            hooks.callback(module.register_forward_hook(catch(key)).remove)
        yield sums


@contextmanager
def second_moments(
    modules: Mapping[Key, nn.Module], *, outputs: bool = False, dtype: torch.dtype = torch.float32
) -> Iterator[dict[Key, Tensor]]:
    """Sums of a a^T over all tokens that pass through each module inside the `with`, (U, U).

    Args:
        modules: by any key.
        outputs: of the modules' outputs instead of their inputs.
        dtype: of the sums; products are float32.
    """

    def moment(given: Tensor, output: Tensor) -> Tensor:
        a_NU = (output if outputs else given).flatten(0, -2).float()
        return (a_NU.T @ a_NU).to(dtype)

    with summed(modules, dict.fromkeys(modules, moment)) as sums:
        yield sums
