"""Which directories can be compared: finished trainings, scored on one text, with one tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare.methods import variants
from benchmarks.compare.runs import Line, Run, guides_of, is_positive, origin_of, parents_of
from sportsllm.errors import ArtifactError
from sportsllm.storage.artifact import MANIFEST, digest, read_manifest
from sportsllm.text.tokenizer import same_tokenizer


def read_runs(directories: Sequence[Path], teacher: Path) -> tuple[Run, list[Run]]:
    """Read the teacher and the runs that are compared with it.

    Args:
        directories: outputs of train, distill or prune --recover; the teacher's own may be among them.
        teacher: directory of the run that sets the mark.

    Returns:
        The teacher and the others, in the order given.

    Raises:
        ArtifactError: a directory that is no finished training, or one scored on other held-out text or with another
            tokenizer than the teacher.
    """
    _check_finished(teacher, "--teacher ")
    for directory in directories:
        _check_finished(directory)
    own = digest(teacher)
    line = Line(own, {digest(path): path for path in directories} | {own: teacher})
    first = line.read(teacher)
    others = [line.read(path) for path in line.known.values() if path != teacher]
    for run in others:
        _check_comparable(run, first)
    names = _names([run.directory for run in (first, *others)])
    methods = variants([(run.method, run.settings) for run in others])
    renamed = [
        replace(run, name=name, method=method) for run, name, method in zip(others, names[1:], methods, strict=True)
    ]
    return replace(first, name=names[0]), renamed


def ancestors(directories: Sequence[Path]) -> list[Path]:
    """Further directories that runs start from or learnt from, where they are still as they were."""
    found: dict[str, Path] = {digest(path): path for path in directories}
    waiting = list(directories)
    while waiting:
        directory = waiting.pop()
        if not (directory / MANIFEST).exists():
            continue
        settings, parents = read_manifest(directory).get("settings", {}), parents_of(directory)
        for path in map(Path, map(str, (origin_of(settings), settings.get("signals"), *guides_of(settings)))):
            expected = parents.get(str(path))
            if expected and expected not in found and path.is_dir() and digest(path) == expected:
                found[expected] = path
                waiting.append(path)
    return sorted(set(found.values()) - set(directories))


def _check_finished(directory: Path, flag: str = "") -> None:
    where = f"{flag}{directory}"
    if not directory.is_dir():
        raise ArtifactError(f"{where}: no such directory; give what train, distill or prune --recover wrote")
    if not (directory / MANIFEST).exists():
        raise ArtifactError(
            f"{where}: is no finished training (it has no {MANIFEST}); wait for the run, go on with --resume, or give "
            "another directory"
        )
    results = read_manifest(directory).get("results", {})
    if not (is_positive(results.get("tokens")) and is_positive(results.get("valid_bits_per_byte"))):
        raise ArtifactError(
            f"{where}: is no finished training (its manifest has no tokens or no held-out bits per byte); give what "
            "train, distill or prune --recover wrote"
        )


def _check_comparable(run: Run, teacher: Run) -> None:
    if run.held_out != teacher.held_out:
        raise ArtifactError(
            f"{run.directory}: was scored on other held-out text ({', '.join(run.text)}) than the teacher "
            f"({', '.join(teacher.text)}); train it again with the teacher's --valid, or leave it out"
        )
    if not same_tokenizer(run.directory, teacher.directory):
        raise ArtifactError(
            f"{run.directory}: its tokenizer differs from the teacher's, so neither its tokens nor its held-out text, "
            "which ends after so many tokens, are the same; use the teacher's tokenizer, or leave it out"
        )


def _names(directories: Sequence[Path]) -> list[str]:
    last = [path.resolve().name for path in directories]
    return [
        name if last.count(name) == 1 else str(path.resolve()) for name, path in zip(last, directories, strict=True)
    ]
