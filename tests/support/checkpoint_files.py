"""Changed files of a checkpoint, and the one line in which a model is refused."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.safetensors import WEIGHTS


def edit_json(file: Path, **changes: Any) -> None:
    """Replace or add fields."""
    data = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(data | changes), encoding="utf-8")


def edit_tensors(directory: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Replace or add tensors of `model.safetensors`, or take away those that are None."""
    tensors = {**load_file(directory / WEIGHTS), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / WEIGHTS, metadata={"format": "pt"})


@contextmanager
def one_line(match: str, *kinds: type[Exception]) -> Iterator[None]:
    """The block ends with an error (an ArtifactError if none is named) that says this in one line."""
    with pytest.raises(kinds or ArtifactError, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)


def refused(directory: Path, match: str) -> None:
    """The checkpoint is not loaded, for this reason."""
    with one_line(match):
        load_checkpoint(directory)
