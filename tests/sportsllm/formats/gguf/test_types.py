"""Every type of tensor that llama.cpp writes, read as llama.cpp reads it."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.gguf.blocks import BLOCK_TYPES, TABLE, Blocks
from sportsllm.formats.gguf.config import open_gguf
from sportsllm.formats.gguf.convert import convert_gguf
from tests.support import llama_cpp
from tests.support.gguf_files import byte_level, settings_of, tensors_of, write_file, write_model

TYPES = [
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"],
    ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
    ["IQ4_NL", "IQ4_XS", "IQ3_S"],
]


@pytest.fixture(scope="module")
def wide() -> object:
    """A model whose rows are whole super-blocks of 256."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=384, num_hidden_layers=1, max_position_embeddings=128, **sizes)
    config.head_dim = 64
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim == 2 else parameter.normal_(1, 0.2)
    return model


def quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return llama_cpp.quantized(values, kind.name) if values.ndim == 2 else values


@pytest.mark.parametrize("kinds", TYPES)
def test_types_are_read_as_llama_cpp_reads_them(
    kinds: list[str], wide: object, tokenizer_directory: Path, tmp_path: Path
) -> None:
    """Matrices of the model are in these types in turn."""
    llama_cpp.engine()
    facts, tensors = (settings_of(wide.config), byte_level(tokenizer_directory)), tensors_of(wide)
    write_file(tmp_path / "model.gguf", "llama", *facts, tensors, kinds, quantized)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    llama_cpp.assert_same(tmp_path / "model.gguf", load_checkpoint(tmp_path / "out"), 0.03)


@pytest.mark.parametrize("number, said", [(133, "type 133"), (int(gguf.GGMLQuantizationType.Q8_K), "type Q8_K")])
def test_an_unknown_type_is_named(
    number: int, said: str, wide: object, tokenizer_directory: Path, tmp_path: Path
) -> None:
    file = write_model(tmp_path / "model.gguf", wide, byte_level(tokenizer_directory))
    data = bytearray(file.read_bytes())
    name = b"blk.0.ffn_up.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two of them
    data[place : place + 4] = np.uint32(number).tobytes()
    file.write_bytes(data)
    with pytest.raises(
        ArtifactError, match=f"'blk.0.ffn_up.weight' has {said}, which is not supported; supported: F32"
    ):
        open_gguf(file)


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
