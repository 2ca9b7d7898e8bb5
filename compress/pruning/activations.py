"""Sums over calibration text of activations: the one place of pruning that hangs hooks on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

Key = TypeVar("Key")
Statistic = Callable[[Tensor, Tensor], Tensor]
"""From the input and the output of one call of a module to the value that is added up."""


@contextmanager
def summed(watched: Mapping[Key, tuple[nn.Module, Statistic]]) -> Iterator[dict[Key, Tensor]]:
    """Sums over all calls of the modules inside the `with`; a module that is not called has none."""
    sums: dict[Key, Tensor] = {}

    def add_to(key: Key, statistic: Statistic) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, output: Tensor) -> None:
            value = statistic(args[0], output)
            sums[key] = sums[key] + value if key in sums else value

        return hook

    with ExitStack() as hooks:
        for key, (module, statistic) in watched.items():
            hooks.enter_context(module.register_forward_hook(add_to(key, statistic)))
        yield sums


def input_squares(inputs: Tensor, _output: Tensor) -> Tensor:
    """The statistic of `summed` for the strength of a module's inputs: sum of a^2 over all tokens, (U,), float64."""
    return inputs.flatten(0, -2).double().square().sum(dim=0)


def second_moment(activations: Tensor) -> Tensor:
    """Sum of a a^T over all tokens, (U, U), by float32 products."""
    a_NU = activations.flatten(0, -2).float()
    return a_NU.T @ a_NU
