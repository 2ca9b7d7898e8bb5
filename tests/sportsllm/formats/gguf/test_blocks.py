"""Bytes of llama.cpp's blocks against the package `gguf`, which reads them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from sportsllm.formats.gguf.blocks import BLOCK_TYPES, TABLE, Blocks


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_number_of_a_block_comes_back(name: str) -> None:
    kind, draw, rows = BLOCK_TYPES[name], np.random.default_rng(0), 3
    stored = gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[stored][0] == kind.width
    columns = 512
    groups = columns // kind.size
    levels = np.array(TABLE) if kind.table else np.arange(kind.levels[0], kind.levels[1] + 1)
    units = (rows, groups // kind.blocks)
    blocks = Blocks(
        kind,
        draw.choice(levels, (rows, columns)),
        (draw.integers(-63, 64, units) / 1024).astype(np.float32),
        draw.integers(kind.scales[0], kind.scales[1] + 1, (rows, groups)),
        kind.least * (draw.integers(-63, 64, units) / 1024).astype(np.float32),
        draw.integers(0, 64, (rows, groups)) if kind.blocks > 1 else np.ones((rows, groups), np.int64),
    )
    scale, least = (
        (unit.repeat(kind.blocks, axis=1) * whole).repeat(kind.size, axis=1)
        for unit, whole in ((blocks.d_NB, blocks.scales_NG), (blocks.dmin_NB, blocks.least_NG))
    )
    assert np.array_equal(gguf.dequantize(blocks.pack(), stored), scale * blocks.levels_NK - least)
