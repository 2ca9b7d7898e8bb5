"""Directories that are whole or not there: `.partial` first, a manifest last, then one rename.

A stage reads finished directories and writes a new one. Its manifest says what made it and lists the size and SHA-256
of every file, so that a later stage, or `verify`, can tell a damaged copy from a good one. Imports no torch.
"""

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from sportsllm import __version__, processes
from sportsllm.console import log
from sportsllm.errors import ArtifactError, ConflictError, UsageError
from sportsllm.files import STATE_DIRECTORY, JsonObject, as_object, clip, has_state, naming, read_json
from sportsllm.formats.manifest import (
    CARD,
    MANIFEST,
    FileEntry,
    Manifest,
    Parent,
    check_whole,
    digest,
    directory_bytes,
    file_sha256,
    origin,
    read_manifest,
)
from sportsllm.formats.model_card import render_card

STATE_FILE, LAUNCHES = "state.json", "launches"  # a file of the state, and its key for `processes.launches`
AGAIN = "choose another --out or remove it"
_SHOWN_DIFFERENCES = 3
_PACKAGES = ("numpy", "torch", "onnx", "onnx-ir", "onnxruntime", "tokenizers", "safetensors", "bitsandbytes")


@dataclass
class Stage:
    """One run of a command that writes a directory.

    `settings` decide the outcome: no `out`, and no settings that only change speed.
    `inputs` are files and directories read; their digests go into the manifest.
    """

    command: str
    settings: Mapping[str, object]
    inputs: Sequence[Path] = ()
    seed: int | None = None
    results: JsonObject = field(default_factory=dict)

    @cached_property
    def input_digests(self) -> list[str]:
        """Digests of the inputs, taken before the work."""
        return [digest(path) for path in self.inputs]

    def fingerprint(self) -> str:
        """Equal for two runs that must give the same directory."""
        verb = self.command.rpartition(" ")[2]  # without its group, such as `data`
        parts = [verb, self.settings, self.seed, self.input_digests]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def identity(self) -> JsonObject:
        """For a saved state: the fingerprint, and what to name if another run's differs."""
        settings = {"command": self.command, **self.settings, "seed": self.seed}
        return {"identity": self.fingerprint(), "settings": _as_json(settings)}


def finished_manifest(out: Path, stage: Stage) -> Manifest | None:
    """The manifest of `out` if it is finished and made from the same inputs, None if `out` is free.

    Raises:
        ConflictError: `out` holds something else.
        ArtifactError: a file of it is gone or cut short.
    """
    if not out.name:
        raise UsageError(f"--out {out}: name a new directory")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / MANIFEST).exists():
        raise ConflictError(f"{out}: exists and was not made by this command; choose another --out or move it away")
    manifest = read_manifest(out)
    if manifest.fingerprint != stage.fingerprint():
        made, own = {**manifest.settings, "seed": manifest.seed}, {**stage.settings, "seed": stage.seed}
        changed = difference(made, own) if manifest.command == stage.command else ""
        raise ConflictError(
            f"{out}: exists already, made by {manifest.command!r} with other settings or inputs{changed}; {AGAIN}"
        )
    check_whole(out, f"move {out} away and run the command again")
    return manifest


def difference(made: JsonObject, settings: JsonObject) -> str:
    """The first settings that were other ones when something was made, in brackets."""
    there, wanted = _flat(made), _flat(_as_json(settings))
    names = [name for name in {**wanted, **there} if there.get(name) != wanted.get(name)]
    found = [f"{name} {clip(there.get(name))}, not {clip(wanted.get(name))}" for name in names[:_SHOWN_DIFFERENCES]]
    return f" ({'; '.join(found) or 'the content of an input'})"


def _flat(settings: JsonObject) -> JsonObject:
    groups = {name: value if isinstance(value, dict) else {"": value} for name, value in settings.items()}
    return {f"{name} {key}".strip(): value for name, group in groups.items() for key, value in group.items()}


def _as_json(values: Mapping[str, object]) -> JsonObject:
    found: JsonObject = json.loads(json.dumps(dict(values), default=str))
    return found


@contextmanager
def output_directory(out: Path, stage: Stage, resume: bool = False) -> Iterator[Path]:
    """Yield a `.partial` directory that becomes `out` when the block ends well.

    A block that raises leaves nothing behind, unless it saved resumable state: then the `.partial` stays, and only a
    run with `resume` continues in it. Without such a state a run with `resume` starts from the beginning.

    Raises:
        ConflictError: another run holds it, or an interrupted run's state lies there.
    """
    if finished_manifest(out, stage) is not None:
        raise ConflictError(f"{out}: exists already; choose another --out")
    with only_run(out) as partial, naming(out):
        _settle_state(partial)
        kept = has_state(partial)
        if kept and not resume:
            raise ConflictError(f"{partial}: keeps an interrupted run; add --resume to its command, or remove it")
        check_state(partial, stage)
        if resume and not kept:
            log(f"{out}: no interrupted run to resume; starting from the beginning")
        if not kept and partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(exist_ok=True)
        try:
            yield partial
            _finish(partial, out, stage)
        except BaseException:
            _settle_state(partial)  # a state that was not saved whole takes space
            if not has_state(partial):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if out.exists():
            if not out.is_dir() or any(out.iterdir()):  # it was empty when the run began
                raise ConflictError(f"{out}: appeared during the run; the result is in {partial}")
            out.rmdir()
        with TemporaryDirectory(prefix=f"{partial.name}.", dir=out.parent) as old:  # until `out` is whole
            if (partial / STATE_DIRECTORY).exists():
                (partial / STATE_DIRECTORY).rename(Path(old) / STATE_DIRECTORY)
            partial.rename(out)
        _fsync(out.parent)


