"""The gate one layer at a time, for checkpoints that do not fit in memory whole.

The exported graph is cut at the residual stream into embedding, layers and head. Each part is opened alone and reads
the output of the part before it, the prompt first and the last tokens one by one through the cache. PyTorch's layers
are read in the same way. The logits at the end are compared as in the whole gate.
Shape suffixes: T tokens, D hidden_size, V vocabulary.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import torch
import torch.nn.functional as F
from torch import Tensor

from export.cache_scales import LayerCache, Rounding
from export.metadata import ATTENTION_MASK, CACHE_KEY, INPUT_IDS, LOGITS, PAST, PRESENT, needs_room
from export.parity.comparison import ParityReport, Pass, compare, merge
from export.parity.inputs import (
    GateInputs,
    exact_graph,
    native_library,
    round_to_half,
    threads_of_torch,
    unequal_tables,
)
from export.parity.readings import STEPS
from export.paths import find_files
from export.runtime.session import session_options
from sportsllm.formats.checkpoint import check_names, load_block, load_last_norm, load_positions, load_table
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.inference.decoder import Logits
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import EMBEDDING, HEAD
from sportsllm.models.language_model import block_weights, embed, first_positions, rope_of
from sportsllm.process_memory import give_back

Array = npt.NDArray[Any]


def check_parity_by_layer(
    checkpoint: Path, export: Path, residual: Sequence[Sequence[str]], threads: int | None = None
) -> ParityReport:
    """As `export.parity.check.check_parity`, with one layer of each side in memory; no ragged batch.

    The graph is cut at the values named by `residual`, see `export.graph.decoder.WrittenGraph`.

    Raises:
        ArtifactError: one of the two is damaged, or they do not belong together.
    """
    inputs = GateInputs.read(checkpoint, export)
    tensors = TensorFiles(checkpoint)
    check_names(tensors, inputs.config)

    def run_pass(name: str, expected: Sequence[Logits], exact: bool, library: Path | None = None) -> Pass:
        found = GraphParts(inputs, export, residual, threads, exact, library).logits(inputs.sequences)
        compared = [compare(want, have) for want, have in zip(expected, found, strict=True)]
        return Pass(name, exact_limits if exact else inputs.deployed_limits, (merge("by layer", compared),))

    passes: list[Pass] = []
    with threads_of_torch(threads), _quick_collections():
        unequal = tuple(unequal_tables(inputs.graph, inputs.config, tensors))
        expected = _expected(tensors, inputs, inputs.rounding, half=False)
        exact_limits = inputs.exact_limits(expected, lambda rounding: _expected(tensors, inputs, rounding, half=False))
        if inputs.rounds:
            passes.append(run_pass("deployed", expected, exact=False))
            library = native_library(export)
            if library is not None:
                passes.append(run_pass("native", expected, exact=False, library=library))
            half = inputs.precision == "fp16"
            if half or inputs.exact_rounding != inputs.rounding:
                expected = _expected(tensors, inputs, inputs.exact_rounding, half)
            exact_graph(inputs.graph)
        passes.insert(0, run_pass("exact", expected, exact=True))
    return ParityReport(inputs.precision, tuple(passes), unequal, inputs.tokenizer_changes())


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Garbage collections that leave out the objects there already, which cost them nearly all of their time.

    There is one for each layer, so that its memory is free before the next.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@torch.inference_mode()
def _expected(tensors: TensorFiles, inputs: GateInputs, rounding: Rounding | None, half: bool) -> list[Logits]:
    """(T, V) logits of every sequence."""
    config = inputs.config
    rope, positions = rope_of(config), load_positions(tensors, config)
    table = _table(tensors, config, EMBEDDING, half)
    states = [embed(config, table[torch.tensor([row])], positions) for row in inputs.sequences]
    del table
    for layer in range(config.num_hidden_layers):
        block = load_block(tensors, config, layer)
        if half:
            round_to_half(block_weights(block))
        for place, x_1TD in enumerate(states):
            states[place] = block(x_1TD, first_positions(rope, x_1TD), None, LayerCache(rounding))
        del block
        give_back()
    norm = load_last_norm(tensors, config)
    table = _table(tensors, config, EMBEDDING if config.tie_word_embeddings else HEAD, half)
    return [cast(Logits, F.linear(norm(x_1TD[0]), table).numpy()) for x_1TD in states]


def _table(tensors: TensorFiles, config: ModelConfig, module: str, half: bool) -> Tensor:
    found = load_table(tensors, config, module)
    return found.half().float() if half else found


class GraphParts:
    """The exported graph, opened part by part."""

    def __init__(
        self,
        inputs: GateInputs,
        export: Path,
        residual: Sequence[Sequence[str]],
        threads: int | None,
        exact: bool,
        library: Path | None = None,
    ) -> None:
        self._model, self._folder = inputs.graph, find_files(export).data.parent
        self._cache = inputs.graph.metadata_props.get(CACHE_KEY, "")
        self._cuts = [(INPUT_IDS,), *map(tuple, residual), (LOGITS,)]
        self._options = threads, exact, library
        self._past = {str(v.name): v for v in inputs.graph.graph.inputs if str(v.name).startswith(PAST)}

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Logits]:
        """(T, V) logits of every sequence."""
        ids = [{INPUT_IDS: np.array([list(tokens)], np.int64)} for tokens in sequences]
        values: list[dict[str, Array]] = [{} for _ in sequences]
        for part, (given, wanted) in enumerate(itertools.pairwise(self._cuts)):
            read = [{**own, **tokens} for own, tokens in zip(values, ids, strict=True)]
            values = self._run(given, wanted, part - 1, read)
            give_back()
        return [cast(Logits, found[LOGITS][0]) for found in values]

    def _run(
        self, given: Sequence[str], wanted: Sequence[str], layer: int, read: Sequence[dict[str, Array]]
    ) -> list[dict[str, Array]]:
        """Some values of every sequence from others; `layer` is that between them, if there is one."""
        own = [name for name in self._past if name.startswith(f"{PAST}{layer}.")]
        presents = [name.replace(PAST, PRESENT) for name in own]
        session = self._session([*given, INPUT_IDS, ATTENTION_MASK, *own], [*wanted, *presents])
        found = []
        for values in read:
            room = values[INPUT_IDS].shape[1]
            past = {name: _empty_cache(self._past[name], room, self._cache) for name in own}
            found.append(_run_pieces(session, past, _pieces(values)))
        return found

    def _session(self, given: Sequence[str], wanted: Sequence[str]) -> ort.InferenceSession:
        """A part of the graph, with the weights of that part alone."""
        model = self._model
        part = ir.convenience.extract(model.graph, list(dict.fromkeys(given)), list(wanted))
        part.opset_imports.update(model.graph.opset_imports)
        for value in (*part.inputs, *part.outputs):  # inner values of the whole graph have no type
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        whole = ir.Model(part, ir_version=model.ir_version, functions=list(model.functions.values()))
        options = session_options(*self._options)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self._folder))
        options.enable_cpu_mem_arena = False
        return ort.InferenceSession(ir.to_proto(whole).SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run_pieces(
    session: ort.InferenceSession, past: dict[str, Array], pieces: Iterable[Mapping[str, Array]]
) -> dict[str, Array]:
    """The outputs of a part for a sequence read in pieces, joined along the tokens; present becomes past."""
    inputs, wanted = {item.name for item in session.get_inputs()}, [item.name for item in session.get_outputs()]
    found: dict[str, list[Array]] = {}
    for piece in pieces:
        feeds = {name: array for name, array in {**piece, **past}.items() if name in inputs}
        for name, array in zip(wanted, session.run(wanted, feeds), strict=True):
            if name.startswith(PRESENT):
                past[name.replace(PRESENT, PAST)] = array
            else:
                found.setdefault(name, []).append(array)
    return {name: np.concatenate(parts, axis=1) for name, parts in found.items()}


def _pieces(values: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """A sequence's values, (1, T, ...), and its attention mask: the prompt in one piece, then the steps."""
    length = values[INPUT_IDS].shape[1]
    steps = min(STEPS, length - 1)
    for start, stop in itertools.pairwise([0, *range(length - steps, length + 1)]):
        piece = {name: array[:, start:stop] for name, array in values.items()}
        yield {**piece, ATTENTION_MASK: np.ones((1, stop), np.int64)}


def _empty_cache(past: ir.Value, room: int, cache: str) -> Array:
    """What a graph input with cached tokens starts from; `cache` is the graph's kind, see `needs_room`."""
    assert past.shape is not None and past.dtype is not None, "an input has both"
    length = room if needs_room(str(past.name), cache, past.dtype == ir.DataType.INT8) else 0
    shape = [1, *(size if isinstance(size, int) else length for size in list(past.shape)[1:])]
    return np.zeros(shape, past.dtype.numpy())
