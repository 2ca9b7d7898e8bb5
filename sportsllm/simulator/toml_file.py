"""Reads the TOML files of `templates/` and `words/`, and reports a mistake in one line."""

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sportsllm.errors import ArtifactError


class Model(BaseModel):
    """The keys a file must have; any other key is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True)


M = TypeVar("M", bound=Model)


def read(path: Path, model: type[M]) -> M:
    """The file at `path`, checked.

    Raises:
        ArtifactError: missing, not TOML, or with a key that is missing, unknown or of another type.
    """
    try:
        return model.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror}); install the package again") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not valid TOML ({error}); correct it") from None
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ArtifactError(f"{path}: {'; '.join(problems)}; correct it") from None
