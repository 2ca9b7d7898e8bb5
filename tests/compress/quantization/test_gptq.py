"""Grids, GPTQ and its refinements against float64 loops that follow the definitions."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from compress.layerwise import solved
from compress.quantization.gptq import (
    coordinate_descent,
    damped_gram,
    fit_scales,
    gptq,
    gptq_weight,
    inverse_factor,
    row_errors,
)
from compress.quantization.grid import Grid, fit_grid, full_range, searched_range, split_blocks, stored_scales

GRIDS = [(bits, block, symmetric) for bits in (4, 8) for block in (16, 32, 256) for symmetric in (True, False)]


def problem(rows: int = 12, columns: int = 72, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and the second moment of correlated inputs of very different strength."""
    draw = torch.Generator().manual_seed(seed)
    mixing = torch.eye(columns) + 0.5 * torch.randn(columns, columns, generator=draw) / columns**0.5
    strength = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=draw)]
    inputs = torch.randn(4 * columns, columns, generator=draw) * strength @ mixing
    return torch.randn(rows, columns, generator=draw), damped_gram(inputs.T @ inputs)


def block_error(blocks: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Squared error of each block, one number at a time in float64."""
    errors = torch.zeros(scales.shape, dtype=torch.float64)
    for row, group in np.ndindex(*scales.shape):
        scale, zero = float(scales[row, group]), float(zeros[row, group])
        for value in blocks[row, group].tolist():
            level = min(2**bits - 1, max(0, round(value / scale) + zero)) if scale else zero
            errors[row, group] += (value - (level - zero) * scale) ** 2
    return errors


@pytest.mark.parametrize(("bits", "block", "symmetric"), GRIDS)
def test_a_searched_grid_is_never_worse(bits: int, block: int, symmetric: bool) -> None:
    weight, _ = problem()
    weight[3, :block] = 0
    blocks = split_blocks(weight, block)
    plain = block_error(blocks, *full_range(blocks, bits, symmetric), bits)
    found = searched_range(blocks, bits, symmetric)
    searched = block_error(blocks, *found, bits)
    # Which of two nearly equal grids is better may differ in float32: by rounding, never by more.
    assert (searched <= plain * (1 + 1e-4) + 1e-9).all()
    assert searched.sum() < (0.98 if bits == 4 else 1.0) * plain.sum()
    if symmetric:
        assert (found[1] == 2 ** (bits - 1)).all()
        mirrored = block_error(-blocks, *searched_range(-blocks, bits, symmetric), bits)
        torch.testing.assert_close(mirrored, searched, rtol=1e-4, atol=1e-9)  # the longer side may be either


def test_the_weights_of_a_q8_0_file_stay() -> None:
    """Blocks of GGUF's Q8_0, as its own package writes them, are on an 8-bit grid already. No scale becomes 0."""
    assert stored_scales(torch.tensor([1e-9, -1e-9, 0.0])).tolist() == [2**-24, -(2**-24), 0.0]
    weight = np.random.default_rng(0).standard_normal((64, 96), dtype=np.float32)
    stored = torch.from_numpy(dequantize(quantize(weight, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0))
    grid = fit_grid(stored, 8, 32, True, search=True)
    assert torch.equal(grid.values(grid.round(stored)), stored)


def test_a_searched_grid_minds_what_counts() -> None:
    """One column of a block counts for everything: the grid that serves it represents it exactly, or nearly so."""
    weight, weights = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)), torch.full((1, 32), 1e-6)
    weights[0, 5] = 1.0
    blocks = split_blocks(weight, 32)
    errors = []
    for counted in (None, weights):
        scales, zeros = searched_range(blocks, 4, True, counted)
        grid = Grid(scales, zeros, 4, 32, True)
        errors.append(float((grid.values(grid.round(weight)) - weight)[:, 5].square().mean()))
    assert errors[1] < 0.05 * errors[0]


