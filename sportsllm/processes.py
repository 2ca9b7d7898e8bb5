"""The processes that `torchrun` starts to train one model; by default this one alone.

Each process holds the model and computes its share of every step's sequences; gradients are added up, so all take the
same step. The first process alone writes. torch is imported inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sportsllm.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def count() -> int:
    """How many processes `torchrun` has started."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ["RANK"]) if count() > 1 else 0


def local_rank() -> int:
    """The number of this process on its machine, which is that of its GPU."""
    return int(os.environ["LOCAL_RANK"]) if count() > 1 else 0


def join(device: torch.device) -> None:
    """Meet the other processes, if there are any."""
    import torch.distributed

    if count() > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")


def wait() -> None:
    """Until all processes are here."""
    import torch.distributed

    if count() > 1:
        torch.distributed.barrier()


def own_share(rows: range) -> range:
    """The sequences of a step that this process computes.

    Raises:
        UsageError: the number of processes does not divide them.
    """
    if len(rows) % count():
        raise UsageError(f"{count()} processes cannot share the {len(rows)} sequences of a step; change --batch-size")
    size = len(rows) // count()
    return rows[rank() * size : (rank() + 1) * size]


def share(tensors: Iterable[Tensor]) -> None:
    """Replace tensors by those of the first process."""
    import torch.distributed

    for tensor in tensors if count() > 1 else ():
        torch.distributed.broadcast(tensor.detach(), 0)


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace tensors of one type by their sums over all processes."""
    import torch
    import torch.distributed

    if count() == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    torch.distributed.all_reduce(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, summed in zip(tensors, parts, strict=True):
        tensor.copy_(summed.view_as(tensor))
