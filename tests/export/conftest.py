"""Exports that the tests of this folder share."""

import pytest

from tests.support.export_models import Exports


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Exports of tiny models by their settings, each made once."""
    return Exports(tmp_path_factory.mktemp("exports"))
