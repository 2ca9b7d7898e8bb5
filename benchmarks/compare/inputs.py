"""Which directories can be compared: finished trainings, scored on one text, with one tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare.manifest import Lineage, read_manifest_facts
from benchmarks.compare.methods import variants
from benchmarks.compare.runs import Run, is_positive, read_run
from sportsllm.errors import ArtifactError
from sportsllm.formats.artifact import MANIFEST, digest
from sportsllm.text.tokenizer import same_tokenizer


def read_runs(directories: Sequence[Path], teacher: Path) -> tuple[Run, list[Run]]:
    """The teacher; and the runs compared with it, the largest model first and of equal ones the best first.

    The teacher's own directory may be among `directories`.

    Raises:
        ArtifactError: a directory is not a finished training, or was scored on other held-out text or with another
            tokenizer than the teacher.
    """
    for directory, flag in ((teacher, "--teacher "), *((path, "") for path in directories)):
        _check_finished(directory, flag)
    own = digest(teacher)
    lineage = Lineage(own, {digest(path): path for path in directories} | {own: teacher})
    first = read_run(teacher, lineage)
    others = [read_run(path, lineage) for path in lineage.known.values() if path != teacher]
    others.sort(key=lambda run: (-run.config.parameters, run.bits_per_byte))
    for run in others:
        _check_comparable(run, first)
    last = [run.name for run in (first, *others)]
    first, *others = [
        run if last.count(run.name) == 1 else replace(run, name=str(run.facts.directory.resolve()))
        for run in (first, *others)
    ]
    methods = variants([(run.method, run.facts.settings) for run in others])
    return first, [replace(run, method=method) for run, method in zip(others, methods, strict=True)]


def ancestors(directories: Sequence[Path]) -> list[Path]:
    """Further directories that runs start from or learnt from, where they are still as they were."""
    found: dict[str, Path] = {digest(path): path for path in directories}
    waiting = list(directories)
    while waiting:
        directory = waiting.pop()
        if not (directory / MANIFEST).exists():
            continue
        facts = read_manifest_facts(directory)
        for name in filter(None, (facts.parent, facts.settings.get("signals"), facts.teacher)):
            expected, path = facts.parents.get(name), Path(name)
            if expected and expected not in found and path.is_dir() and digest(path) == expected:
                found[expected] = path
                waiting.append(path)
    return sorted(set(found.values()) - set(directories))


def _check_finished(directory: Path, flag: str) -> None:
    where = f"{flag}{directory}"
    if not directory.is_dir():
        raise ArtifactError(f"{where}: no such directory; give what train, distill or prune --recover wrote")
    if not (directory / MANIFEST).exists():
        raise ArtifactError(
            f"{where}: is not a finished training (it has no {MANIFEST}); wait for the run, continue it with "
            "--resume, or give another directory"
        )
    results = read_manifest_facts(directory).results
    if not (is_positive(results.get("tokens")) and is_positive(results.get("valid_bits_per_byte"))):
        raise ArtifactError(
            f"{where}: is not a finished training (its manifest has no tokens or no held-out bits per byte); give what "
            "train, distill or prune --recover wrote"
        )


def _check_comparable(run: Run, teacher: Run) -> None:
    directory = run.facts.directory
    if run.text_digests != teacher.text_digests:
        raise ArtifactError(
            f"{directory}: was scored on other held-out text ({', '.join(run.text_names)}) than the teacher "
            f"({', '.join(teacher.text_names)}); train it again with the teacher's --valid, or leave it out"
        )
    if not same_tokenizer(directory, teacher.facts.directory):
        raise ArtifactError(
            f"{directory}: its tokenizer differs from the teacher's, so its tokens and the held-out text that it was "
            "scored on differ too; use the teacher's tokenizer, or leave it out"
        )
