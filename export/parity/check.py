"""The gate: an export is published only if it computes what the PyTorch model computes.

Shape suffixes: T tokens, V vocabulary, N rows (outputs).

Each prompt is read whole (prefill), and again in part with the rest token by token through the cache (decode);
one batch has prompts of unequal length. The reference reads every prompt in one piece and has no cache.

- The exact pass multiplies in float32 throughout: the same graph and data, MatMulNBits at accuracy_level 0, also where
  ONNX Runtime makes it out of standard operators. A graph that computes or caches in float16 is widened. What is
  stored in float16 is rounded in the reference too. Only the order of additions differs from PyTorch, so a single wrong
  weight or cache entry stands out.
- The deployed pass runs the files as they are. It bounds what int8 activations or float16 storage cost.
- The native pass runs them with this program's kernels, where the graph calls those and they are built, within the same
  limits. All variants of the kernels compute the same bits, so the plain one must give the logits of the one that runs
  here.
- Another execution provider, where one is asked for, runs them in a pass of its own, within the limits of the deployed
  pass.
- Prompts visit few rows of the embedding and of the rotary table, so both are compared whole, for equality.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from export.cache_scales import RoundedCache, Rounding
from export.kernels.library import VARIANT_VARIABLE, variant_of
from export.parity.comparison import Limits, ParityReport, Pass, compare, merge
from export.parity.inputs import (
    GateInputs,
    computes_in_half,
    exact_graph,
    native_library,
    round_model_to_half,
    round_to_half,
    threads_of_torch,
    unequal_tables,
    widen,
)
from export.parity.limits import DEPLOYED, SELECTED
from export.parity.readings import run_pass
from export.runtime.decoder import OnnxDecoder
from export.runtime.kernels import SLOW_VARIANT, Kernels
from export.runtime.providers import CPU, Provider
from sportsllm.console import log
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.inference.decoder import Logits
from sportsllm.models.kinds import matrix_shapes
from sportsllm.models.language_model import SportsLLM

_PLAIN_TOKENS = 24  # read at once and one by one


def check_parity(checkpoint: Path, export: Path, threads: int | None = None, provider: Provider = CPU) -> ParityReport:
    """Compare an export with the checkpoint it was made from. Neither directory is changed.

    Args:
        checkpoint, export: the PyTorch side; and a directory with a graph, its data and config.json.
        threads: CPU threads of both sides; all cores where not given.
        provider: runs the files as they are once more, if it is not the CPU's.

    Raises:
        ArtifactError: one of the two is damaged.
    """
    deployed = OnnxDecoder(export, threads, kernels="portable")
    inputs = GateInputs.read(checkpoint, export)
    graph, sequences = inputs.graph, inputs.sequences
    model = load_checkpoint(checkpoint)
    unequal = tuple(unequal_tables(graph, inputs.config, TensorFiles(checkpoint)))
    with threads_of_torch(threads):

        def read(rounding: Rounding | None) -> list[Logits]:
            return [_read_whole(model, sequence, rounding) for sequence in sequences]

        expected = read(inputs.rounding)
        limits = inputs.exact_limits(expected, read)
        if not inputs.rounds:
            passes = _exact_passes(deployed, inputs, expected, limits)
            if native_library(export) is not None:
                native = OnnxDecoder(export, threads, kernels="native")
                passes += _exact_passes(native, inputs, expected, limits, "native")
                passes += _plain_pass(export, threads, native, sequences[0])
            deployed_limits = DEPLOYED["fp16"]  # of another provider: GPUs may multiply with fewer bits
            passes += _provider_pass(export, threads, provider, sequences, expected, deployed_limits)
        else:
            deployed_limits = inputs.deployed_limits
            rounded = [run_pass("deployed", deployed, sequences, expected, deployed_limits)]
            del deployed
            if native_library(export) is not None:
                native = OnnxDecoder(export, threads, kernels="native")
                rounded.append(run_pass("native", native, sequences, expected, deployed_limits))
                rounded += _plain_pass(export, threads, native, sequences[0])
                del native
            rounded += _provider_pass(export, threads, provider, sequences, expected, deployed_limits)
            half = computes_in_half(graph)
            if half:
                round_model_to_half(model)
                widen(graph, inputs.config)
            elif inputs.precision == "fp16":
                round_to_half(model.get_parameter(f"{name}.weight") for name in matrix_shapes(model.config))
            if half or inputs.precision == "fp16" or inputs.exact_rounding != inputs.rounding:
                expected = read(inputs.exact_rounding)
            exact = OnnxDecoder(export, threads, exact_graph(graph))
            passes = [*_exact_passes(exact, inputs, expected, limits), *rounded]
    return ParityReport(inputs.precision, tuple(passes), unequal, inputs.tokenizer_changes())


def _plain_pass(export: Path, threads: int | None, native: OnnxDecoder, tokens: Sequence[int]) -> list[Pass]:
    """A short prompt and two steps by the plain variant of the kernels, which must equal the processor's own."""
    library = native.kernels.library
    if library is None or variant_of(library) == SLOW_VARIANT:
        return []

    def logits(decoder: OnnxDecoder) -> Logits:
        *prompt, one, two = tokens[:_PLAIN_TOKENS]
        found = [decoder.prefill([prompt]), decoder.step([one]), decoder.step([two])]
        return cast(Logits, np.concatenate([*found, decoder.logits(tokens[:_PLAIN_TOKENS])]))

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


def _provider_pass(
    export: Path,
    threads: int | None,
    provider: Provider,
    sequences: Sequence[Sequence[int]],
    expected: Sequence[Logits],
    limits: Limits,
) -> list[Pass]:
    """The pass on another provider than the CPU's, if one was asked for."""
    if provider.is_cpu:
        return []
    decoder = OnnxDecoder(export, threads, provider=provider)
    log(str(decoder.placement))
    return [run_pass(f"provider {provider.name}", decoder, sequences, expected, limits)]


@torch.inference_mode()
def _read_whole(model: SportsLLM, tokens: Sequence[int], rounding: Rounding | None) -> Logits:
    cache = None if rounding is None else RoundedCache(model.config, len(tokens), rounding)
    return cast(Logits, model(torch.tensor([list(tokens)]), cache)[0].numpy())


def _exact_passes(
    decoder: OnnxDecoder, inputs: GateInputs, expected: Sequence[Logits], limits: Limits, name: str = "exact"
) -> list[Pass]:
    """The exact pass; where tokens are selected also one as far as all are, since a turned choice widens the first."""
    selection, sequences = inputs.config.selection, inputs.sequences
    if selection is None:
        return [run_pass(name, decoder, sequences, expected, limits)]
    seen = [sequence[: selection.tokens] for sequence in sequences]
    wanted = [logits_TV[: selection.tokens] for logits_TV in expected]
    return [
        run_pass(name, decoder, sequences, expected, SELECTED),
        run_pass(f"{name}, all selected", decoder, seen, wanted, limits),
    ]
