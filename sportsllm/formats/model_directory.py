"""Directories of models: by path, by GGUF file, by name in the model hub, and seen with another context.

Names are `org/name` or `org/name@revision`. Only safetensors, JSON and chat templates at the top of a repository are
downloaded, never code or pickles, into the cache of `huggingface_hub`, whose environment variables hold: HF_HOME,
HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sportsllm.console import log
from sportsllm.errors import ArtifactError, ResourceError, SportsLLMError
from sportsllm.files import clip, read_json, write_json
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import MANIFEST, file_sha256, read_manifest
from sportsllm.models.config import ModelConfig

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w.][\w./-]*))?")
_SETTINGS, _WEIGHTS = ["*.json", "*.jinja"], ["*.safetensors"]
_SUBFOLDERS = ["*/*"]  # of other forms of the model


def find_model(text: str | Path) -> Path:
    """The directory of a model. A GGUF file, or a directory with one, is converted to a checkpoint in `cache_folder`.

    An existing path wins over a name in the hub. A name without a revision whose first part is a directory, or `runs`,
    which the commands write to, is a path too, so that a mistyped path asks nobody.

    Raises:
        ArtifactError: the GGUF file is damaged; the hub has no such model, or it has no safetensors or is unsupported.
        ResourceError: the model asks for permission, or the hub cannot be reached.
    """
    path = Path(text)
    if (file := find_gguf(path)) is not None:
        from sportsllm.formats.gguf.weights import convert_gguf

        if not file.is_file():
            raise ArtifactError(f"{file}: not found; give a .gguf file")
        out = cache_folder() / "gguf" / f"{file.stem}-{file_sha256(file)[:12]}"
        convert_gguf(file, out)
        return out
    match = _NAME.fullmatch(str(text))
    if match is None or path.exists():
        return path
    model, revision = match.groups()
    if revision is None and (Path(model).parent.is_dir() or model.startswith("runs/")):
        return path
    load_config(_download(str(text), model, revision, _SETTINGS))  # before the weights, which are large
    folder = _download(str(text), model, revision, _SETTINGS + _WEIGHTS)
    if not any(folder.glob("*.safetensors")):
        raise ArtifactError(
            f"{text}: has no safetensors at the top of its repository (or, offline, in the cache); other formats of "
            "weights are not downloaded"
        )
    log(f"{text}: commit {folder.name[:12]}, {folder}")
    return folder


def find_gguf(path: Path) -> Path | None:
    """A GGUF file itself, or the one in a directory without config.json; None for anything else.

    Raises:
        ArtifactError: the directory has several.
    """
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if len(files) > 1:
        raise ArtifactError(f"{path}: holds {len(files)} GGUF files; give one of them, for example {files[0].name}")
    return files[0] if files else None


def cache_folder() -> Path:
    """SPORTSLLM_CACHE, or `sportsllm-compress` in the user's cache folder."""
    if given := os.environ.get("SPORTSLLM_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sportsllm-compress"


@contextmanager
def checkpoint_with(checkpoint: Path, config: ModelConfig) -> Iterator[Path]:
    """A directory of links to a checkpoint's files, whose config.json has the context and rotary scaling of `config`.

    It is `checkpoint` itself where nothing differs, and gone afterwards where it is not. Errors name `checkpoint`.

    Args:
        config: the checkpoint's, but for `max_position_embeddings` and `rope_scaling`.
    """
    if config == load_config(checkpoint):
        yield checkpoint
        return
    data = read_json(checkpoint / "config.json")
    data.pop("rope_parameters", None)  # transformers 5 keeps theta and scaling there
    scaling = config.rope_scaling
    data |= {
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else scaling.fields_used(),
    }
    if config.rope_local_theta is not None:
        data["rope_local_base_freq"] = config.rope_local_theta
    with tempfile.TemporaryDirectory() as folder:
        view = Path(folder) / checkpoint.resolve().name
        view.mkdir()
        if (checkpoint / MANIFEST).exists():
            manifest = read_manifest(checkpoint)
            files = {name: entry for name, entry in manifest.files.items() if name != "config.json"}
            replace(manifest, files=files).write(view)
        write_json(view / "config.json", data)
        for path in checkpoint.resolve().iterdir():
            if not (view / path.name).exists():
                _link(path, view / path.name)
        try:
            yield view
        except SportsLLMError as error:
            raise type(error)(str(error).replace(str(view), str(checkpoint))) from None


def _link(path: Path, link: Path) -> None:
    """A link, or a copy where links need privileges (Windows)."""
    try:
        link.symlink_to(path, path.is_dir())
    except OSError:
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, link)


def _download(name: str, model: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder in the cache with a model's files of some patterns."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=_SUBFOLDERS))
    except (errors.RevisionNotFoundError, errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        kind = ResourceError if isinstance(error, errors.GatedRepoError) else ArtifactError
        raise kind(f"{name}: no directory here, and the model hub refuses it: {clip(error, 200)}") from None
    except Exception as error:  # HTTP and connection errors have no common class
        if isinstance(error, OSError) and error.errno is not None:  # a full disk, no permission
            raise
        raise ResourceError(
            f"{name}: no directory here, and it cannot be downloaded ({type(error).__name__}: {clip(error, 200)})"
        ) from None
