"""The gate: an export is published only if it computes what the PyTorch model computes.

Shape suffixes: T tokens, V vocabulary, N rows (outputs).

Each prompt is read whole (prefill), and again in part with the rest token by token through the cache (decode);
one batch has prompts of unequal length. The reference reads every prompt in one piece and has no cache.

- The exact pass multiplies in float32 throughout: the same graph and data, MatMulNBits at accuracy_level 0, also if
  ONNX Runtime makes it out of standard operators. A graph that computes or caches in float16 is widened. What is
  stored in float16 is rounded in the reference too. Only the order of additions differs from PyTorch, so a single wrong
  weight or cache entry stands out.
- The deployed pass runs the files as they are. It bounds what int8 activations or float16 storage cost.
- The native pass runs them with this program's kernels, if the graph calls those and they are built, within the same
  limits. All variants of the kernels compute the same bits, so the plain one must give the logits of the one that runs
  here.
- Another execution provider, if one is asked for, runs them in a pass of its own, within the limits of the deployed
  pass.
- Prompts visit few rows of the embedding and of the tables of positions, so these are compared whole, for equality.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import Tensor, nn

from export import layout
from export.cache_scales import CacheScales, HalfCache, RoundedCache, Rounding
from export.graph.builder import with_branches
from export.graph.decoder import graph_precision
from export.graph.weights import FLAT
from export.kernels.library import VARIANT_VARIABLE, variant_of
from export.layout import find_files
from export.parity.comparison import (
    DEPLOYED,
    EXACT,
    EXPERTS_ERROR,
    MOVED,
    SELECTED,
    SELECTED_DEPLOYED,
    TEXTS,
    Limits,
    ParityReport,
    Pass,
    compare,
    int8_cache_limits,
    make_sequences,
    merge,
    run_pass,
)
from export.runtime.decoder import OnnxDecoder
from export.runtime.providers import CPU, Provider
from export.runtime.session import SLOW_VARIANT, Kernels, called_version, problem_of
from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import StoredBlock, open_model
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.inference.decoder import Logits
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, LAST_NORM, POSITIONS, block_state
from sportsllm.models.language_model import SportsLLM, rope_of
from sportsllm.models.rope import rope_constants, rope_tables
from sportsllm.process_memory import give_back
from sportsllm.text.tokenizer import load_tokenizer

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_PLAIN_TOKENS = 24  # read at once and one by one


def check_parity(checkpoint: Path, export: Path, threads: int | None = None, provider: Provider = CPU) -> ParityReport:
    """Compare an export with the checkpoint it was made from. Neither directory is changed.

    Args:
        checkpoint, export: the PyTorch side; and a directory with a graph, its data and config.json.
        provider: runs the files as they are once more, if it is not the CPU's.

    Raises:
        ArtifactError: one of the two is damaged, or they do not belong together.
    """
    OnnxDecoder(export, threads, kernels="portable")  # refuses a damaged graph; kept, it would lie beside the reference
    config, graph, source = load_config(export), ir.load(find_files(export).graph), load_config(checkpoint)
    # `write_loader_files` may have named one more.
    unstopped = set(source.stop_token_ids) - set(config.stop_token_ids)
    if unstopped or config.with_changes(eos_token_id=source.eos_token_id) != source:
        raise ArtifactError(f"{export / 'config.json'}: is not that of {checkpoint}; compare an export with its source")
    unequal = tuple(unequal_tables(graph, config, TensorFiles(checkpoint)))
    sequences, changes = _sequences(checkpoint, config)
    precision = graph_precision(graph_nodes(graph), graph.graph.initializers.values())
    rounding = graph_rounding(graph, config)
    rounds = precision != "fp32" or isinstance(rounding, HalfCache)  # the files compute something else than exactly
    model = open_model(checkpoint)
    halved = rounds and (computes_in_half(graph) or precision == "fp16")
    reread = halved or isinstance(rounding, HalfCache)  # the exact pass widens a cache of float16
    with threads_of_torch(threads):
        expected = _read_whole(model, sequences, rounding)
        exact_limits = EXACT
        if isinstance(rounding, CacheScales):
            moved = _read_whole(model, sequences, replace(rounding, moved=MOVED))
            exact_limits = int8_cache_limits(merge("", [compare(*pair) for pair in zip(expected, moved, strict=True)]))
            del moved
        if not reread:
            del model  # frees its weights for the sessions
        deployed_limits = _deployed_limits(config, precision) if rounds else DEPLOYED["fp16"]
        limits = deployed_limits if rounds else exact_limits
        decoder = OnnxDecoder(export, threads, kernels="portable")
        passes = _passes("deployed" if rounds else "exact", decoder, sequences, expected, limits)
        del decoder
        if can_run_native(export):
            native = OnnxDecoder(export, threads, kernels="native")
            passes += _passes("native", native, sequences, expected, limits)
            passes += _plain_pass(export, threads, native, sequences[0])
            del native
        if not provider.is_cpu:
            elsewhere = OnnxDecoder(export, threads, provider=provider)
            log(str(elsewhere.placement))
            passes.append(run_pass(f"provider {provider.name}", elsewhere, sequences, expected, deployed_limits))
        if rounds:
            if halved:
                round_model(model, every=computes_in_half(graph))
            if reread:
                expected = _read_whole(model, sequences, None if isinstance(rounding, HalfCache) else rounding)
            exact = OnnxDecoder(export, threads, exact_graph(graph, config))
            passes = [*_passes("exact", exact, sequences, expected, exact_limits), *passes]
    return ParityReport(precision, tuple(passes), unequal, changes)


def _sequences(checkpoint: Path, config: ModelConfig) -> tuple[list[list[int]], tuple[str, ...] | None]:
    """What is read, and the texts that the tokenizer changes, whose memory is given back."""
    if not (checkpoint / "tokenizer.json").exists():
        return make_sequences(config, None), None
    tokenizer = load_tokenizer(checkpoint, config)
    changes = tuple(text for text in TEXTS if tokenizer.decode(tokenizer.encode(text)) != text)
    sequences = make_sequences(config, tokenizer)
    del tokenizer
    give_back()
    return sequences, changes


def _deployed_limits(config: ModelConfig, precision: str) -> Limits:
    if config.selection is not None:
        return SELECTED_DEPLOYED
    return DEPLOYED[precision] if config.experts is None else replace(DEPLOYED[precision], error=EXPERTS_ERROR)


def _passes(
    name: str, decoder: OnnxDecoder, sequences: Sequence[Sequence[int]], expected: Sequence[Logits], limits: Limits
) -> list[Pass]:
    """A pass; if tokens are selected and all is exact also one as far as all are, since a turned choice widens the
    first."""
    selection = decoder.config.selection
    if selection is None or limits == SELECTED_DEPLOYED:
        return [run_pass(name, decoder, sequences, expected, limits)]
    seen = [sequence[: selection.tokens] for sequence in sequences]
    wanted = [logits_TV[: selection.tokens] for logits_TV in expected]
    return [
        run_pass(name, decoder, sequences, expected, SELECTED),
        run_pass(f"{name}, all selected", decoder, seen, wanted, limits),
    ]


def _plain_pass(export: Path, threads: int | None, native: OnnxDecoder, tokens: Sequence[int]) -> list[Pass]:
    """A short prompt and two steps by the plain variant of the kernels, which must equal the processor's own."""
    library = native.kernels.library
    if library is None or variant_of(library) == SLOW_VARIANT:
        return []

    def logits(decoder: OnnxDecoder) -> Logits:
        read, first = tokens[:_PLAIN_TOKENS], max(1, min(len(tokens), _PLAIN_TOKENS) - 2)
        found = [decoder.prefill([read[:first]]), *(decoder.step([token]) for token in read[first:])]
        return cast(Logits, np.concatenate([*found, decoder.logits(read)]))

    # A library chooses its variant once, when it is loaded, and a copy is another library.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Path(shutil.copy(library, folder))
        before = os.environ.get(VARIANT_VARIABLE)
        os.environ[VARIANT_VARIABLE] = SLOW_VARIANT
        try:
            plain = OnnxDecoder(export, threads, kernels=Kernels("native", copy, SLOW_VARIANT))
        finally:
            del os.environ[VARIANT_VARIABLE]
            if before is not None:
                os.environ[VARIANT_VARIABLE] = before
        compared = compare(logits(plain), logits(native))
        del plain
    return [Pass("native, plain variant", Limits(0.0, 0.0, 1.0), (merge("prompt and steps", [compared]),))]


