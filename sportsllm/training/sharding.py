"""FSDP2 (https://arxiv.org/abs/2304.11277): each process holds a part of every weight, gradient and optimizer state.

The weights of a sublayer are gathered before its forward and backward pass and dropped after it. Embedding, head and
norms are gathered for the whole step, since the loss reads the head outside of any forward pass.
"""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sportsllm import processes
from sportsllm.errors import InterruptedRun, UsageError
from sportsllm.formats.checkpoint import save_tensors
from sportsllm.models.description import is_llama_like
from sportsllm.models.language_model import SportsLLM
from sportsllm.training.pipeline import Stage, place_stage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def place(model: SportsLLM, device: torch.device, shard: bool, tensor_parallel: int = 1, pipeline: int = 1) -> None:
    """Move a model, the same in all processes, to a device; with `shard` this process's part of it.

    With `tensor_parallel`, so many neighbours compute each matrix of the blocks together, on the same sequences. With
    `pipeline`, each process has some of the layers, see `sportsllm.training.pipeline`.

    Raises:
        UsageError: that number does not divide the processes, heads or neurons, or a kind of layer has no such plan.
    """
    if pipeline > 1 and processes.count() > 1:
        return place_stage(model, device, pipeline)
    if not shard or processes.count() == 1:
        model.to(device)
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    # Warnings of slow exchanges: on a CPU Muon gathers matrices, with two meshes norms are summed twice.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # may not be changed in place, and is not
    if tensor_parallel > 1:
        processes.share_sequences(tensor_parallel)
    shape = (processes.count() // tensor_parallel, tensor_parallel)
    grid = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    mesh = grid["data"]
    if tensor_parallel > 1:
        _share_matrices(model, grid["tensor"])
    for block in model.model.layers:
        for name in ("self_attn", "mlp"):
            fully_shard(block.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "hidden")
    for module in model.modules():
        if isinstance(module, FSDPModule):  # sums: each process's loss is divided by all tokens of the step already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo sums if asked for a mean
            module.unshard()  # the memory of gathered weights, first needed in inference mode, could not be trained
            module.reshard()


def _share_matrices(model: SportsLLM, mesh: "DeviceMesh") -> None:
    """Megatron's plan (https://arxiv.org/abs/1909.08053): each process has some heads and neurons."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.style import ParallelStyle

    config, among = model.config, mesh.size()
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    layers = model.model.layers
    plain = all(type(layer.get_submodule(name)) is nn.Linear for layer in layers for name in plan)
    if not (is_llama_like(config) and plain):
        raise UsageError("--set tensor_parallel: is for models of LLaMA's family, without adapters; leave it out")
    for part, _ in config.runs():
        sizes = {"heads": part.num_attention_heads, "key/value heads": part.num_key_value_heads}
        for name, size in (sizes | {"neurons": part.intermediate_size}).items():
            if size % among:
                raise UsageError(f"--set tensor_parallel={among}: does not divide the model's {size} {name}")
    for layer in layers:
        parallelize_module(layer, mesh, plan)


def clip_gradients(model: SportsLLM, most: float) -> float:
    """`torch.nn.utils.clip_grad_norm_`, also of gradients that are spread over processes in different ways."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if processes.stages() > 1:
        assert isinstance(model, Stage), "place_stage was called"
        own = [p.grad for p in parameters if p.grad is not None and p is not model.copied_head]
        squared = torch.nn.utils.get_total_norm(own) ** 2
        processes.add_up([squared])
        torch.nn.utils.clip_grads_with_norm_(parameters, most, squared.sqrt())
        return float(squared.sqrt())
    if processes.copies() == 1:
        norm = torch.nn.utils.clip_grad_norm_(parameters, most)
        return float(norm.full_tensor() if processes.is_sharded(norm) else norm)
    groups: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        assert processes.is_sharded(parameter), "all parameters are in parts"
        groups.setdefault(parameter.device_mesh.ndim, []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups.values()]
    total = torch.stack([norm.full_tensor() if processes.is_sharded(norm) else norm for norm in norms]).norm()
    torch.nn.utils.clip_grads_with_norm_(parameters, most, total, foreach=False)
    return float(total)


def forget_gathered(model: SportsLLM) -> None:
    """Drop weights that a forward pass without a backward pass has left gathered."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def write_tensors(directory: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors as NAME.safetensors, or as NAME/ with a file for each process if they have parts or stages.

    All processes call this. Without sharded tensors the first one writes.
    """
    tensors = {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}  # those of another stage
    if processes.stages() == 1 and not any(map(processes.is_sharded, tensors.values())):
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
        like: the parameter that a tensor belongs to. A tensor of its shape is sharded as it is; without memory it is
            another stage's, and left out.
    """
    file = directory / f"{name}.safetensors"
    if file.exists():
        read = load_file(str(file)).items()
        return {key: processes.sharded_like(tensor, like(key)) for key, tensor in read if not like(key).is_meta}
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(directory / name))
    tensors = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), "safetensors files hold tensors alone"
        dtype, parameter = stored.properties.dtype, like(key).detach()
        if parameter.is_meta:
            continue
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
