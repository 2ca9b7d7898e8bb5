"""FSDP2 (https://arxiv.org/abs/2304.11277): each process holds a part of every weight, gradient and optimizer state.

The weights of a sublayer are gathered before its forward and backward pass and dropped after it. Embedding, head and
norms are gathered for the whole step, since the loss reads the head outside of any forward pass.
"""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from sportsllm import processes
from sportsllm.errors import InterruptedRun
from sportsllm.formats.checkpoint import save_tensors
from sportsllm.models.language_model import SportsLLM


def place(model: SportsLLM, device: torch.device, shard: bool) -> None:
    """Move a model, the same in all processes, to a device; with `shard` this process's part of it."""
    if not shard or processes.count() == 1:
        model.to(device)
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    # On a CPU Muon's exchange of matrices is a gather, which torch warns of.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    mesh = init_device_mesh(device.type, (processes.count(),))
    for block in model.model.layers:
        for name in ("self_attn", "mlp"):
            fully_shard(block.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "hidden")
    for module in model.modules():
        if isinstance(module, FSDPModule):  # sums: each process's loss is divided by all tokens of the step already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo sums where it is asked for a mean
            module.unshard()  # the memory of gathered weights, first needed in inference mode, could not be trained
            module.reshard()


def forget_gathered(model: SportsLLM) -> None:
    """Drop weights that a forward pass without a backward pass has left gathered."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def write_tensors(directory: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors as NAME.safetensors, or as NAME/ with a file for each process if any is sharded.

    All processes call this. Without sharded tensors the first one writes.
    """
    if not any(map(processes.is_sharded, tensors.values())):
        if processes.rank() == 0:
            whole = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
            save_tensors(directory / f"{name}.safetensors", whole)
        return
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(directory / name), save_distributed=True)
    try:
        save({key: tensor.detach() for key, tensor in tensors.items()}, storage_writer=writer)
    except CheckpointException as error:
        raise _first_failure(error) from None


def read_tensors(directory: Path, name: str, like: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """What `write_tensors` wrote, by any number of processes.

    Args:
        like: the parameter that a tensor belongs to. A tensor of its shape is sharded as it is.
    """
    file = directory / f"{name}.safetensors"
    if file.exists():
        return {key: processes.sharded_like(tensor, like(key)) for key, tensor in load_file(str(file)).items()}
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(directory / name))
    tensors = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), "safetensors files hold tensors alone"
        dtype, parameter = stored.properties.dtype, like(key).detach()
        same = parameter.shape == stored.size
        tensors[key] = torch.empty_like(parameter, dtype=dtype) if same else torch.empty(stored.size, dtype=dtype)
    alone = not any(map(processes.is_sharded, tensors.values()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it loads in a single process
            load(tensors, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:
        raise _first_failure(error) from None
    return tensors


def _first_failure(error: BaseException) -> Exception:
    """The error to report: the first of all processes' failures, which the first process reports alone."""
    (failure, _), *_ = getattr(error, "failures").values()  # noqa: B009  # untyped
    if processes.rank() == 0 and isinstance(failure, Exception):
        return failure
    return InterruptedRun("the first process says why")
