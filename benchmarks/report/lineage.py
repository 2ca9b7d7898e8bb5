"""Which stage was made from which, by the digests in their manifests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.inputs import Inputs, StageSummary
from sportsllm.formats.manifest import is_stage, parents_by_nearness, read_manifest

_MOST_STEPS = 64


def lineage(stages: Sequence[StageSummary], last: StageSummary) -> list[StageSummary]:
    """The given stages that `last` was made from, from the first to `last` itself."""
    found = [last]
    while len(found) <= len(stages):
        parent = parent_of(found[0], [stage for stage in stages if all(stage is not other for other in found)])
        if parent is None:
            break
        found.insert(0, parent)
    return found


def longest_lineage(inputs: Inputs) -> list[StageSummary]:
    """The lineage of the stage of the verdict, or the longest one if that stage has no parent here; else empty."""
    bench = inputs.deciding
    deciding = [stage for stage in inputs.stages if bench is not None and stage.bench is bench]
    for candidates in (deciding, inputs.stages):
        best = max((lineage(inputs.stages, stage) for stage in candidates), key=len, default=[])
        if len(best) > 1:
            return best
    return []


def parent_of(stage: StageSummary, others: Sequence[StageSummary]) -> StageSummary | None:
    """The nearest of `others` that `stage` was made from; None where there is none.

    Manifests name their parents by digest. Stages that were not given are walked through where they still lie at
    the path the manifest has, or beside the stage made from them, unchanged.
    """
    # A directory that was measured several times is represented by its first measurement.
    by_digest = {other.digest: other for other in reversed(others) if other.digest}
    by_path = {Path(other.directory).resolve(): other for other in reversed(others) if not other.digest}
    manifest, directory = stage.manifest, Path(stage.directory)
    for _ in range(_MOST_STEPS):
        parents = parents_by_nearness(manifest)
        for parent in parents:
            known = by_digest.get(parent.sha256) or by_path.get(Path(parent.path).resolve())
            if known is not None:
                return known
        near = directory.parent
        places = [
            (place, parent.sha256) for parent in parents for place in (Path(parent.path), near / Path(parent.path).name)
        ]
        found = next((place for place, value in places if is_stage(place, value)), None)
        if found is None:
            return None
        directory, manifest = found, read_manifest(found)
    return None
