"""The processes that `torchrun` starts to train one model; by default this one alone.

Each process holds the model, or its part of every weight, and computes its share of every step's sequences; gradients
are added up, so all take the same step. The first process alone writes. torch is imported inside functions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

from sportsllm.errors import InterruptedRun, ResourceError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor


_copies = 1  # processes that compute the same sequences, each with its part of every matrix
_stages = 1  # processes that compute the same sequences, each with its layers


def count() -> int:
    """How many processes `torchrun` has started."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def start(number: int, words: Sequence[str]) -> int:
    """Run a command line in several processes on this machine, as `torchrun` does, and return its exit code.

    They share the cores. If one of them fails, the others are ended.

    Raises:
        UsageError: this is one of several processes.
        InterruptedRun: Ctrl-C or SIGTERM, which each process has answered.
        ResourceError: a process was killed.
    """
    import logging
    import uuid

    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if count() > 1:
        raise UsageError("--nproc: torchrun has started the processes; leave it out")
    logging.disable()  # the processes say themselves what went wrong
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // number)))
    config = LaunchConfig(
        1, 1, number, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )
    config.local_addr = "localhost"  # the machine's name may have no address
    try:
        # -P: no modules of the working folder
        elastic_launch(config, sys.executable)("-P", "-m", "sportsllm.cli", *words)
    except ChildFailedError as error:
        failed = error.get_first_failure()[1]
        if failed.exitcode < 0:
            raise ResourceError(
                f"process {failed.local_rank} was ended by signal {-failed.exitcode}; --resume continues from the last "
                "saved state"
            ) from None
        return failed.exitcode
    except SignalException:
        raise InterruptedRun("interrupted") from None
    return 0


def launch() -> str:
    """A name of this machine's `torchrun`, the same when it starts the processes again; empty without torchrun.

    Calls may have an --rdzv-id in common.
    """
    import psutil

    if count() == 1:
        return ""
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {psutil.Process(os.getppid()).create_time()}"


def launches() -> list[str]:
    """The names of all machines' `torchrun`: the first process may be on another one when they start again."""
    import torch.distributed

    names = [launch()] * count()
    if count() > 1:
        torch.distributed.all_gather_object(names, launch())
    return sorted(set(names))


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ["RANK"]) if count() > 1 else 0


def share_sequences(among: int, in_stages: bool = False) -> None:
    """Compute the same sequences in every `among` processes, a part of every matrix in each or some layers.

    Raises:
        UsageError: the number of processes is no multiple.
    """
    global _copies, _stages
    if count() % among:
        raise UsageError(f"--set tensor_parallel={among}: it must divide the number of processes, {count()}")
    _copies, _stages = among, among if in_stages else 1


def copies() -> int:
    """How many processes compute the same sequences."""
    return _copies


def stages() -> int:
    """How many processes each hold their own layers; the others' tensors are on the meta device."""
    return _stages


def join(device: torch.device) -> None:
    """Meet the other processes, if there are any.

    On one machine torchrun keeps its store when it starts them again, with the addresses of those that have ended.
    """
    import torch.distributed

    if count() > 1 and not torch.distributed.is_initialized():
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        if device.type == "cuda":
            torch.cuda.set_device(device)
        store, number, size = next(rendezvous("env://"))
        start = os.environ["TORCHELASTIC_RESTART_COUNT"] if os.environ.get("LOCAL_WORLD_SIZE") == str(size) else ""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = PrefixStore(start, store)
        torch.distributed.init_process_group(backend, store=store, rank=number, world_size=size)


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
    shares, number = count() // _copies, rank() // _copies
    if len(rows) % shares:
        raise UsageError(f"{shares} processes cannot share the {len(rows)} sequences of a step; change --batch-size")
    size = len(rows) // shares
    return rows[number * size : (number + 1) * size]


def from_first(text: str) -> str:
    """The first process's text."""
    import torch.distributed

    texts = [text]
    if count() > 1:
        torch.distributed.broadcast_object_list(texts, 0)
    return texts[0]


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether each process holds a part of the tensor."""
    if count() == 1:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The part of a whole tensor that this process holds of `other`, if that is sharded and has its shape."""
    if is_sharded(other) and not is_sharded(tensor) and tensor.shape == other.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
    return tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor on the CPU; all processes ask for one in parts or stages, and the first alone gets its values."""
    import torch
    import torch.distributed

    if is_sharded(tensor):
        gathered: Tensor = tensor.full_tensor().detach()
        return gathered.cpu() if rank() == 0 else gathered.new_empty(0, device="cpu")
    if _stages > 1:  # the other stages add zeros, and two may have the embedding
        held = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu().clone()
        holders = torch.tensor(float(not tensor.is_meta))
        for added in (held, holders):
            torch.distributed.reduce(added, 0)
        held /= holders
        return held if rank() == 0 else held.new_empty(0)
    return tensor.detach().cpu()


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
