"""What made a finished directory: its manifest, digests of its files, and the models it was made from.

Imports no torch: the device install verifies directories too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, atomic_write_text, clip, read_json, validate, visible_files

CARD, MANIFEST, MANIFEST_FORMAT = "README.md", "manifest.json", 1
GGUF_RECORD = "gguf.json"
"""In place of a checkpoint's weights: size and SHA-256 of the GGUF file that holds them, which the manifest names."""
_STARTS = ("init", "checkpoint", "teacher")  # settings that name the model a stage starts from, the nearest first
_LONGEST_CHAIN = 64
_LONGEST_NAME = 1_000
_SNAPSHOTS, _PREFIX = "snapshots", "models--"  # of the hub's cache: models--ORG--NAME/snapshots/COMMIT


@dataclass(frozen=True)
class FileEntry:
    """A file of the directory; `first_sha256` is its first content if it was written again (the model card)."""

    sha256: str
    bytes: int
    first_sha256: str | None = None


@dataclass(frozen=True)
class Parent:
    """An input; `model` and `revision` are its name and commit in the model hub."""

    path: str
    sha256: str
    model: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What made a directory; an empty one stands for a directory that no stage made.

    `settings` are the command's, `results` what it printed under `--json`; their keys differ from command to command.
    `files` lists every file but the manifest itself.
    """

    format: int = MANIFEST_FORMAT
    command: str = ""
    settings: JsonObject = field(default_factory=dict)
    seed: int | None = None
    fingerprint: str = ""
    created: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    parents: tuple[Parent, ...] = ()
    results: JsonObject = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)

    def figure(self, name: str) -> float | None:
        """A result that is a number; None if there is none."""
        value = self.results.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, name: str) -> str | None:
        """A setting that is text and not empty; None if there is none."""
        value = self.settings.get(name)
        return value if isinstance(value, str) and value else None

    def paths(self, name: str) -> list[str]:
        """A setting that is a path or a list of paths."""
        value = self.settings.get(name)
        return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str) and item]

    def write(self, directory: Path) -> None:
        """Write it into a directory, whole or not at all."""
        data = asdict(self)
        for record in (*data["parents"], *data["files"].values()):
            for name in [name for name, value in record.items() if value is None]:
                del record[name]
        atomic_write_text(directory / MANIFEST, json.dumps(data, indent=1, default=str) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """Parse and check a finished directory's manifest.

    Raises:
        ArtifactError: missing, damaged, or written by a newer version.
    """
    path = directory / MANIFEST
    data = read_json(path)
    if not isinstance(data.get("files"), dict):
        raise ArtifactError(f"{path}: has no list of files; make the directory again")
    manifest = validate(Manifest, data, path, "make the directory again")
    if manifest.format > MANIFEST_FORMAT:
        raise ArtifactError(f"{path}: written by a newer version (format {manifest.format}); upgrade this program")
    for name in manifest.files:
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts or not 0 < len(name) < _LONGEST_NAME:
            raise ArtifactError(f"{path}: lists a file outside the directory ({clip(name)}); make the directory again")
    return manifest


def manifest_of(directory: Path) -> Manifest:
    """As `read_manifest`, but an empty one for a directory that has none."""
    return read_manifest(directory) if (directory / MANIFEST).exists() else Manifest()


def check_whole(directory: Path, advice: str) -> None:
    """ArtifactError if a file of a finished directory is gone or cut short; the model card people may edit."""
    for name, entry in read_manifest(directory).files.items():
        size = (directory / name).stat().st_size if (directory / name).exists() else None
        if size != entry.bytes and name != CARD:
            found = "missing" if size is None else f"{size} bytes instead of {entry.bytes}"
            raise ArtifactError(f"{directory / name}: {found}; the directory is damaged, {advice}")


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(path: Path) -> str:
    """Digest of an input: a file's SHA-256, or for a directory that of the names and contents of its visible files.

    A finished directory is identified by its manifest, so large weights are not read again, and by the first content
    of its files: writing its model card again does not make it another input.

    Raises:
        ArtifactError: nothing is there.
    """
    if path.is_file():
        return file_sha256(path)
    if not path.is_dir():
        raise ArtifactError(f"{path}: not found; give an existing file or directory")
    if (path / MANIFEST).exists():
        files = {name: entry.first_sha256 or entry.sha256 for name, entry in read_manifest(path).files.items()}
    else:
        files = {str(item.relative_to(path)): file_sha256(item) for item in visible_files(path)}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def linked_gguf(directory: Path) -> Parent | None:
    """The GGUF file that holds the weights of a checkpoint; None if they are in the directory."""
    if not (directory / GGUF_RECORD).exists():
        return None
    parents = read_manifest(directory).parents
    if not parents:
        raise ArtifactError(f"{directory / MANIFEST}: names no GGUF file; give the GGUF file instead")
    return parents[0]


def source_gguf(directory: Path) -> Path | None:
    """The GGUF file that a checkpoint was converted from; None if there was none, or it is gone."""
    made = manifest_of(directory)
    found = Path(made.parents[0].path) if made.command == "gguf" and made.parents else None
    return found if found is not None and found.is_file() else None


def link_problem(directory: Path, gguf: Parent, in_full: bool = False) -> str | None:
    """What is wrong with the GGUF file of `linked_gguf`; None if nothing is.

    It is read `in_full` if it is newer than the manifest, which `convert_gguf` writes again after reading it.
    """
    file, size = Path(gguf.path), read_json(directory / GGUF_RECORD).get("bytes")
    if not file.is_file():
        return "not found"
    found = file.stat()
    in_full |= found.st_mtime > (directory / MANIFEST).stat().st_mtime
    changed = size not in (None, found.st_size) or (in_full and file_sha256(file) != gguf.sha256)
    return "its content was changed" if changed else None


def verify_directory(directory: Path) -> tuple[int, list[str]]:
    """Compare a finished directory with its manifest.

    Returns:
        The number of files checked and one line for each problem.
    """
    files = read_manifest(directory).files
    problems = []
    for name, entry in files.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != entry.bytes:
            problems.append(f"{name}: {path.stat().st_size} bytes, the manifest says {entry.bytes}")
        elif file_sha256(path) != entry.sha256:
            problems.append(f"{name}: content differs from the manifest's SHA-256")
    if (gguf := linked_gguf(directory)) is not None and (problem := link_problem(directory, gguf, in_full=True)):
        problems.append(f"{gguf.path}: {problem}")
    found = {str(path.relative_to(directory)) for path in visible_files(directory)}
    return len(files), problems + [f"{name}: not in the manifest" for name in sorted(found - {*files, MANIFEST})]


def directory_bytes(directory: Path) -> int:
    """Size of a directory's weight files in bytes (safetensors, the graph and its data, or GGUF, also a linked one)."""
    if (record := directory / GGUF_RECORD).exists():
        return int(read_json(record).get("bytes") or 0)
    weights = [name for name in ("model*.safetensors", "*.safetensors") if any(directory.glob(name))][:1]
    # Beside weights, graphs in `onnx` are other forms of the same model.
    names = [*(weights or ["onnx/*.onnx", "onnx/*.onnx_data"]), "*.onnx", "*.onnx.data", "*.gguf"]
    return sum(path.stat().st_size for name in names for path in directory.glob(name))


