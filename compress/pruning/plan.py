"""From flags to a pruned checkpoint: find the shape, then cut.

Each shape that a search recovers is a directory of its own beside the output (`OUT.search/...`), a finished stage
like any other: a second run finds them up to date, an interrupted one goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.pruning.run import PruneJob, prune_checkpoint
from compress.pruning.search import search_shape
from compress.pruning.shapes import Shape, shape_for_share, share_for_megabytes
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.storage.artifact import STATE_DIRECTORY, partial_directory


@dataclass(frozen=True)
class PruneTarget:
    """How small; one of the first three.

    Attributes:
        share: of the non-embedding parameters to keep, or None.
        megabytes: of float32 weights to reach, or None.
        dimensions: to keep, by name; None or left out means all of it.
        search_tokens: brief recovery of each finalist; None does not search.
        finalists: shapes that a search recovers.
    """

    share: float | None = None
    megabytes: float | None = None
    dimensions: Mapping[str, int | None] = field(default_factory=dict)
    search_tokens: int | None = None
    finalists: int = 4

    def shape(self, config: ModelConfig) -> Shape:
        """The shape that is asked for, where nothing is searched.

        Raises:
            UsageError: none or several of a share, a size and dimensions, or a shape that does not exist.
        """
        given = {key: value for key, value in self.dimensions.items() if value is not None}
        ways = [
            *(["--params"] if self.share is not None else []),
            *(["--size-mb"] if self.megabytes is not None else []),
            *([", ".join("--" + key.replace("_", "-") for key in given)] if given else []),
        ]
        if len(ways) > 1:
            raise UsageError(f"give one of {' and '.join(ways)}, not both")
        share = self.share_of(config)
        if share is not None:
            return shape_for_share(config, share)
        if not given:
            raise UsageError(
                "say how small: --params SHARE, --size-mb MB, or --hidden, --intermediate, --heads, --kv-heads, "
                "--layers"
            )
        return dataclasses.replace(Shape.of(config), **given)

    def share_of(self, config: ModelConfig) -> float | None:
        """The share of the non-embedding parameters to keep; None where dimensions are given."""
        return self.share if self.megabytes is None else share_for_megabytes(config, self.megabytes)


def prune_run(job: PruneJob, target: PruneTarget, out: Path, *, resume: bool = False) -> dict[str, Any]:
    """Prune a checkpoint to a target.

    Args:
        job: what is pruned and how.
        target: how small.
        out: directory to make.
        resume: go on with an interrupted recovery.

    Returns:
        The results, as `prune --json` prints them.

    Raises:
        UsageError: flags that do not go together, or an impossible shape.
    """
    config = load_config(job.checkpoint)
    shape = target.shape(config)
    tried: list[dict[str, Any]] = []
    if target.search_tokens is not None:
        share = target.share_of(config)
        if share is None or job.recovery is None:
            raise UsageError("--search needs a size (--params or --size-mb) and --recover TOKENS")
        if job.recovery.objective.signals is not None:
            raise UsageError(
                "--search judges shapes on text held out of the corpus, which signals were made with; "
                "search first, then give the shape found and --signals"
            )
        beside = out.with_name(f"{out.name}.search")
        shape, tried = search_shape(job, job.recovery, share, target.search_tokens, target.finalists, beside)
    interrupted = (partial_directory(out) / STATE_DIRECTORY).exists()
    return prune_checkpoint(job, shape, out, resume=resume and interrupted, search=tried)
