"""A model that is measured in real processes."""

from pathlib import Path

import pytest

import sportsllm
from sportsllm.models.language_model import SportsLLM
from tests.support.models import BENCHED, saved


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
