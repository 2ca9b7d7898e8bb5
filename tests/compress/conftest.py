"""A smaller checkpoint, for tests of compression that do not depend on its shape."""

from pathlib import Path

import pytest

from tests.support.calibration import NARROW
from tests.support.models import saved, tiny_model


@pytest.fixture(scope="session")
def narrow(tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read, never changed."""
    return saved(tmp_path_factory.mktemp("narrow"), tiny_model(**NARROW), tokenizer_directory)
