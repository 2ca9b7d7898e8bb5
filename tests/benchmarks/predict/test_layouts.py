"""Ways to divide a model over many GPUs, against what torch gives one of 64 processes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from sportsllm import processes
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import PLANNED
from sportsllm.models.training_memory import TrainingStep, training_memory
from sportsllm.training.sharding import place
from tests.support.models import tiny_config
from tests.support.plans import plan

GPUS = 64
CONFIG = PLANNED["8b"].with_changes(num_hidden_layers=1, max_position_embeddings=64)


@pytest.fixture
def first_of_64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the first of 64, of which the others are not there."""
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", str(GPUS)), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "_copies", 1)
    monkeypatch.setattr(processes, "_stages", 1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_one_of_64_processes_holds_the_bytes_that_are_predicted(first_of_64: None, tensor_parallel: int) -> None:
    """Exactly, since 64 divides the rows of every matrix of this shape; more than a 64th with tensor parallelism."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = SportsLLM(CONFIG)
    place(model, torch.device("cpu"), shard=True, tensor_parallel=tensor_parallel)
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())  # type: ignore[attr-defined]
    step = TrainingStep(1, 64, "fp32", processor="gpu", shards=GPUS, tensor_parallel=tensor_parallel)
    predicted = training_memory(CONFIG, step)
    assert held == predicted.weights == predicted.gradients == predicted.optimizer_states // 2
    assert (held == 4 * CONFIG.parameters // GPUS) == (tensor_parallel == 1)


def test_the_largest_of_64_stages_holds_the_bytes_that_are_predicted(first_of_64: None) -> None:
    """The first has two of 66 layers and the embedding; the prediction also has the last stage's norm."""
    config = tiny_config(num_hidden_layers=66, tie_word_embeddings=False)
    place(model := SportsLLM(config), torch.device("cpu"), shard=False, pipeline=GPUS)
    held = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    predicted = training_memory(config, TrainingStep(1, 64, "fp32", processor="gpu", stages=GPUS))
    assert predicted.weights - held == 4 * config.hidden_size
    assert predicted.gradients == predicted.optimizer_states // 2 == predicted.weights


def _layouts(shape: str, **changes: Any) -> dict[str, dict[str, Any]]:
    settings = {"training": True, "device": "h100", "gpus": GPUS, "batch": 1, "length": 4_096, **changes}
    found = plan(shape=shape, **settings)["training"]["layouts"]
    return {each["flags"].replace("--set ", ""): each for each in found}


def test_the_layouts_of_64_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = _layouts("70b", tokens=20 * 10**9, price_per_hour=2.5)
    divided = ["shard=true", *(f"shard=true tensor_parallel={among}" for among in (2, 4, 8)), "pipeline=64"]
    assert list(found) == [*divided, *(f"{flags} checkpoint_activations=true" for flags in divided)]
    assert [name for name, each in found.items() if each["fits"]] == list(found)[5:]
    plain, tensor, stages = found["shard=true"], found["shard=true tensor_parallel=8"], found["pipeline=64"]
    assert tensor["total_bytes"] < plain["total_bytes"] and tensor["price"] == plain["price"]
    assert tensor["activations_bytes"] < plain["activations_bytes"] < stages["activations_bytes"]
    # 64 batches take the time of 64 + 63; all GPUs are paid for.
    assert stages["hours"] == pytest.approx(plain["hours"] * 127 / 64)
    assert stages["price"] == pytest.approx(2.5 * 64 * stages["hours"])
    assert "shard tensor_parallel=8 checkpointed" in (printed := capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= 120


def test_layouts_that_train_refuses_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("pipeline" in flags for flags in _layouts("8b"))  # 32 layers
    headers = "layout weights gradients states gathered activations total fits batch tokens/s"
    assert headers.split() in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert list(_layouts("70b", optimizer="muon"))[:2] == ["shard=true", "pipeline=64"]
    assert list(_layouts("small", length=512, gpus=2, optimizer="muon"))[:2] == ["shard=true", "pipeline=2"]
    half = _layouts("base-162m", length=512, gpus=2, precision="fp16")
    assert list(half) == ["shard=true", "shard=true checkpoint_activations=true"]
    assert not any("tensor" in flags for flags in _layouts("8b", gpus=3))
    assert "layouts" not in plan(shape="8b", training=True, device="h100")["training"]