@torch.inference_mode()
def _read_whole(model: SportsLLM, sequences: Sequence[Sequence[int]], rounding: Rounding | None) -> list[Logits]:
    """The reference's logits, (T, V) of each sequence."""
    found = []
    for tokens in sequences:
        cache = None if rounding is None else RoundedCache(model.config, len(tokens), rounding)
        found.append(cast(Logits, model(torch.tensor([list(tokens)]), cache)[0].numpy()))
    return found


def can_run_native(export: Path) -> bool:
    """Whether an export calls kernels and they run here; logs why they do not."""
    if (version := called_version(find_files(export).graph)) is None:
        return False
    if problem := problem_of(version):
        log(f"the kernels that the graph calls are not checked: {problem}")
    return not problem


def graph_nodes(graph: ir.Model) -> list[ir.Node]:
    """The nodes, those of functions and inside branches too."""
    return [node for part in (graph.graph, *graph.functions.values()) for node in with_branches(part)]


def computes_in_half(graph: ir.Model) -> bool:
    """Whether a graph's activations, and so its cache, are float16."""
    norm = graph.graph.initializers.get(f"{LAST_NORM}.weight")
    return norm is not None and norm.dtype == HALF


def graph_rounding(graph: ir.Model, config: ModelConfig) -> Rounding | None:
    """How a graph's cache rounds what is written into it; None if it has the compute dtype."""
    types = {value.dtype for value in graph.graph.inputs if str(value.name).startswith(layout.PAST)}
    if HALF in types and not computes_in_half(graph):
        return HalfCache()
    found: list[torch.Tensor] = []
    for state in block_state(config):
        names = [layout.cache_scale_name(layer, state.name) for layer in range(config.num_hidden_layers)]
        stored = [graph.graph.initializers.get(name) for name in names]
        if None in stored:
            return None
        arrays = [np.asarray(cast(Any, value).const_value.numpy()).reshape(state.shape) for value in stored]
        found.append(torch.from_numpy(np.stack(arrays)))
    return CacheScales(tuple(found))


