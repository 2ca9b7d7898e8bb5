"""Reads the TOML files of `templates/` and `words/`, and reports a mistake in one line."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from sportsllm.formats.json_files import read_toml, validate


class Model(BaseModel):
    """The keys a file must have; any other key is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True)


M = TypeVar("M", bound=Model)


def read(path: Path, model: type[M]) -> M:
    """The file at `path`, checked.

    Raises:
        ArtifactError: missing, not TOML, or with a key that is missing, unknown or of another type.
    """
    return validate(model, read_toml(path), path)