def surgeon(
    weight: np.ndarray, gram: np.ndarray, order: list[int], grid_of: Callable[[np.ndarray, int], tuple[np.ndarray, ...]]
) -> np.ndarray:
    """GPTQ as defined: round a column, then set the columns left to where the error is least, solved from scratch."""
    current, quants, left = weight.astype(np.float64), np.zeros_like(weight), list(order)
    for column in order:
        scale, zero, bits = grid_of(current, column)
        safe = np.where(scale == 0, 1, scale)
        quants[:, column] = np.clip(np.rint(current[:, column] / safe) + zero, 0, 2**bits - 1)
        error = (quants[:, column] - zero) * scale - current[:, column]
        left.remove(column)
        if left:
            # argmin over the moves d of the columns left: (e, d) H (e, d)^T, e being this column's error
            move = -np.linalg.solve(gram[np.ix_(left, left)], np.outer(gram[left, column], error))
            current[:, left] += move.T
        current[:, column] += error
    return quants


@pytest.mark.parametrize(
    ("bits", "block", "symmetric", "columns"),
    # 200 columns cross a panel, 256 numbers share a scale across it
    [(4, 16, True, 72), (4, 32, False, 72), (8, 32, True, 72), (4, 256, True, 200)],
)
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_is_the_surgeon_column_by_column(
    bits: int, block: int, symmetric: bool, columns: int, act_order: bool
) -> None:
    weight, gram = problem(columns=columns)
    diagonal = gram.diagonal()
    fixed = fit_grid(weight, bits, block, symmetric, search=True, weights_K=diagonal)
    order = torch.argsort(diagonal, descending=True, stable=True).tolist() if act_order else list(range(columns))
    reached: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def grid_of(current: np.ndarray, column: int) -> tuple[np.ndarray, ...]:
        group = column // block
        if act_order:
            return fixed.scales_NG[:, group].double().numpy(), fixed.zeros_NG[:, group].double().numpy(), bits
        if group not in reached:
            part = slice(group * block, (group + 1) * block)
            now = split_blocks(torch.from_numpy(current[:, part]).float(), block)
            weights = split_blocks(diagonal[None, part], block)[0]
            scales, zeros = searched_range(now, bits, symmetric, weights)
            reached[group] = scales[:, 0].double().numpy(), zeros[:, 0].double().numpy()
        return (*reached[group], bits)

    expected = surgeon(weight.numpy(), gram.double().numpy(), order, grid_of)
    grid, quants = gptq(weight, gram, fixed, act_order=act_order)
    # Near the middle between two numbers float32 may choose the other one, and all later columns of that row follow.
    rows_alike = (quants.numpy() == expected).all(axis=1).mean()
    assert rows_alike >= (0.75 if bits == 4 else 0.4)
    scales, zeros = fixed.scales_NG.clone(), fixed.zeros_NG.clone()
    for group, (scale, zero) in reached.items():
        scales[:, group], zeros[:, group] = torch.from_numpy(scale).float(), torch.from_numpy(zero).float()
    its_grid = dataclasses.replace(fixed, scales_NG=scales, zeros_NG=zeros)
    mine, theirs = (
        float(row_errors(weight - its.values(numbers), gram).sum())
        for its, numbers in ((grid, quants), (its_grid, torch.from_numpy(expected)))
    )
    assert mine == pytest.approx(theirs, rel=0.02)


def test_no_single_number_is_better_elsewhere() -> None:
    weight, gram = problem(rows=4, columns=40)
    grid = fit_grid(weight, 4, 16, True, search=False)
    start = grid.round(weight)
    quants = start
    for _ in range(50):
        quants = coordinate_descent(weight, gram, grid, quants)
    assert row_errors(weight - grid.values(quants), gram).sum() < row_errors(weight - grid.values(start), gram).sum()
    exact = gram.double()

    def row_error(row: int, numbers: torch.Tensor) -> float:
        difference = (weight[row] - grid.values(numbers)[row]).double()
        return float(difference @ exact @ difference)

    for row, column in np.ndindex(4, 40):
        best = row_error(row, quants)
        for level in range(16):
            moved = quants.clone()
            moved[row, column] = level
            assert row_error(row, moved) > best * (1 - 1e-4)


