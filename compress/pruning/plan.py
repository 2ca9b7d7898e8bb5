"""From flags to a pruned checkpoint: find the shape, then cut.

Each shape that a search recovers is a stage of its own beside the output (`OUT.search/...`): a second run finds it up
to date, an interrupted one goes on.
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


@dataclass(frozen=True)
class PruneTarget:
    """How small: a share of the non-embedding parameters, megabytes of float32 weights, or dimensions by name.

    A dimension that is None or left out is kept whole. A search recovers `finalists` shapes on `search_tokens` each.
    """

    share: float | None = None
    megabytes: float | None = None
    dimensions: Mapping[str, int | None] = field(default_factory=dict)
    search_tokens: int | None = None
    finalists: int = 4

    def shape(self, config: ModelConfig) -> Shape:
        """The shape that is asked for, where nothing is searched."""
        given = {key: value for key, value in self.dimensions.items() if value is not None}
        flags = ", ".join("--" + key.replace("_", "-") for key in given)
        ways = {"--params": self.share, "--size-mb": self.megabytes, flags: flags or None}
        named = [flag for flag, value in ways.items() if value is not None]
        if len(named) > 1:
            raise UsageError(f"give one of {' and '.join(named)}, not both")
        share = self.share_of(config)
        if share is not None:
            return shape_for_share(config, share)
        if not given:
            dimensions = "--hidden, --intermediate, --heads, --kv-heads, --head-dim, --layers"
            raise UsageError(f"say how small: --params SHARE, --size-mb MB, or {dimensions}")
        return dataclasses.replace(Shape.of(config), **given)

    def share_of(self, config: ModelConfig) -> float | None:
        """The share of the non-embedding parameters to keep; None where dimensions are given."""
        return self.share if self.megabytes is None else share_for_megabytes(config, self.megabytes)


def prune_run(job: PruneJob, target: PruneTarget, out: Path, *, resume: bool = False) -> dict[str, Any]:
    """Prune a checkpoint to a target; arguments and result are those of `prune_checkpoint`.

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
    return prune_checkpoint(job, shape, out, resume=resume, search=tried)
