"""What the whole gate and the gate by layer both start from: the graph, its facts, and test sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from export import metadata
from export.cache_scales import CacheScales, HalfCache, Rounding
from export.graph.builder import with_branches
from export.graph.decoder import graph_precision
from export.graph.matmul import FLAT, PER_ROW_PRODUCT
from export.kernels.library import library_of
from export.metadata import ROPE_CACHES
from export.parity.comparison import Limits, compare, merge
from export.parity.limits import (
    DEPLOYED,
    DEPLOYED_PER_ROW,
    EXACT,
    EXPERTS_ERROR,
    MOVED,
    SELECTED_DEPLOYED,
    int8_cache_limits,
)
from export.parity.readings import TEXTS, make_sequences
from export.paths import find_files
from export.runtime.kernels import called_version, problem_of
from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed import QuantizedWeight
from sportsllm.formats.quantized_layers import QuantizedMatrix
from sportsllm.inference.decoder import Logits
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import EMBEDDING, LAST_NORM, block_state
from sportsllm.models.language_model import SportsLLM, rope_of
from sportsllm.models.rope import rope_tables
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class GateInputs:
    """What the gate compares, without the weights."""

    graph: ir.Model  # the exported one
    config: ModelConfig  # the same on both sides
    precision: str  # see `graph_precision`
    rounding: Rounding | None  # of an INT8 cache, or of a float16 one in a graph that computes in float32
    sequences: list[list[int]]  # see `make_sequences`
    tokenizer: TextTokenizer | None  # the checkpoint's, if it has one

    @staticmethod
    def read(checkpoint: Path, export: Path) -> GateInputs:
        """Read both directories, all but the weights.

        Raises:
            ArtifactError: one of the two is damaged, or they do not belong together.
        """
        config, graph = load_config(export), ir.load(find_files(export).graph)
        if config != load_config(checkpoint):
            raise ArtifactError(
                f"{export / 'config.json'}: is not that of {checkpoint}; compare an export with its source"
            )
        tokenizer = load_tokenizer(checkpoint, config) if (checkpoint / "tokenizer.json").exists() else None
        precision = graph_precision(graph_nodes(graph), graph.graph.initializers.values())
        rounding, sequences = graph_rounding(graph, config), make_sequences(config, tokenizer)
        return GateInputs(graph, config, precision, rounding, sequences, tokenizer)

    def exact_limits(self, expected: Sequence[Logits], read: Callable[[Rounding], Sequence[Logits]]) -> Limits:
        """Of the exact pass; `read` gives the reference's logits with a rounded cache."""
        if self.rounding is None:
            return EXACT
        if isinstance(self.rounding, HalfCache):
            return EXACT  # its cache is widened
        moved = read(replace(self.rounding, moved=MOVED))
        return int8_cache_limits(merge("", [compare(*pair) for pair in zip(expected, moved, strict=True)]))

    @property
    def exact_rounding(self) -> Rounding | None:
        """Of the cache in the exact pass."""
        return None if isinstance(self.rounding, HalfCache) else self.rounding

    @property
    def rounds(self) -> bool:
        """Whether the files as they are compute something else than the exact pass."""
        return self.precision != "fp32" or isinstance(self.rounding, HalfCache)

    @property
    def deployed_limits(self) -> Limits:
        """Of the deployed pass; wider where a product rounds its input with one scale for the whole tensor."""
        per_row = any(node.op_type == PER_ROW_PRODUCT for node in graph_nodes(self.graph))
        limits = DEPLOYED_PER_ROW if per_row else DEPLOYED[self.precision]
        if self.config.selection is not None:
            return SELECTED_DEPLOYED
        return limits if self.config.experts is None else replace(limits, error=EXPERTS_ERROR)

    def tokenizer_changes(self) -> tuple[str, ...] | None:
        """Texts that do not survive encoding and decoding; None without a tokenizer."""
        if (tokenizer := self.tokenizer) is None:
            return None
        return tuple(text for text in TEXTS if tokenizer.decode(tokenizer.encode(text)) != text)


def native_library(export: Path) -> Path | None:
    """The library that runs an export's kernels; None where the graph calls none or they cannot run, which is said."""
    version = called_version(find_files(export).graph)
    if version is None:
        return None
    if problem := problem_of(version):
        log(f"the kernels that the graph calls are not checked: {problem}")
        return None
    return library_of(version)


def graph_nodes(graph: ir.Model) -> list[ir.Node]:
    """The nodes, those of functions and inside branches too."""
    return [node for part in (graph.graph, *graph.functions.values()) for node in with_branches(part)]


def computes_in_half(graph: ir.Model) -> bool:
    """Whether a graph's activations, and so its cache, are float16."""
    norm = graph.graph.initializers.get(f"{LAST_NORM}.weight")
    return norm is not None and norm.dtype == ir.DataType.FLOAT16


