"""Checkpoints by name: `org/name` or `org/name@revision` of the model hub that `huggingface_hub` downloads from.

Only safetensors, JSON and chat templates at the top of a repository are downloaded, never code or pickles, into that
library's cache. Its environment variables hold: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sportsllm.console import log
from sportsllm.errors import ArtifactError, ResourceError, SportsLLMError
from sportsllm.formats.huggingface.config import load_config

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w.][\w./-]*))?")
_SETTINGS, _WEIGHTS = ["*.json", "*.jinja"], ["*.safetensors"]
_BELOW = ["*/*"]  # other forms of the model lie in folders
_SNAPSHOTS, _PREFIX = "snapshots", "models--"  # of the cache: models--ORG--NAME/snapshots/COMMIT


def find_model(name: str) -> str:
    """The directory of a checkpoint that is given by its path or by its name in the hub, downloaded if need be.

    What exists here wins. A name without a revision whose first part is a directory here, or `runs`, where this program
    writes, is a path too, so that a mistyped path asks nobody.

    Args:
        name: as it was given; whatever is no model's name is returned as it is.

    Raises:
        ArtifactError: the hub has no such model or revision, or it has no safetensors or is of an unsupported kind.
        ResourceError: it asks for permission, or it cannot be reached and the cache has no such model.
    """
    match = _NAME.fullmatch(name)
    if match is None or Path(name).exists():
        return name
    model, revision = match.groups()
    if revision is None and (Path(model).parent.is_dir() or model.startswith("runs/")):
        return name
    folder = _download(name, model, revision, _SETTINGS)
    load_config(folder)  # before the weights, which are large
    folder = _download(name, model, revision, _SETTINGS + _WEIGHTS)
    if not any(folder.glob("*.safetensors")):
        raise ArtifactError(
            f"{name}: has no safetensors at the top of its repository (or, offline, in the cache); other formats of "
            "weights are not downloaded"
        )
    log(f"{name}: commit {folder.name[:12]}, {folder}")
    return str(folder)


def origin(path: Path) -> dict[str, str] | None:
    """`model` and `revision`, its commit, of a directory in the hub's cache; None for any other."""
    repository = path.parent.parent.name
    if path.parent.name != _SNAPSHOTS or not repository.startswith(_PREFIX):
        return None
    return {"model": repository.removeprefix(_PREFIX).replace("--", "/"), "revision": path.name}


def plain_name(path: Path) -> str:
    """What to call a checkpoint: the model's own name, or the directory's."""
    found = origin(path)
    return path.name if found is None else found["model"].partition("/")[2]


def _download(name: str, model: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder in the cache with a model's files of some patterns."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=_BELOW
        )
    except Exception as error:  # HTTP, connection and validation errors have no common class
        raise _explained(name, model, revision, error) from None
    return Path(folder)


def _explained(name: str, model: str, revision: str | None, error: Exception) -> SportsLLMError:
    """The library's error as one of this program's."""
    from huggingface_hub import errors

    known: list[tuple[type[Exception], Callable[[str], SportsLLMError], str]] = [
        (
            errors.GatedRepoError,
            ResourceError,
            "asks for its terms to be accepted on its page; then log in with HF_TOKEN",
        ),
        (
            errors.RevisionNotFoundError,
            ArtifactError,
            f"has no revision {revision!r}; give a branch, a tag or a commit",
        ),
        (
            errors.RepositoryNotFoundError,
            ArtifactError,
            f"neither a directory here nor a model of the hub, or a private one (HF_TOKEN); check {model!r}",
        ),
        (errors.HFValidationError, ArtifactError, "is neither a directory here nor a name that a model can have"),
        (
            errors.LocalEntryNotFoundError,
            ResourceError,
            "no directory here, not in the cache, and the hub cannot be reached (no network, or HF_HUB_OFFLINE is set)",
        ),
        (errors.OfflineModeIsEnabled, ResourceError, "is not in the cache, and HF_HUB_OFFLINE is set"),
        (ConnectionError, ResourceError, "the hub cannot be reached; check the network, or HF_ENDPOINT"),
    ]
    for kind, make, words in known:
        if isinstance(error, kind):
            return make(f"{name}: {words}")
    if isinstance(error, OSError) and error.errno is not None:
        raise error  # a full disk, no permission
    reason: Any = " ".join(str(error).split())[:200]
    return ResourceError(f"{name}: cannot be downloaded ({type(error).__name__}: {reason})")
