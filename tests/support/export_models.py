"""Tiny real models for the tests of `export`, dense and packed."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx
import torch

from export.cache_scales import CacheScales, measure_scales
from export.graph.builder import CACHED_TYPES, FLOAT, HALF, GraphForm
from export.graph.decoder import WrittenGraph, write_graph
from export.layout import DATA_FILE, GRAPH_FILE
from export.parity.check import check_parity
from export.parity.comparison import ParityReport
from export.runtime.decoder import OnnxDecoder
from sportsllm.formats.checkpoint import save_tensors, write_config
from sportsllm.formats.packed import QuantizedWeight, pack
from sportsllm.formats.packed_modules import QuantizedEmbedding, QuantizedLinear
from sportsllm.formats.safetensors import WEIGHTS
from sportsllm.models.language_model import SportsLLM
from tests.support import models
from tests.support.models import tiny_config

TINY = tiny_config(vocab_size=96, intermediate_size=112, max_position_embeddings=64)

CONTEXT = 320
"""The longest sequence of the gate fits."""


def tiny_model(std: float = 0.1, **changes: Any) -> SportsLLM:
    """Random weights, large enough for attention to look at some tokens more than others."""
    return models.tiny_model(0, std, **vars(TINY) | changes)


def round_to_nearest(weight: npt.NDArray[np.float32], bits: int, block: int, asymmetric: bool) -> QuantizedWeight:
    """Pack an (N, K) matrix; the last block of a row is padded where K is no multiple of `block`."""
    rows, width = weight.shape
    groups, top, middle = -(-width // block), 2**bits - 1, 2 ** (bits - 1)
    padded = np.zeros((rows, groups * block), np.float32)
    padded[:, :width] = weight
    padded = padded.reshape(rows, groups, block)
    if asymmetric:
        low, high = np.minimum(padded.min(axis=2), 0), np.maximum(padded.max(axis=2), 0)
        scales = (high - low) / top
        zero_points = np.clip(np.round(-low / scales), 0, top)
    else:
        scales = np.abs(padded).max(axis=2) / (middle - 1)
        zero_points = np.full((rows, groups), middle)
    scales = scales.astype(np.float16).astype(np.float32)
    quants = np.clip(np.round(padded / scales[:, :, None]) + zero_points[:, :, None], 0, top)
    return QuantizedWeight(
        packed=pack(quants.astype(np.uint8), bits),
        scales=scales,
        zero_points=pack(zero_points.astype(np.uint8), bits) if asymmetric else None,
        bits=bits,
        block_size=block,
        in_features=width,
    )


def pack_model(
    model: SportsLLM,
    bits: int,
    block: int = 32,
    asymmetric: bool = False,
    bits_of: Callable[[str], int | None] = lambda name: None,
) -> dict[str, Any]:
    """Pack every matrix in place; returns config.json's quantization_config.

    `bits` are of every matrix, unless `bits_of` its name says otherwise; 16 leaves one as it is.
    """
    modules: dict[str, Any] = {}
    for name, module in list(model.named_modules()):
        own = bits_of(name) or bits
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding) or own == 16:
            continue
        packed = round_to_nearest(module.weight.detach().numpy(), own, block, asymmetric)
        bias = getattr(module, "bias", None)
        replacement = (
            QuantizedEmbedding(packed, tied=model.lm_head is None)
            if isinstance(module, torch.nn.Embedding)
            else QuantizedLinear(packed, None if bias is None else bias.detach())
        )
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, replacement)
        modules[name] = {"bits": own}
    return {"modules": modules}


def save(directory: Path, model: SportsLLM, quantization: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint directory without a tokenizer."""
    if quantization is None:
        return models.saved(directory, model)
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory / WEIGHTS, {name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    write_config(directory, model.config, quantization=quantization)
    return directory


def save_graph(
    directory: Path, model: SportsLLM, quantization: dict[str, Any] | None = None, form: GraphForm | None = None
) -> Path:
    """Write a checkpoint directory without a tokenizer, and the model's graph beside the weights."""
    write_graph(save(directory, model, quantization), directory, form)
    return directory


def measured_scales(model: SportsLLM, samples: list[torch.Tensor]) -> CacheScales:
    """Scales of an INT8 cache from token ids, (1, S) each."""
    return measure_scales(model.config, model.model.layers, [model.model.embed_tokens(tokens) for tokens in samples])


def int8_samples(count: int = 4, length: int = 60) -> list[torch.Tensor]:
    """Token ids to measure the scales of an INT8 cache on, (1, length) each; the same every time."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, TINY.vocab_size, (1, length), generator=draw) for _ in range(count)]


@dataclass(frozen=True)
class Export:
    """A checkpoint and its export in one directory, which tests read and never change.

    Attributes:
        directory: of both; of a browser's export alone.
        written: its graph.
        model: the checkpoint's, before it was packed.
        scales: of an INT8 cache.
    """

    directory: Path
    written: WrittenGraph
    model: SportsLLM
    scales: CacheScales | None

    @cached_property
    def report(self) -> ParityReport:
        """The gate's."""
        return check_parity(self.directory, self.directory, threads=1)

    def copy_to(self, directory: Path) -> Path:
        """A copy that a test may change."""
        return shutil.copytree(self.directory, directory, dirs_exist_ok=True)


class Exports:
    """Makes each export of a tiny model once."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, Export]()

    def __call__(
        self,
        bits: int | None = None,
        block: int = 32,
        asymmetric: bool = False,
        operators: str = "onnx",
        dtype: str = "fp32",
        cache: str = "fp32",
        inline: bool = False,
        **changes: Any,
    ) -> Export:
        """The export of `tiny_model(**changes)` with room for the gate's sequences.

        Args:
            bits, block, asymmetric: see `pack_model`; a dense model without `bits`.
            operators, inline: see `GraphForm`.
            dtype, cache: `--dtype` and `--kv-cache` of `export`; an INT8 cache has the scales of `int8_samples`.
            changes: of the model's shape.
        """
        key = repr((bits, block, asymmetric, operators, dtype, cache, inline, sorted(changes.items())))
        if key not in self._made:
            directory, shape = self._root / str(len(self._made)), {"max_position_embeddings": CONTEXT} | changes
            model, packed = tiny_model(**shape), tiny_model(**shape)
            record = bits and pack_model(packed, bits, block, asymmetric)
            save(directory, packed, record or None)
            scales = measured_scales(model, int8_samples()) if cache == "int8" else None
            checkpoint = directory
            if operators == "web":  # beside PyTorch's weights it would not count as an export
                directory = directory / "web"
                directory.mkdir()
                shutil.copy(checkpoint / "config.json", directory)
            dense, real = HALF if dtype != "fp32" else FLOAT, HALF if dtype == "fp16" else FLOAT
            form = GraphForm(operators, dense, real, HALF if real == HALF else CACHED_TYPES[cache], scales, inline)
            written = write_graph(checkpoint, directory, form)
            self._made[key] = Export(directory, written, model, scales)
        return self._made[key]


def draw(*lengths: int) -> list[list[int]]:
    """Random tokens, a row for each length."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 96, length).tolist() for length in lengths]


def logits_of(model: SportsLLM, tokens: npt.NDArray[np.int64] | list[int]) -> npt.NDArray[np.float32]:
    """PyTorch's logits, (T, V) of a sequence or (B, T, V) of a batch."""
    ids = torch.as_tensor(np.asarray(tokens))
    with torch.inference_mode():
        logits = model(ids if ids.ndim == 2 else ids[None]).numpy()
    return cast("npt.NDArray[np.float32]", logits if ids.ndim == 2 else logits[0])


def edit_tensor(directory: Path, name: str, change: Callable[[npt.NDArray[Any]], None]) -> None:
    """Change a tensor of an export in place, in its data or, if it is small, in its graph, and nothing else."""
    graph = onnx.load(str(directory / GRAPH_FILE), load_external_data=False)
    (tensor,) = [item for item in graph.graph.initializer if item.name == name]
    if not tensor.external_data:
        small = onnx.numpy_helper.to_array(tensor).copy()
        change(small)
        tensor.CopyFrom(onnx.numpy_helper.from_array(small, name))
        (directory / GRAPH_FILE).write_bytes(graph.SerializeToString())
        return
    entry = {item.key: item.value for item in tensor.external_data}
    array = np.memmap(
        directory / DATA_FILE,
        dtype=onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type),
        mode="r+",
        offset=int(entry["offset"]),
        shape=tuple(tensor.dims),
    )
    change(array)
    array.flush()


def pieces_read(decoder: OnnxDecoder) -> list[int]:
    """Grows by the length of every piece of tokens that the decoder runs from now on."""
    read: list[int] = []
    run = decoder._run

    def counting(cache: Any, rows: slice, ids: Any, *rest: Any, **keywords: Any) -> None:
        read.append(ids.shape[1])
        run(cache, rows, ids, *rest, **keywords)

    decoder._run = counting  # type: ignore[method-assign]
    return read