def graph_rounding(graph: ir.Model, config: ModelConfig) -> Rounding | None:
    """What a graph's cache makes of what is written into it: nothing where it is of the type that is computed in."""
    types = {value.dtype for value in graph.graph.inputs if str(value.name).startswith(metadata.PAST)}
    if ir.DataType.FLOAT16 in types and not computes_in_half(graph):
        return HalfCache()
    found: list[torch.Tensor] = []
    for state in block_state(config):
        names = [metadata.cache_scale_name(layer, state.name) for layer in range(config.num_hidden_layers)]
        stored = [graph.graph.initializers.get(name) for name in names]
        if None in stored:
            return None
        arrays = [np.asarray(cast(Any, value).const_value.numpy()).reshape(state.shape) for value in stored]
        found.append(torch.from_numpy(np.stack(arrays)))
    return CacheScales(tuple(found))


def exact_graph(graph: ir.Model) -> bytes:
    """The graph with all products in float32, and a float16 cache too, serialized; it reads the same data file."""
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        if value.dtype == ir.DataType.FLOAT16:
            value.dtype = ir.DataType.FLOAT
    for node in graph_nodes(graph):
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT16.value:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT.value)
        if "accuracy_level" in node.attributes:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
        if node.op_type == PER_ROW_PRODUCT:
            # Not DequantizeLinear, which ONNX Runtime fuses back into a product of whole numbers.
            x, matrix, scale = node.inputs
            dense = ir.node("Cast", [matrix], {"to": ir.DataType.FLOAT.value}, name=f"{node.name}/dense")
            product = ir.node("MatMul", [x, dense.outputs[0]], name=f"{node.name}/unscaled")
            scaled = ir.node("Mul", [product.outputs[0], scale], name=node.name)
            new = [dense, product, scaled]
            for made in new[:2]:  # else their values get names of their graph's, which a branch shares with others
                made.outputs[0].name = made.name
            around = graph.graph if node.graph is None else node.graph
            ir.convenience.replace_nodes_and_values(around, node, [node], new, node.outputs, scaled.outputs)
    return cast(bytes, ir.to_proto(graph).SerializeToString())


@torch.no_grad()
def round_to_half(matrices: Iterable[Tensor]) -> None:
    """Round numbers to float16, in place."""
    for matrix in matrices:
        matrix.copy_(matrix.half())


def unequal_tables(graph: ir.Model, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Names of stored tables, embedding and, where the model has them, rotary, that differ from the checkpoint's."""
    found = graph.graph.initializers
    rotary = {name: table for name, table in zip(ROPE_CACHES, rope_of(config), strict=False) if name in found}
    for name in (*rotary, *(name for name in tensors if name.startswith(f"{EMBEDDING}."))):
        value = found.get(name, found.get(f"{name}{FLAT}"))
        stored = None if value is None else cast(Any, value.const_value).numpy()
        tensor = rotary[name] if name in rotary else tensors[name]
        table = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        if stored is None or not np.array_equal(stored.ravel(), table.astype(stored.dtype, copy=False).ravel()):
            yield name


@contextmanager
def threads_of_torch(threads: int | None) -> Iterator[None]:
    """PyTorch with this many threads inside, if given."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_TABLES = ("cos_cache", "sin_cache")


def widen(graph: ir.Model, config: ModelConfig) -> None:
    """Make a graph that computes in float16 compute in float32 with the weights that it stores, in place.

    The rotary tables become float32's: the gate compares the stored ones for equality.
    """
    main = graph.graph
    tables = dict(zip(_TABLES, rope_tables(config, config.max_position_embeddings), strict=True))
    for value in (*main.inputs, *main.outputs):
        if value.dtype == HALF:
            value.dtype = FLOAT
    for node in main:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == HALF.value:
            node.attributes["to"] = ir.AttrInt64("to", FLOAT.value)
    first = main[0]
    for name, value in list(main.initializers.items()):
        if value.dtype != HALF:
            continue
        if name in tables:
            value.const_value = ir.tensor(tables[name], name=name)
            value.dtype = FLOAT
            continue
        cast = ir.node("Cast", [value], {"to": FLOAT.value}, name=f"{name}/widened")
        for node, place in list(value.uses()):
            if node is not cast:
                node.replace_input_with(place, cast.outputs[0])
        main.insert_before(first, cast)


@torch.no_grad()
def round_model_to_half(model: SportsLLM) -> None:
    """Round everything that such a graph stores to float16, in place: matrices, scales of packed ones, vectors."""
    round_to_half(model.parameters())
    for module in model.modules():
        if isinstance(module, QuantizedMatrix):
            zero_points = getattr(module, "weight_zero_point", None)
            rounded = QuantizedWeight(
                packed=module.get_buffer("weight_packed").numpy(),
                scales=module.get_buffer("weight_scale").half().float().numpy(),
                zero_points=None if zero_points is None else zero_points.numpy(),
                bits=module.bits,
                block_size=module.block_size,
                in_features=module.in_features,
            )
            module.weight.copy_(torch.from_numpy(rounded.dequantize()))
