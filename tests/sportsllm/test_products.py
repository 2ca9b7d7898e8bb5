"""Products of matrices by oneDNN."""

from collections.abc import Iterator

import pytest
import torch

from sportsllm.processors import replace_products


@pytest.fixture(autouse=True)
def replaced() -> Iterator[None]:
    """Replaces the operators on every processor."""
    library = torch.library.Library("aten", "IMPL")
    replace_products(library)
    yield
    library._destroy()


@pytest.mark.parametrize("left", ["whole", "part", "transposed", "expanded", "one row"])
@pytest.mark.parametrize("right", ["whole", "part", "transposed", "one column"])
def test_products_of_any_layout_match_float64(left: str, right: str) -> None:
    a = {
        "whole": torch.randn(96, 256),
        "part": torch.randn(96, 400)[:, 100:356],
        "transposed": torch.randn(256, 96).T,
        "expanded": torch.randn(96, 1).expand(96, 256),
        "one row": torch.randn(1, 256),
    }[left]
    b = {
        "whole": torch.randn(256, 128),
        "part": torch.randn(256, 400)[:, 100:228],
        "transposed": torch.randn(128, 256).T,
        "one column": torch.randn(256, 1),
    }[right]
    bias = torch.randn(b.shape[1])
    expected = a.double() @ b.double()
    torch.testing.assert_close((a @ b).double(), expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(torch.addmm(bias, a, b).double(), expected + bias, rtol=0, atol=2e-4)
    halved = torch.addmm(bias, a, b, beta=2, alpha=0.5).double()
    torch.testing.assert_close(halved, expected / 2 + 2 * bias, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "bias", [torch.randn(256)[::2], torch.randn(1).expand(128), torch.randn(1), torch.randn(96, 1)]
)
def test_a_bias_of_any_layout_is_added(bias: torch.Tensor) -> None:
    a, b = torch.randn(96, 256), torch.randn(256, 128)
    torch.testing.assert_close(torch.addmm(bias, a, b).double(), a.double() @ b.double() + bias, rtol=0, atol=2e-4)


def test_gradients_match_float64() -> None:
    layer, inputs = torch.nn.Linear(256, 320), torch.randn(3, 40, 256, requires_grad=True)
    layer(inputs).square().sum().backward()
    expected, exact_inputs = torch.nn.Linear(256, 320).double(), inputs.detach().double().requires_grad_()
    expected.load_state_dict(layer.state_dict())
    expected(exact_inputs).square().sum().backward()
    for found, exact in ((inputs, exact_inputs), (layer.weight, expected.weight)):
        assert found.grad is not None and exact.grad is not None
        torch.testing.assert_close(found.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_matrices_that_do_not_fit_are_refused_as_before() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.randn(96, 256) @ torch.randn(128, 256)


def test_other_types_keep_their_products() -> None:
    a, b = torch.randn(96, 256, dtype=torch.float64), torch.randn(256, 128, dtype=torch.float64)
    assert torch.equal(a @ b, torch.einsum("mk,kn->mn", a, b))
    assert (a.bfloat16() @ b.bfloat16()).dtype is torch.bfloat16