def exact_graph(graph: ir.Model, config: ModelConfig) -> bytes:
    """The graph with all products in float32, serialized; it reads the same data file. `graph` is changed.

    Caches and activations of float16 become float32's: what a graph that computes in float16 stores is cast. Its rotary
    tables are made anew: the gate compares the stored ones for equality.
    """
    main = graph.graph
    if computes_in_half(graph):
        _widen_weights(main, config)
    for value in (*main.inputs, *main.outputs):
        if value.dtype == HALF:
            value.dtype = FLOAT
    for node in graph_nodes(graph):
        if node.op_type == "Cast" and node.attributes["to"].as_int() == HALF.value:
            node.attributes["to"] = ir.AttrInt64("to", FLOAT.value)
        if "accuracy_level" in node.attributes:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    return cast(bytes, ir.to_proto(graph).SerializeToString())


def _widen_weights(main: ir.Graph, config: ModelConfig) -> None:
    tables = dict(zip(layout.ROPE_CACHES, rope_tables(config), strict=False))
    first = main[0]
    for name, value in list(main.initializers.items()):
        if value.dtype != HALF:
            continue
        if name in tables:
            value.const_value, value.dtype = ir.tensor(tables[name], name=name), FLOAT
            continue
        widened = ir.node("Cast", [value], {"to": FLOAT.value}, name=f"{name}/widened")
        for node, place in list(value.uses()):
            if node is not widened:
                node.replace_input_with(place, widened.outputs[0])
        main.insert_before(first, widened)


def unequal_tables(graph: ir.Model, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Names of stored tables, the embedding and those of positions, that differ from the checkpoint's."""
    found = graph.graph.initializers
    stored = rope_of(config) if any(name in found for name in layout.ROPE_CACHES) else ()
    tables = dict(zip(layout.ROPE_CACHES, stored, strict=False))
    for local, name in enumerate(layout.ROPE_FREQUENCIES):
        tables[name] = torch.from_numpy(rope_constants(config, bool(local))[0])
    rotary = {name: table for name, table in tables.items() if name in found}
    learned = (f"{EMBEDDING}.", f"{POSITIONS}.")
    for name in (*rotary, *(name for name in tensors if name.startswith(learned))):
        value = found.get(name, found.get(f"{name}{FLAT}"))
        tensor = rotary[name] if name in rotary else tensors[name]
        table = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        if value is None or not _equals(cast(Any, value.const_value), table):
            yield name


def _equals(stored: Any, table: npt.NDArray[Any]) -> bool:
    """Whether a tensor of a graph holds a table; its file is mapped into memory only meanwhile."""
    try:
        return bool(np.array_equal(stored.numpy().ravel(), table.astype(stored.numpy().dtype, copy=False).ravel()))
    finally:
        if isinstance(stored, ir.ExternalTensor):
            stored.release()


def round_model(model: SportsLLM, every: bool) -> None:
    """Round a model's matrices, or `every` parameter, to float16, in place; layers on disk whenever they are read."""
    rounded = partial(round_to_half, every=every)
    for layer in model.model.layers:
        if isinstance(layer, StoredBlock):
            layer.change = rounded
    rounded(model)


@torch.no_grad()
def round_to_half(module: nn.Module, every: bool) -> None:
    """The same for the parameters that a module has in memory; a table of positions is no matrix."""
    for name, parameter in module.named_parameters():
        if every or (parameter.ndim > 1 and not name.startswith(POSITIONS)):
            parameter.copy_(parameter.half())


@contextmanager
def threads_of_torch(threads: int | None) -> Iterator[None]:
    """PyTorch with this many threads inside, if given."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