@contextmanager
def only_run(out: Path) -> Iterator[Path]:
    """Yield where `out` is made before it is renamed; meanwhile no other run may write it.

    Raises:
        ConflictError: another run is writing it.
    """
    partial = partial_directory(out)
    partial.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(partial) + ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConflictError(f"{out}: another run is writing it; wait for it, or choose another --out") from None
    try:
        yield partial
    finally:
        with suppress(PermissionError):  # Windows keeps an open file
            Path(lock.lock_file).unlink(missing_ok=True)  # before the release: afterwards it may be another run's
        lock.release()


def partial_directory(out: Path) -> Path:
    """Where `out` is made before it is renamed."""
    return out.parent / f"{out.name}.partial"


def began(out: Path) -> bool:
    """Whether this call of `torchrun` saved the state for `out`, before a process ended and all were started again."""
    if processes.count() == 1 or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    saved_by, now = set[str](), processes.launches()
    for name in (f"{STATE_DIRECTORY}.old", STATE_DIRECTORY):
        with suppress(ArtifactError, LookupError, TypeError):
            saved_by = set(read_json(partial_directory(out) / name / STATE_FILE)[LAUNCHES])
    return processes.from_first("" if saved_by.isdisjoint(now) else "yes") == "yes"


def check_state(partial: Path, stage: Stage) -> None:
    """Raise a UsageError that names the difference if a run with another fingerprint saved the state."""
    file, own = partial / STATE_DIRECTORY / STATE_FILE, stage.identity()
    if file.exists() and (there := read_json(file)).get("identity") != own["identity"]:
        changed = difference(as_object(there["settings"], file), own["settings"]) if "settings" in there else ""
        raise UsageError(
            f"{file.parent}: was saved by a run with other settings or inputs{changed}; resume with the same ones, or "
            f"remove {partial}"
        )


def replace_state(partial: Path, fresh: Path) -> None:
    """Make `fresh` the saved state; at every moment either the old or the new one is whole."""
    state, old = partial / STATE_DIRECTORY, partial / f"{STATE_DIRECTORY}.old"
    if state.exists():
        state.rename(old)
    fresh.rename(state)
    shutil.rmtree(old, ignore_errors=True)


def _settle_state(partial: Path) -> None:
    """After a run was killed while it saved or finished: keep the newest whole state, drop the rest."""
    state, old = partial / STATE_DIRECTORY, partial / f"{STATE_DIRECTORY}.old"
    if old.exists() and not state.exists():
        old.rename(state)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(partial / f"{STATE_DIRECTORY}.new", ignore_errors=True)
    for path in (partial / MANIFEST, *partial.glob("*.partial")):
        path.unlink(missing_ok=True)


def run_stage(out: Path, stage: Stage, make: Callable[[Path], JsonObject], resume: bool = False) -> JsonObject:
    """Make `out` with `make`, unless it is there already from the same inputs.

    Returns:
        `out`, `cached`, `seconds`, `size_bytes` and what `make` returns, of which `Result.of` makes a typed result.
    """
    manifest = finished_manifest(out, stage)
    if manifest is not None:
        log(f"{out}: up to date")
        return {"out": str(out), "cached": True, **manifest.results}
    with output_directory(out, stage, resume) as partial:
        started = time.perf_counter()
        results = make(partial)
        results.setdefault("seconds", round(time.perf_counter() - started, 3))
        results.setdefault("size_bytes", directory_bytes(partial))
        stage.results.update(results)
    return {"out": str(out), "cached": False, **results}


def run_together(out: Path, stage: Stage, make: Callable[[Path], JsonObject], resume: bool = False) -> JsonObject:
    """`run_stage` in the processes of `torchrun`: all call `make`, and the first one's directory becomes `out`.

    Raises:
        ArtifactError: this process has other inputs or another version of the program than the first.
    """
    own = f"{__version__} {stage.fingerprint()}"
    if processes.from_first(own) != own:
        raise ArtifactError("the first process has other input files, settings or another version; use the same")

    def make_together(directory: Path) -> JsonObject:
        processes.wait()
        return make(directory)

    if processes.rank() == 0 or finished_manifest(out, stage) is not None:
        return run_stage(out, stage, make_together, resume)
    with TemporaryDirectory() as scratch:
        directory, state = Path(scratch), partial_directory(out) / STATE_DIRECTORY
        processes.wait()
        if state.exists():
            (directory / STATE_DIRECTORY).symlink_to(state.resolve())
        return {"out": str(out), "cached": False, "size_bytes": 0, **make(directory)}


def _finish(partial: Path, out: Path, stage: Stage) -> None:
    """Write card and manifest."""
    versions = {"sportsllm-compress": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    manifest = Manifest(
        command=stage.command,
        settings=_as_json(stage.settings),
        seed=stage.seed,
        fingerprint=stage.fingerprint(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions,
        parents=tuple(
            Parent(str(path), value, **(origin(path) or {}))
            for path, value in zip(stage.inputs, stage.input_digests, strict=True)
        ),
        results=_as_json(stage.results),
    )
    if (card := render_card(partial, manifest, out)) is not None:
        (partial / CARD).write_text(card, encoding="utf-8")
    files = {}
    for path in sorted(partial.rglob("*")):
        if path.is_file() and STATE_DIRECTORY not in path.relative_to(partial).parts[:-1]:
            path.chmod(0o644)  # safetensors writes 0600
            _fsync(path)
            files[str(path.relative_to(partial))] = FileEntry(file_sha256(path), path.stat().st_size)
    replace(manifest, files=files).write(partial)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
