"""A processor that is not there: tensors that say they are on DEVICE and are computed on the CPU.

Whatever mixes tensors of both processors fails as it does on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cpu", 1)
_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_CPU_INDICES = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}


class Pretended(Tensor):
    """A tensor on DEVICE; its values are those of `elem`."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Pretended:
        made: Pretended = Tensor._make_wrapper_subclass(
            cls, elem.shape, strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype,
            device=DEVICE, requires_grad=elem.requires_grad,
        )  # fmt: skip
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def tolist(self) -> list[Any]:
        return list(self.elem.tolist())

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Pretended) -> None:
        assert isinstance(value, Pretended), "a CPU tensor for a parameter on the GPU"
        self.elem = value.elem


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Lists and tuples with their leaves changed; PyTorch's own tree functions take ten times as long."""
    if isinstance(value, list | tuple):
        return type(value)([_each(one, change) for one in value])
    return change(value)


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = list[Tensor]()

    def bare(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        return leaf.elem if isinstance(leaf, Pretended) else leaf

    given, first = kwargs.get("device"), args[0] if args else None
    args, kwargs = _each(args, bare), {name: _each(value, bare) for name, value in kwargs.items()}
    ours = {id(leaf.elem): leaf for leaf in leaves if isinstance(leaf, Pretended)}
    on_gpu = bool(ours) if given is None else torch.device(given) == DEVICE
    if func is _aten.copy_.default:
        on_gpu = isinstance(first, Pretended)
    if ours and func not in _COPIES:
        checked = leaves if func not in _CPU_INDICES else [first]
        stray = [leaf for leaf in checked if leaf.ndim and not isinstance(leaf, Pretended)]
        assert not stray, f"{func}: tensors on the GPU and on the CPU"
    if given is not None and on_gpu:
        kwargs["device"] = torch.device("cpu")

    def wrapped(result: Any) -> Any:
        if not isinstance(result, Tensor) or not on_gpu:
            return result
        return ours[id(result)] if id(result) in ours else Pretended(result.resolve_conj().resolve_neg())

    return _each(func(*args, **kwargs), wrapped)


class _Factories(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every call goes through the compiler, whose import alone takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


@contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """While it lasts, DEVICE can be computed on."""
    torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing, as FakeTensorMode sets it
    replaced = patch("torch.__future__.get_overwrite_module_params_on_conversion", lambda: True)
    with patch("torch.cuda._lazy_init"), replaced, _Factories():
        yield DEVICE
