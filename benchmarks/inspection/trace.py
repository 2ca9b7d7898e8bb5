"""Run a model on a text and list the tensors that pass, as they are and not as computed.

A checkpoint runs in PyTorch, and hooks see what its modules read and return. An export runs in ONNX Runtime's own
operators, and every value of its graph is an output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sportsllm.formats.huggingface import load_config
from sportsllm.inference.decoder import is_onnx_directory
from sportsllm.models.config import ModelConfig

EVERY = 3
_BLOCK = re.compile(r"(?:model\.layers|past_key_values|present)\.(\d+)(?:\..*)?")
_INLINED = re.compile(r"(.*?)__(\d+)(?:_\d+)?")
"""What onnx's inliner makes of a name inside the n-th call."""


class Passing(NamedTuple):
    """One tensor; `block` is None outside the blocks."""

    name: str
    block: int | None
    shape: tuple[int, ...]
    type: str
    numbers: int
    bytes: int


def trace_model(
    directory: Path, text: str, length: int, every_block: bool, threads: int | None = None
) -> dict[str, Any]:
    """Run a checkpoint or an export on the first `length` tokens of a text.

    Args:
        every_block: whether to list every block; every third one if not. The totals are those of all in any case.

    Returns:
        `tokens` (how many were read), `every_block`, `tensors` (those listed, in order, as `Passing`), and of all
        tensors `count`, `numbers`, `bytes` and `largest`.

    Raises:
        ArtifactError: the model or its tokenizer is damaged.
    """
    from sportsllm.text.tokenizer import load_tokenizer

    config = load_config(directory)
    tokenizer = load_tokenizer(directory, config)
    ids = [tokenizer.begin_id, *tokenizer.encode(text)][:length]
    trace = _trace_export if is_onnx_directory(directory) else _trace_checkpoint
    found = trace(directory, config, ids, threads)
    listed = [one for one in found if every_block or one.block is None or one.block % EVERY == 0]
    return {
        "tokens": len(ids),
        "every_block": every_block,
        "tensors": [one._asdict() for one in listed],
        "count": len(found),
        "numbers": sum(one.numbers for one in found),
        "bytes": sum(one.bytes for one in found),
        "largest": max(found, key=lambda one: one.bytes)._asdict(),
    }


def _passing(name: str, shape: Sequence[int], dtype: str, size: int) -> Passing:
    block = _BLOCK.fullmatch(name)
    return Passing(name, int(block[1]) if block else None, tuple(shape), dtype, math.prod(shape), size)


def _trace_checkpoint(directory: Path, config: ModelConfig, ids: Sequence[int], threads: int | None) -> list[Passing]:
    """What leaf modules and blocks return, what matrices read that no module returns, and what is cached."""
    import torch

    from sportsllm.formats.checkpoint import load_checkpoint
    from sportsllm.models.attention import KVCache
    from sportsllm.models.kinds import block_matrices, block_state
    from sportsllm.models.parts import HIDDEN
    from sportsllm.processors import set_threads

    set_threads(threads)
    model, cache, found = load_checkpoint(directory), KVCache(config, 1, len(ids)), list[Passing]()
    matrices = [one for part, _ in config.runs() for one in block_matrices(part)]
    reads_other = tuple(f".{one.name}" for one in matrices if not one.input.endswith(f".{HIDDEN}"))

    def add(name: str, tensor: torch.Tensor) -> None:
        found.append(_passing(name, tensor.shape, str(tensor.dtype).removeprefix("torch."), tensor.nbytes))

    def read_by(name: str) -> Any:
        return lambda module, given: add(f"{name}, read", given[0])

    def returned_by(name: str) -> Any:
        return lambda module, given, result: add(name, result)

    def cached_by(layer: int) -> Any:
        def hook(module: Any, given: Any, result: torch.Tensor) -> None:
            for state, tensor in zip(block_state(config), cache.tensors, strict=True):
                filled = tensor[layer][..., : len(ids), :] if state.per_token else tensor[layer]
                add(f"present.{layer}.{state.name}", filled)
            add(f"model.layers.{layer}", result)

        return hook

    for name, module in model.named_modules():
        if name.endswith(reads_other):
            module.register_forward_pre_hook(read_by(name))
        if not any(module.children()):
            module.register_forward_hook(returned_by(name))
    for layer, block in enumerate(model.model.layers):
        block.register_forward_hook(cached_by(layer))
    tokens = torch.tensor([list(ids)])
    add("token ids", tokens)
    with torch.inference_mode():
        add("logits", model(tokens, cache))
    return found


def _trace_export(directory: Path, config: ModelConfig, ids: Sequence[int], threads: int | None) -> list[Passing]:
    """Every value of the graph, the bodies of its functions included and the branches of its conditions not."""
    import numpy as np
    import onnx
    import onnxruntime
    from onnx.inliner import inline_local_functions

    from export.metadata import ATTENTION_MASK, CACHE_KEY, INPUT_IDS, PAST, needs_room
    from export.paths import find_files
    from export.runtime.session import cached_tensors, open_session, session_options

    files = find_files(directory)
    cached = cached_tensors(open_session(directory, config, threads), directory)  # checks the files
    model = onnx.load(files.graph, load_external_data=False)
    functions = {(function.domain, function.name) for function in model.functions}
    calls = [node.name for node in model.graph.node if (node.domain, node.op_type) in functions]
    model = inline_local_functions(model)
    outputs = {output.name for output in model.graph.output}
    names = {value: _plain(value, calls) for node in model.graph.node for value in _made(node)}
    model.graph.output.extend(onnx.ValueInfoProto(name=value) for value in names if value not in outputs)
    options = session_options(threads)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(files.data.parent))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    read = {INPUT_IDS: np.array([list(ids)], np.int64), ATTENTION_MASK: np.ones((1, len(ids)), np.int64)}
    cache = {item.key: item.value for item in model.metadata_props}.get(CACHE_KEY, "")
    for tensor in cached:
        room = len(ids) if needs_room(tensor.name, cache, tensor.dtype == np.int8) else 0
        read[f"{PAST}{tensor.name}"] = np.zeros(tensor.shape(1, room), tensor.dtype)
    arrays = session.run(list(names), read)
    made = [(names[value], array) for value, array in zip(names, arrays, strict=True)]
    return [_passing(name, array.shape, str(array.dtype), array.nbytes) for name, array in [*read.items(), *made]]


def _made(node: Any) -> list[str]:
    """Names of a node's values; a constant's do not pass."""
    return [] if node.op_type == "Constant" else [value for value in node.output if value]


def _plain(value: str, calls: Sequence[str]) -> str:
    """A value's name before its function was inlined, behind the name of the call."""
    inlined = _INLINED.fullmatch(value)
    if inlined is None or int(inlined[2]) > len(calls):
        return value
    return inlined[1] if inlined[1].startswith("model.") else f"{calls[int(inlined[2]) - 1]}.{inlined[1]}"
