"""The gate one layer at a time, for checkpoints that do not fit in memory whole.

The exported graph is cut at the residual stream into embedding, layers and head. Each part is opened by itself and
reads, prompt first and the last tokens one by one through the cache, what the part before it gave; beside it goes
PyTorch's layer, which reads what PyTorch's layer before it gave. The logits at the end are compared as ever.
Shape suffixes: T tokens, D hidden_size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import torch
import torch.nn.functional as F
from torch import Tensor

from export.cache_scales import LayerCache
from export.parity.comparison import Pass, compare, merge
from export.parity.inputs import (
    STEPS,
    GateInputs,
    ParityReport,
    exact_graph,
    round_matrices,
    threads_of_torch,
    unequal_tables,
)
from export.paths import find_files
from export.runtime.session import exact_options, session_options
from sportsllm.inference.decoder import Logits
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import RMSNorm
from sportsllm.models.rope import rope_tables
from sportsllm.process_memory import give_back
from sportsllm.storage.checkpoint import check_names, load_block, load_table
from sportsllm.storage.safetensors_files import TensorFiles

Array = npt.NDArray[Any]
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_ROOM = ("past_key_values.0.key",)  # where every layer over an INT8 cache sees how much room there is


def check_parity_by_layer(checkpoint: Path, export: Path, threads: int | None = None) -> ParityReport:
    """As `export.parity.check.check_parity`, with one layer of each side in memory; no ragged batch.

    Raises:
        ArtifactError: one of the two is damaged, or they do not belong together.
    """
    inputs = GateInputs.read(checkpoint, export)
    tensors = TensorFiles(checkpoint)
    check_names(tensors, inputs.config)
    passes: list[Pass] = []
    with threads_of_torch(threads):
        unequal = tuple(unequal_tables(inputs.graph, inputs.config, tensors))
        expected = _expected(tensors, inputs, half=False)
        if inputs.precision != "fp32":
            passes.append(_pass("deployed", inputs, export, expected, threads, exact=False))
            if inputs.precision == "fp16":
                expected = _expected(tensors, inputs, half=True)
            exact_graph(inputs.graph)
        passes.insert(0, _pass("exact", inputs, export, expected, threads, exact=True))
    return ParityReport(inputs.precision, tuple(passes), unequal, inputs.tokenizer_changes())


def _pass(
    name: str, inputs: GateInputs, export: Path, expected: Sequence[Logits], threads: int | None, exact: bool
) -> Pass:
    limits = inputs.exact_limits if exact else inputs.deployed_limits
    found = [_graph_logits(inputs, export, threads, exact, row) for row in inputs.sequences]
    compared = [compare(want, have) for want, have in zip(expected, found, strict=True)]
    return Pass(name, limits, (merge("by layer", compared),))


# -- PyTorch -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _expected(tensors: TensorFiles, inputs: GateInputs, half: bool) -> list[Logits]:
    """(T, V) logits of every sequence."""
    config = inputs.config
    cos, sin = map(torch.from_numpy, rope_tables(config, config.max_position_embeddings))
    table = _table(tensors, config, _EMBEDDING, half)
    states = [table[torch.tensor([row])] for row in inputs.sequences]
    del table
    for layer in range(config.num_hidden_layers):
        block = load_block(tensors, config, layer)
        if half:
            round_matrices(block)
        for place, x_1TD in enumerate(states):
            length = x_1TD.shape[1]
            states[place] = block(x_1TD, (cos[:length], sin[:length]), None, LayerCache(inputs.scales))
        del block
        give_back()
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.weight.data = tensors["model.norm.weight"].float()
    table = _table(tensors, config, _EMBEDDING if config.tie_word_embeddings else _HEAD, half)
    return [cast(Logits, F.linear(norm(x_1TD[0]), table).numpy()) for x_1TD in states]


def _table(tensors: TensorFiles, config: ModelConfig, module: str, half: bool) -> Tensor:
    found = load_table(tensors, config, module)
    return found.half().float() if half else found


# -- the graph ---------------------------------------------------------------------------------------------------------


def _graph_logits(inputs: GateInputs, export: Path, threads: int | None, exact: bool, tokens: Sequence[int]) -> Logits:
    """(T, V) logits of one sequence, part by part."""
    graph, ids_1T = inputs.graph.graph, np.array([list(tokens)], np.int64)
    steps = min(STEPS, len(tokens) - 1)
    cuts = [0, *range(len(tokens) - steps, len(tokens) + 1)]

    def run(wanted: Sequence[str], given: dict[str, Array], caches: Sequence[str] = ()) -> list[Array]:
        """Values of the whole sequence from others, piece by piece; `caches` grow from piece to piece."""
        into, out_of = [*given, *caches, *_ROOM], [*wanted, *map(_present, caches)]
        session = _session(inputs.graph, into, out_of, export, threads, exact)
        names = {item.name for item in session.get_inputs()}
        # An INT8 cache has its room from the start, as the runtime gives it, or prompts would be read in another way.
        room, dtype = (0, np.float32) if inputs.scales is None else (len(tokens), np.int8)
        shape = (1, inputs.config.num_key_value_heads, room, inputs.config.head_dim)
        past: dict[str, Array] = {name: np.zeros(shape, dtype) for name in (*caches, *_ROOM)}
        found = []
        for start, stop in itertools.pairwise(cuts):
            feeds = {name: array[:, start:stop] for name, array in given.items() if name != "attention_mask"}
            feeds |= {"attention_mask": np.ones((1, stop), np.int64), **past}
            outputs = session.run(out_of, {n: a for n, a in feeds.items() if n in names})
            found.append(outputs[: len(wanted)])
            past |= dict(zip(caches, outputs[len(wanted) :], strict=True))
        return [np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)]

    layers = inputs.config.num_hidden_layers
    first = _node(graph, "model.layers.0.input_layernorm/squared").inputs[0]
    assert first is not None and first.name is not None
    stream = {first.name: run([first.name], {"input_ids": ids_1T})[0]}
    for layer in range(layers):
        after = _sum_inputs(graph, f"model.layers.{layer + 1}.input_layernorm" if layer + 1 < layers else "model.norm")
        caches = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        given = {**stream, "input_ids": ids_1T, "attention_mask": np.ones_like(ids_1T)}
        stream = dict(zip(after, run(after, given, caches), strict=True))
        give_back()
    return cast(Logits, run(["logits"], stream)[0][0])


def _present(past: str) -> str:
    return past.replace("past_key_values", "present")


def _node(graph: ir.Graph, name: str) -> ir.Node:
    return next(node for node in graph if node.name == name)


def _sum_inputs(graph: ir.Graph, norm: str) -> list[str]:
    """The two values whose sum a norm reads, which together are the residual stream."""
    node = next(node for node in graph if node.name in (norm, f"{norm}/sum") and len(node.inputs) > 1)
    return [str(cast(ir.Value, value).name) for value in node.inputs[:2]]


def _session(
    model: ir.Model, given: Sequence[str], wanted: Sequence[str], export: Path, threads: int | None, exact: bool
) -> ort.InferenceSession:
    """A part of the graph, with the weights of that part alone."""
    part = ir.convenience.extract(model.graph, list(dict.fromkeys(given)), list(wanted))
    part.opset_imports.update(model.graph.opset_imports)
    for value in (*part.inputs, *part.outputs):  # the residual stream was no input of the whole
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    whole = ir.Model(part, ir_version=model.ir_version)
    options = exact_options(threads) if exact else session_options(threads)
    folder = find_files(export).data.parent
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    options.enable_cpu_mem_arena = False
    return ort.InferenceSession(ir.to_proto(whole).SerializeToString(), options, providers=["CPUExecutionProvider"])
