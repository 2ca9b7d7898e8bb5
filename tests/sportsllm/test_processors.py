"""Which device a name means, names that mean none, and threads for batches."""

import pytest
import torch

from sportsllm.errors import ResourceError, UsageError
from sportsllm.processors import batch_threads, find_device


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
