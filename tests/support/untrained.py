"""Exports of untrained models in any format, as `export` writes them but without the parity gate."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from benchmarks.predict.model_size import ModelFormat
from compress.quantization.config import Granularity, QuantizationConfig
from compress.quantization.layer_by_layer import quantize_without_data
from compress.quantization.packed_checkpoint import PackedCheckpoint
from export.cache_scales import CacheScales
from export.graph.builder import GraphForm
from export.graph.decoder import write_graph
from sportsllm.formats.checkpoint import save_checkpoint, write_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_state
from sportsllm.models.language_model import SportsLLM

FORMATS = (
    ModelFormat("fp32"),
    ModelFormat("int8", 128),
    ModelFormat("int4", 128),
    ModelFormat("int8", 128, per_row=True),
    ModelFormat("int4", 32),
    ModelFormat("int4", 128, cache="int8"),
    ModelFormat("int4", 128, standard=True),
)


def make_checkpoint(config: ModelConfig, directory: Path) -> Path:
    """An untrained checkpoint, without a tokenizer."""
    model = SportsLLM(config)
    model.initialize(0)
    directory.mkdir(parents=True)
    save_checkpoint(directory, model)
    return directory


def make_export(checkpoint: Path, stored: ModelFormat, directory: Path, inline: bool = True) -> None:
    """Export a checkpoint, its weights rounded to nearest."""
    config, source = load_config(checkpoint), checkpoint
    directory.mkdir(parents=True)
    if stored.quantized:
        source = directory / "packed"
        source.mkdir()
        granularity = Granularity.PER_CHANNEL if stored.per_row else Granularity.BLOCK
        bits = {"int8": 8, "int4": 4}[stored.precision]
        packed = PackedCheckpoint(config, QuantizationConfig(bits, stored.block_size, granularity=granularity))
        quantize_without_data(checkpoint, config, packed, search=False)
        write_checkpoint(source, config, packed.tensors, quantization=packed.record("rtn"))
    full = tuple(torch.full((config.num_hidden_layers, *state.shape), 0.05) for state in block_state(config))
    scales = CacheScales(full) if stored.cache == "int8" else None
    operators = "standard" if stored.standard else "onnx"
    write_graph(source, directory, GraphForm(operators, scales=scales, inline=inline))
    shutil.copyfile(source / "config.json", directory / "config.json")
    if source != checkpoint:
        shutil.rmtree(source)
