"""The latency profile: a second graph that reads prompts faster and stores the layers' weights a second time.

`prompt.onnx` fills the cache with all tokens of a prompt but the last, which `model.onnx` reads; so it has no head, and
ends with what the last layer caches. Its matrices are INT8 with one scale per row, multiplied in whole numbers
(DynamicQuantizeMatMul) and rounded to nearest from the dequantized packed matrices. Tensors that both graphs read are
stored once, in `model.onnx.data`.
Shape suffixes: B sequences, T new tokens, D hidden_size, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from export.cache_scales import CacheScales
from export.graph.builder import Builder
from export.graph.decoder import WrittenGraph, add_inputs, add_layers, add_presents
from export.graph.layer import OrtLayerBuilder, Sequences
from export.graph.matmul import FLOAT, HALF, INT8, Matmul
from export.graph.weights import Packing, Weights
from export.metadata import CACHE_KEY, IN_PLACE_CACHE
from export.paths import prompt_files
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.packed_weights import ROW_BITS

_TOP = 2 ** (ROW_BITS - 1) - 1


class PerRowWeights(Weights):
    """A packed checkpoint whose layers' matrices are INT8 with one scale per row."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self._shapes: dict[str, tuple[int, int]] = {}

    def packing(self, module: str, shape: tuple[int, int]) -> Packing | None:
        if not module.startswith("model.layers."):
            return super().packing(module, shape)
        self._shapes[module] = shape
        return Packing(ROW_BITS, shape[1], asymmetric=False)

    def read_per_row(self, modules: Sequence[str]) -> npt.NDArray[np.int8]:
        return np.ascontiguousarray(np.concatenate([self._rows(module)[0] for module in modules]).T)

    def read_per_row_scales(self, modules: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.concatenate([self._rows(module)[1] for module in modules])

    def _rows(self, module: str) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        """Whole numbers (N, K) and scales (N,) of one matrix."""
        dense_NK = self.read_dequantized(module, self._shapes[module])
        scales_N = np.abs(dense_NK).max(axis=1) / np.float32(_TOP)
        safe_N = np.where(scales_N == 0, np.float32(1), scales_N)
        return np.rint(dense_NK / safe_N[:, None]).astype(np.int8), scales_N


def write_prompt_graph(
    checkpoint: Path, directory: Path, model: WrittenGraph, scales: CacheScales | None, half_cache: bool = False
) -> None:
    """Write `prompt.onnx` and its data into `directory`; operators and names are those of `export.graph.decoder`.

    Args:
        checkpoint: a packed checkpoint.
        directory: holds `model.onnx` and its data.
        model: that graph, written there.
        scales, half_cache: the same as that graph's.
    """
    config = load_config(checkpoint)
    graph = Builder("sportsllm-prompt", {CACHE_KEY: IN_PLACE_CACHE})
    cached = INT8 if scales is not None else HALF if half_cache else FLOAT
    tokens_BT, mask_BS, pasts = add_inputs(graph, config, cached)
    matmul, sequences = (
        Matmul(graph, PerRowWeights(checkpoint), half=False),
        Sequences(tokens_BT, mask_BS, scales, half_cache),
    )
    stream = add_layers(OrtLayerBuilder(graph, config, matmul, sequences), pasts, keep=None)
    add_presents(graph, config, cached, stream.presents)
    graph.write(prompt_files(directory), model.tensors)
