"""The student that tests of distillation share."""

from pathlib import Path

import pytest

from tests.support.models import saved, tiny_model


@pytest.fixture
def student(tokenizer_directory: Path, tmp_path: Path) -> Path:
    """One layer."""
    return saved(tmp_path / "student", tiny_model(seed=5, num_hidden_layers=1), tokenizer_directory)