class Ancestor(NamedTuple):
    """A model that another was made from; its manifest is empty if no stage made it."""

    directory: Path
    manifest: Manifest


def _is_stage(directory: Path, value: str) -> bool:
    """Whether a finished stage with this digest lies there; a damaged one is another."""
    try:
        return (directory / MANIFEST).is_file() and digest(directory) == value
    except (ArtifactError, OSError):
        return False


def ancestors(manifest: Manifest, directory: Path) -> list[Ancestor]:
    """The models that `directory`, whose manifest this is, was made from, the nearest first.

    They are looked for at the paths in the manifests, and beside the stage made from them; the list ends if one is
    gone or was changed.
    """
    found: list[Ancestor] = []
    while len(found) < _LONGEST_CHAIN:
        keys = (*_STARTS, "student") if manifest.text("start") == "weights" else _STARTS
        starts = [manifest.text(key) for key in keys]
        if not manifest.parents:
            break
        # A stage that names no start reads its model first.
        parent = min(manifest.parents, key=lambda each: starts.index(each.path) if each.path in starts else len(starts))
        places = [Path(parent.path), directory.parent / Path(parent.path).name]
        stage = next((place for place in places if _is_stage(place, parent.sha256)), None)
        if stage is None:
            foreign = [each for each in places if (each / "config.json").is_file() and not (each / MANIFEST).exists()]
            return [*found, *(Ancestor(place, Manifest()) for place in foreign[:1])]
        directory, manifest = stage, read_manifest(stage)
        found.append(Ancestor(directory, manifest))
    return found


def origin(path: Path) -> dict[str, str] | None:
    """`model` and `revision`, its commit, of a directory in the hub's cache; None for any other."""
    repository = path.parent.parent.name
    if path.parent.name != _SNAPSHOTS or not repository.startswith(_PREFIX):
        return None
    return {"model": repository.removeprefix(_PREFIX).replace("--", "/"), "revision": path.name}


def plain_name(path: Path) -> str:
    """What to call a model: its own name in the hub's cache, or the directory's as it is given, a link's too."""
    path = path.resolve() if path.name == ".." else path.absolute()
    found = origin(path)
    return path.name if found is None else found["model"].partition("/")[2]
