"""Models that predictions are checked on: untrained, of several shapes and forms, exported without the parity gate.

Time and memory of a model do not depend on what its weights are, so they are drawn at random and rounded to nearest.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.predict.model_size import Stored, prompt_graph_bytes
from sportsllm.models.config import ModelConfig
from sportsllm.models.presets import PRESETS
from sportsllm.storage.artifact import directory_bytes

BLOCK = 128
CONTEXT = 2_048


def _shape(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=CONTEXT,
    )


FITTED: Mapping[str, ModelConfig] = {
    "1m": PRESETS["tiny-1m"].with_changes(max_position_embeddings=CONTEXT),
    "5m": PRESETS["tiny-5m"].with_changes(max_position_embeddings=CONTEXT),
    "23m": _shape(8_000, 640, 1_792, 4, 10, 2),
    "24m": _shape(8_000, 384, 1_024, 12, 6, 6),
    "60m": _shape(16_000, 640, 1_792, 10, 10, 5),
    "small": PRESETS["small"],
}
# One as small as the smallest fitted one, two between them, one as wide as the largest; other heads, depths, widths.
SCORED: Mapping[str, ModelConfig] = {
    "1m-deep": PRESETS["tiny-1m-deep"].with_changes(max_position_embeddings=CONTEXT),
    "15m": _shape(8_000, 384, 1_024, 8, 6, 2),
    "30m": _shape(8_000, 512, 1_408, 8, 8, 8),
    "48m-wide": _shape(8_000, 768, 2_048, 6, 12, 4),
}


DRAWN = 3
MOST_DRAWN_PARAMETERS = 60_000_000


def drawn(seed: int) -> dict[str, ModelConfig]:
    """`DRAWN` shapes by chance, at most `MOST_DRAWN_PARAMETERS` each: scored, nothing can have been chosen on them.

    Args:
        seed: the same one gives the same shapes.

    Returns:
        Shapes by name, of 128 to 768 wide, 2 to 16 layers, heads of 32 or 64, any sharing of keys and values.
    """
    dice, found = random.Random(seed), dict[str, ModelConfig]()
    while len(found) < DRAWN:
        hidden, layers = 64 * dice.randint(2, 12), dice.randint(2, 16)
        heads = hidden // dice.choice((32, 64))
        shared = dice.choice([count for count in range(1, heads + 1) if heads % count == 0])
        inner, vocab = 64 * round(hidden * dice.uniform(2, 4) / 64), dice.choice((2_000, 4_000, 8_000, 16_000))
        config = _shape(vocab, hidden, inner, layers, heads, shared)
        if config.parameters <= MOST_DRAWN_PARAMETERS and config not in (*FITTED.values(), *SCORED.values()):
            found[f"drawn-{seed}-{len(found) + 1}"] = config
    return found


@dataclass(frozen=True)
class Form:
    """How a model is stored: `bits` of its layers, 7 for INT8 rows and 32 for none packed."""

    bits: int
    block_size: int = BLOCK
    cache: str = "fp32"
    latency: bool = False
    standard: bool = False

    def stored(self) -> Stored:
        """For `benchmarks.predict.latency`."""
        precision = {32: "fp32", 8: "int8", 7: "int8", 4: "int4"}[self.bits]
        return Stored(
            precision,
            self.block_size,
            cache=self.cache,
            per_row=self.bits == 7,
            standard=self.standard,
            latency=self.latency,
        )


FORMS: Mapping[str, Form] = {"fp32": Form(32), "int8": Form(8), "int4": Form(4), "int8-rows": Form(7)}
OTHERS: Mapping[str, Form] = {
    "int4-b32": Form(4, 32),
    "int4-kv8": Form(4, cache="int8"),
    "int4-latency": Form(4, latency=True),
    "int4-standard": Form(4, standard=True),
}
# Reading keys and computing scores can be told apart only by shapes that share keys between heads differently.
OTHERS_OF: Mapping[str, Sequence[str]] = {
    "5m": ["int4-kv8"],
    "30m": list(OTHERS),
    "60m": list(OTHERS),
    "small": ["int4-kv8"],
}


def make_checkpoint(config: ModelConfig, directory: Path) -> Path:
    """An untrained checkpoint, without a tokenizer."""
    from sportsllm.models.language_model import SportsLLM
    from sportsllm.storage.checkpoint import save_checkpoint

    model = SportsLLM(config)
    model.initialize(0)
    directory.mkdir(parents=True)
    save_checkpoint(directory, model)
    return directory


def make_export(checkpoint: Path, form: Form, directory: Path) -> Stored:
    """Export a checkpoint in a form; returns how it is stored, with the size of its files."""
    import dataclasses
    import shutil

    import torch

    from compress.quantization.config import QuantizationConfig
    from compress.quantization.layer_by_layer import quantize_without_data
    from compress.quantization.packed_checkpoint import PackedCheckpoint
    from export.cache_scales import CacheScales
    from export.graph.decoder import write_graph
    from export.graph.prefill_graph import write_prompt_graph
    from sportsllm.models.hf_config import load_config
    from sportsllm.storage.checkpoint import write_checkpoint

    config, source = load_config(checkpoint), checkpoint
    directory.mkdir(parents=True)
    if form.bits != 32:
        source = directory / "packed"
        source.mkdir()
        packed = PackedCheckpoint(config, QuantizationConfig(form.bits, form.block_size))
        quantize_without_data(checkpoint, config, packed, search=False)
        write_checkpoint(source, config, packed.tensors, quantization=packed.record("rtn"))
    scales = None
    if form.cache == "int8":
        full = torch.full((config.num_hidden_layers, config.num_key_value_heads, config.head_dim), 0.05)
        scales = CacheScales(full, full)
    stored = write_graph(source, directory, scales=scales, standard=form.standard)
    if form.latency:
        write_prompt_graph(source, directory, stored, scales)
    shutil.copyfile(source / "config.json", directory / "config.json")
    if source != checkpoint:
        shutil.rmtree(source)
    return dataclasses.replace(
        form.stored(), file_bytes=directory_bytes(directory), prompt_bytes=prompt_graph_bytes(directory)
    )
