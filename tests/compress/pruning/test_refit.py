"""Refit after a cut, against least squares in float64 and on text that it has not read."""

import copy
import gc

import pytest
import torch
from torch import Tensor

from compress.layer_fit import RIDGE, LeastSquares
from compress.pruning.cut import KeptUnits, choose_units, refit_layers, slice_model
from compress.pruning.hidden import rotate
from compress.pruning.scores import measure_scores
from compress.pruning.shapes import Shape
from sportsllm.models.description import NORMS, block_matrices
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.sublayer import Matrix
from tests.support.calibration import inputs_of, random_tokens
from tests.support.models import tiny_model

BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
PARALLEL = BIASES | {"parallel_residual": True, "intermediate_size": 144}  # inputs that are too wide to keep
SAMPLES = random_tokens(6, 60)


def cut(model: SportsLLM, layers: list[int]) -> tuple[SportsLLM, KeptUnits, Tensor]:
    """The model and its residual stream cut in every dimension, and what stays."""
    scores, shape = measure_scores(model, SAMPLES), Shape(48, 64, 2, 1, 2, 16)
    kept = choose_units(model.config, scores, shape.applied_to(model.config), layers)
    return slice_model(rotate(model, scores.directions, 48), kept), kept, scores.directions.into(48)


class Inputs:
    """What every module in a model's layers reads of the samples, a row a token, float64; `end` is after the last."""

    def __init__(self, model: SportsLLM) -> None:
        self.model = model
        names = [name for name, module in model.named_modules() if name.startswith("model.layers.")]
        self.by_name = inputs_of(model, [*names, "model.norm"], SAMPLES)

    def __getitem__(self, name: str) -> Tensor:
        return self.by_name["model.norm" if name == "end" else f"model.layers.{name}"]

    def stream(self, layer: int, sublayer: str) -> Tensor:
        """The residual stream that a sublayer adds to: what its norm reads, unless sublayers are parallel."""
        if sublayer == "self_attn" or not self.model.config.parallel_residual:
            return self[f"{layer}.{NORMS[sublayer]}"]
        output = self.model.model.layers[layer].self_attn.o_proj
        bias = 0.0 if output.bias is None else output.bias.double()
        return self[str(layer)] + self[f"{layer}.self_attn.o_proj"] @ output.weight.double().T + bias


def targets(
    matrix: Matrix, model: SportsLLM, full: Inputs, cut: Inputs, kept: KeptUnits, new: int, into: Tensor
) -> Tensor:
    """What a matrix of kept layer `new` should give, without its bias, from the definition."""
    old = kept.layers[new]
    source = model.model.layers[old].get_submodule(matrix.name)
    rows, _ = kept.of_matrix(matrix, new)
    if not matrix.writes_residual:
        return (full[f"{old}.{matrix.name}"] @ source.weight.double().T)[:, rows]
    if matrix.name.startswith("self_attn"):
        after = full.stream(old, "mlp")
    else:
        after = full[str(kept.layers[new + 1])] if new + 1 < len(kept.layers) else full["end"]
    before = cut.stream(new, matrix.name.split(".")[0])
    return (after - (0.0 if source.bias is None else source.bias.double())) @ into.double() - before


def ridge_solution(inputs: Tensor, wanted: Tensor, start: Tensor, ridge: float) -> Tensor:
    """By lstsq in float64, the ridge as rows of data."""
    pull = (ridge * inputs.square().sum(0).mean()).sqrt()
    inputs = torch.cat([inputs, pull * torch.eye(inputs.shape[1], dtype=torch.float64)])
    return torch.linalg.lstsq(inputs, torch.cat([wanted, pull * start.T])).solution.T


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, BIASES, {"qk_norm": True}, {"mlp_kind": "gelu"}, PARALLEL], ids=str)
def test_every_matrix_is_the_ridge_solution(changes: dict[str, object]) -> None:
    """Every dimension is cut, and layers 0 and 2 are dropped.

    A matrix reads what the fitted matrices before it give, so that the finished model shows each one's inputs.
    """
    model = tiny_model(num_hidden_layers=4, **changes)
    plain, kept, into = cut(model, [1, 3])
    fitted = copy.deepcopy(plain)
    refit_layers(fitted, model, kept, SAMPLES, into=into)
    full, ours = Inputs(model), Inputs(fitted)
    for new in range(2):
        for matrix in block_matrices(model.config):
            found = fitted.model.layers[new].get_parameter(f"{matrix.name}.weight").double()
            start = plain.model.layers[new].get_parameter(f"{matrix.name}.weight").double()
            inputs, wanted = ours[f"{new}.{matrix.name}"], targets(matrix, model, full, ours, kept, new, into)
            expected = ridge_solution(inputs, wanted, start, RIDGE)
            assert (expected - start).norm() > 0.01 * start.norm(), matrix.name  # there is something to fit
            # Products of inputs are float32 (6e-8), and the ridge keeps their condition number in the hundreds; a
            # wrong target, a forgotten bias or another row moves the weights by more than a percent.
            assert (found - expected).norm() < 1e-4 * expected.norm(), matrix.name


def test_reference_counts_free_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """`give_back` after each layer runs no garbage collection: none may be needed."""
    model = tiny_model()
    fitted, kept, into = cut(model, [0, 1])
    gc.collect()
    collections: list[object] = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(None))
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        refit_layers(fitted, model, kept, SAMPLES, into=into)
        monkeypatch.undo()
        gc.collect()
        assert not collections and not any(isinstance(each, Tensor) for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_sums_are_solved_in_bands_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rounding has made them indefinite, so that there is no Cholesky factor."""
    for name in ("layer_fit", "layerwise"):
        monkeypatch.setattr(f"compress.{name}.BAND", 16)
    draw = torch.Generator().manual_seed(0)
    inputs, cross = torch.randn(200, 40, generator=draw).double(), torch.randn(9, 40, generator=draw).double()
    for ridge, negative in ((0.1, 0.0), (0.0, -50.0)):
        gram = inputs.T @ inputs
        gram[20, 20] += negative - gram[20, 20] * (negative < 0)
        sums, given = LeastSquares(gram.clone(), cross), torch.randn(9, 40, generator=draw)
        found = sums.solve(given, ridge).double()
        pull = ridge * gram.diagonal().mean() * torch.eye(40, dtype=torch.float64)
        expected = torch.linalg.solve(gram + pull, (cross + given.double() @ pull).T).T
        assert (found - expected).norm() < 1e-6 * expected.norm()
        torch.testing.assert_close(sums.gram_II, gram, rtol=1e-15, atol=0)
