"""Which device a name means, names that mean none, threads for batches, and products of matrices by oneDNN."""

from collections.abc import Iterator

import pytest
import torch

from sportsllm.errors import ResourceError, UsageError
from sportsllm.processors import batch_threads, find_device, replace_products


@pytest.mark.parametrize(
    ("gpus", "name", "found"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cpu", "cpu"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
        (0, "cuda", "finds no CUDA GPU; use cpu"),
        (0, "cuda:0", "finds no CUDA GPU; use cpu"),
        (2, "cuda:2", "CUDA GPUs here are 0 to 1"),
        (2, "cuda:", "use auto, cpu, cuda or cuda:N"),
        (2, "cpu:0", "use auto, cpu, cuda or cuda:N"),
        (2, "tpu", "use auto, cpu, cuda or cuda:N"),
    ],
)
def test_devices(gpus: int, name: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if " " not in found:
        assert find_device(name) == torch.device(found)
        return
    with pytest.raises(UsageError, match=f"--device {name}: .*{found}"):
        find_device(name)


def test_a_process_of_several_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    assert find_device("auto") == torch.device("cuda:3")
    with pytest.raises(UsageError, match="each process has a GPU of its own"):
        find_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ResourceError, match="there is no GPU 3; CUDA GPUs here are 0 to 1"):
        find_device("auto")


def test_each_thread_gets_its_share_and_the_caller_keeps_all() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    with batch_threads(2) as pool:
        assert pool is not None
        assert list(pool.map(lambda _: torch.get_num_threads(), range(6))) == [2] * 6
        assert torch.get_num_threads() == 4
    with batch_threads(1) as none:
        assert none is None
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


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


def test_other_types_keep_their_products_and_matrices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.randn(96, 256) @ torch.randn(128, 256)
    a, b = torch.randn(96, 256, dtype=torch.float64), torch.randn(256, 128, dtype=torch.float64)
    assert torch.equal(a @ b, torch.einsum("mk,kn->mn", a, b))
    assert (a.bfloat16() @ b.bfloat16()).dtype is torch.bfloat16
