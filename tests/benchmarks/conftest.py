"""A model that is measured in real processes, whether the machine is quiet or not, and a machine measured briefly."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import sportsllm
from benchmarks.measure.machine import this_machine
from sportsllm.models.language_model import SportsLLM
from tests.support.models import BENCHED, saved


@pytest.fixture(scope="package", autouse=True)
def _at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.measure.process.wait_for_quiet", lambda longest_s, cpus=None: True)
        patch.setattr("benchmarks.measure.machine.WORKING_SET_BYTES", 2**24)
        patch.setattr("benchmarks.measure.machine.MATRIX", 256)
        this_machine.cache_clear()
        yield
    this_machine.cache_clear()


@pytest.fixture(scope="session")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer."""
    model = SportsLLM(BENCHED)
    model.initialize(0)
    return saved(tmp_path_factory.mktemp("benched") / "checkpoint", model)


@pytest.fixture(scope="session")
def export(benched: Path) -> Path:
    """Its export."""
    out = benched.parent / "export"
    sportsllm.export(benched, out=out)
    return out
