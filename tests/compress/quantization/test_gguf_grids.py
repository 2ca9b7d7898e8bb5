"""Rounding to llama.cpp's blocks, against llama.cpp's own quantizers on the same weights."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from compress.quantization.block_checkpoint import BlockCheckpoint
from compress.quantization.gguf_grids import gptq_blocks, plain, plain_grid, refit
from sportsllm.errors import ArtifactError
from sportsllm.formats.gguf.blocks import BLOCK_TYPES, TABLE, Blocks
from tests.compress.quantization.test_gptq import problem
from tests.support import llama_cpp
from tests.support.models import tiny_config
from tests.support.training import allocated_peak


def missed(weight: Tensor, stored: np.ndarray, name: str) -> Tensor:
    return weight - torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_no_type_loses_more_than_by_llama_cpps_quantizer(name: str) -> None:
    weight, gram = problem(32, 512 if BLOCK_TYPES[name].blocks > 1 else 256, seed=1)  # two super-blocks a row
    importance, kind = gram.diagonal(), BLOCK_TYPES[name]
    packed = [llama_cpp.quantized(weight.numpy(), name, each) for each in (None, importance.numpy())]
    grids = [plain_grid(weight, kind, each) for each in (None, importance)]
    theirs = [missed(weight, each, name) for each in packed]
    ours = [missed(weight, grid.blocks(grid.round(weight)).pack(), name) for grid in grids]
    assert ours[0].square().sum() < theirs[0].square().sum()
    assert (ours[1].square() * importance).sum() < (theirs[1].square() * importance).sum()
    # Squared error of outputs: with feedback less than half of that with importances alone.
    fed_back = missed(weight, gptq_blocks(weight, gram, kind).pack(), name)
    errors = [float(((difference @ gram) * difference).sum()) for difference in (fed_back, ours[1], theirs[1])]
    assert errors[0] < 0.5 * errors[1] and errors[1] < errors[2]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "IQ4_XS", "Q4_K", "Q6_K"])
def test_blocks_of_one_value_and_of_none_come_back(name: str) -> None:
    weight = torch.zeros(3, 512)
    weight[1] = -0.75
    weight[2, 32:64] = 3.0
    assert missed(weight, plain(weight, BLOCK_TYPES[name]).pack(), name).abs().max() < 0.02
    gram = torch.eye(512)
    assert missed(weight, gptq_blocks(weight, gram, BLOCK_TYPES[name]).pack(), name).abs().max() < 0.02


def test_scales_and_least_values_are_the_least_squares_solution() -> None:
    weight, gram = problem(2, 96)
    kind = BLOCK_TYPES["Q4_1"]
    grid = plain_grid(weight, kind)
    levels = grid.round(weight)
    found, root = refit(weight, gram, grid, levels), torch.linalg.cholesky(gram.double()).T
    for row in range(2):
        blocks = torch.block_diag(*levels[row].double().view(3, 32, 1))
        design = torch.cat([blocks, -torch.block_diag(*torch.ones(3, 32, 1).double())], dim=1)
        wanted = torch.linalg.lstsq(root @ design, root @ weight[row].double()[:, None]).solution[:, 0].float()
        # Stored as float16.
        assert torch.allclose(torch.cat([found.scales_NG[row], found.least_NG[row]]), wanted, rtol=1e-3)


def test_equations_of_few_rows_are_in_memory_together() -> None:
    """Those of all 2,048 rows would be more than nine times the matrix, and more of wider ones."""
    weight, gram = problem(2_048, 256)
    grid = plain_grid(weight, BLOCK_TYPES["Q4_1"])
    levels = grid.round(weight)
    assert allocated_peak(lambda: refit(weight, gram, grid, levels)) < 4 * weight.nbytes


def test_q8_0_is_never_minus_128_and_has_no_negative_scale() -> None:
    weight, gram = problem(64, 64)
    for blocks in (plain(weight, BLOCK_TYPES["Q8_0"]), gptq_blocks(weight, gram, BLOCK_TYPES["Q8_0"])):
        assert isinstance(blocks, Blocks)
        assert blocks.levels_NK.min() >= -127 and blocks.levels_NK.max() == 127 and blocks.d_NB.min() > 0


def test_levels_of_the_table_are_the_nearest() -> None:
    weight = torch.cat([torch.arange(-560, 560) / 4, torch.tensor([1e30, -1e30])])[None]
    grid = plain_grid(weight[:, :32], BLOCK_TYPES["IQ4_NL"])
    missed = (weight.double() - grid.nearest(weight, torch.ones(1, 1), torch.zeros(1, 1)).double()).abs()
    assert torch.equal(missed[0], (weight.double().T - torch.tensor(TABLE)).abs().amin(dim=1))


@pytest.mark.parametrize("name", ["Q4_K", "IQ4_NL"])
def test_weights_beyond_float16_are_refused(name: str) -> None:
    packed = BlockCheckpoint(tiny_config(), {"lm_head": name})
    with pytest.raises(ArtifactError, match="lm_head: weights overflow float16 scales"):
        packed.add_matrix("lm_head", torch.full((1, 256), 1e9))


def test_a_table_is_packed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers take 8 bytes each before they are packed."""
    monkeypatch.setattr("compress.quantization.block_checkpoint.ROWS", 64)
    packed, (weight, _) = BlockCheckpoint(tiny_config(), {"lm_head": "Q4_0"}), problem(2_048, 256)
    assert allocated_peak(lambda: packed.add_matrix("lm_head", weight)) < weight.nbytes
