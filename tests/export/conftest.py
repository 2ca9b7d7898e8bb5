"""Exports and the kernels' library, which the tests of this folder share."""

from pathlib import Path

import pytest

from export.kernels.build import NAME, BuildError, build
from export.kernels.library import HERE
from tests.support.export_models import Exports


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Exports of tiny models by their settings, each made once."""
    return Exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library in the source folder if it is newer than every source, else one built here."""
    sources = [path.stat().st_mtime for path in HERE.iterdir() if path.suffix in (".cpp", ".h")]
    if (HERE / NAME).exists() and (HERE / NAME).stat().st_mtime > max(sources):
        return HERE / NAME
    try:
        return build(tmp_path_factory.mktemp("kernels"))
    except BuildError as error:
        pytest.skip(str(error))