@pytest.mark.parametrize("columns", [64, 72])
def test_scales_are_the_least_squares_solution(columns: int) -> None:
    weight, gram = problem(rows=6, columns=columns)
    grid = fit_grid(weight, 4, 16, False, search=False)
    quants = grid.round(weight)
    quants[2, 16:32] = grid.zeros_NG[2, 1]  # a block of zeros keeps its scale
    found = fit_scales(weight, gram, grid, quants)
    assert torch.equal(found.scales_NG.half().float(), found.scales_NG)
    root = torch.linalg.cholesky(gram.double()).T
    for row in range(6):
        levels = (quants[row] - grid.zeros_NG[row].repeat_interleave(16)[:columns]).double()
        design = torch.zeros(columns, grid.scales_NG.shape[1], dtype=torch.float64)
        design[torch.arange(columns), torch.arange(columns) // 16] = levels
        used = design.abs().sum(dim=0) > 0
        solution = torch.linalg.lstsq(root @ design[:, used], (root @ weight[row].double())[:, None]).solution[:, 0]
        assert torch.allclose(found.scales_NG[row, used].double(), solution, rtol=1e-3)
        assert torch.equal(found.scales_NG[row, ~used], grid.scales_NG[row, ~used])


def test_many_unknowns_of_several_rows_are_solved_on_two_threads() -> None:
    """200 blocks a row, of which PyTorch 2.13's batched LU makes garbage."""
    left = torch.randn(3, 200, 200, generator=torch.Generator().manual_seed(0)).double()
    left, right = left @ left.mT + 200 * torch.eye(200), torch.ones(3, 200, 1).double()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (left @ solved(left, right) - right).abs().max() < 1e-9
    finally:
        torch.set_num_threads(before)


def test_inputs_that_are_always_zero() -> None:
    weight, _ = problem(columns=32)
    inputs = torch.randn(200, 32, generator=torch.Generator().manual_seed(2))
    inputs[:, 7] = 0
    packed = gptq_weight(weight, damped_gram(inputs.T @ inputs), 4, 16, True)
    assert np.abs(packed.dequantize() - weight.numpy())[:, 7].max() < 0.3  # half a step, and the fit of its scale
    nothing = gptq_weight(weight, damped_gram(torch.zeros(32, 32)), 4, 16, True)
    assert np.abs(nothing.dequantize() - weight.numpy()).max() < 0.3


@pytest.mark.parametrize(("exact", "error"), [(8_192, 1e-7), (0, 1e-5)])  # float64, and float32 of wide matrices
def test_the_factor_is_that_of_the_inverse(exact: int, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 72 inputs in another order, inverted in bands of 16."""
    monkeypatch.setattr("compress.quantization.gptq._EXACT", exact)
    monkeypatch.setattr("compress.quantization.gptq._BAND", 16)
    gram, order = problem()[1], torch.randperm(72, generator=torch.Generator().manual_seed(5))
    wanted = torch.linalg.cholesky(torch.linalg.inv(gram.double()[order][:, order]), upper=True)
    assert (inverse_factor(gram, order).double() - wanted).norm() < error * wanted.norm()


def test_a_singular_second_moment_is_damped_until_it_is_not() -> None:
    inputs = torch.randn(3, 32, generator=torch.Generator().manual_seed(4))
    gram = inputs.T @ inputs
    factor = inverse_factor(gram).double()
    assert factor.isfinite().all()
    # With U^T U = (H + D)^-1 and D a positive diagonal: what is left of H's inverse is smaller than H's everywhere.
    damped = torch.linalg.inv(factor.T @ factor)
    more = damped - gram.double()
    assert (more.diagonal() > 0).all()
    assert (more - torch.diag(more.diagonal())).abs().max() < 1e-2 * more.diagonal().min()


def test_each_row_takes_the_better_order() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(40, 96, generator=draw), torch.randn(200, 96, generator=draw)
    gram = damped_gram(inputs.T @ inputs)
    fitted = fit_grid(weight, 4, 32, True, search=True, weights_K=gram.diagonal())
    tried = [gptq(weight, gram, fitted, act_order=order) for order in (False, True)]

    def exact(stored: torch.Tensor) -> torch.Tensor:
        left = (weight - stored).double()
        return torch.einsum("nk,kj,nj->n", left, gram.double(), left)

    errors = torch.stack([exact(grid.values(quants)) for grid, quants in tried])
    assert 5 < (errors[0] < errors[1]).sum() < 35, "the case is one where rows differ"
    packed = gptq_weight(weight, gram, 4, 32, True)
    # Refinement never adds to a row's error; 1e-4 for its float32 sums.
    assert (exact(torch.from_numpy(packed.dequantize())) <= errors.amin(0) * (1 + 1e-4)).all()
    plain = gptq_weight(weight, gram, 4, 32, True, refine=False)
    grid, quants = tried[1]
    assert np.isclose(plain.dequantize(), grid.values(quants).numpy()).mean() > 0.99  # ties aside
