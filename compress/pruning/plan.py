"""From flags to a pruned checkpoint: find the shape, then cut.

Each shape that a search recovers is a stage of its own beside the output (`OUT.search/...`): a second run finds it up
to date, an interrupted one goes on. What a finished search found is there too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.pruning.run import PruneJob, prune_checkpoint
from compress.pruning.scores import Scores
from compress.pruning.search import length, search_shape
from compress.pruning.shapes import Shape, candidate_shapes, shape_for_share, share_for_megabytes
from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.formats.artifact import finished_manifest
from sportsllm.formats.manifest import manifest_of
from sportsllm.models.config import ModelConfig

_SEARCH_SHARE = 0.05


@dataclass(frozen=True)
class PruneTarget:
    """How small: a share of the non-embedding parameters, megabytes of float32 weights, or dimensions by name.

    A dimension that is None or left out is kept whole. Where a size is given the shape is searched: `finalists` shapes
    are recovered on `search_tokens` each, a twentieth of the recovery's if None; 0 cuts all widths alike.
    """

    share: float | None = None
    megabytes: float | None = None
    dimensions: Mapping[str, int | None] = field(default_factory=dict)
    search_tokens: int | None = None
    finalists: int = 3

    def shape(self, config: ModelConfig, whole: bool = False) -> Shape:
        """The shape that is asked for, where nothing is searched; the model's own where nothing is and `whole`."""
        given = {key: value for key, value in self.dimensions.items() if value is not None}
        flags = ", ".join("--" + key.replace("_", "-") for key in given)
        ways = {"--params": self.share, "--size-mb": self.megabytes, flags: flags or None}
        named = [flag for flag, value in ways.items() if value is not None]
        if len(named) > 1:
            raise UsageError(f"give one of {' and '.join(named)}, not both")
        share = self.share_of(config)
        if share is not None:
            return shape_for_share(config, share)
        if not given and not whole:
            dimensions = "--hidden, --intermediate, --heads, --kv-heads, --head-dim, --layers, --experts, --latent"
            raise UsageError(f"say how small: --params SHARE, --size-mb MB, or {dimensions}")
        return dataclasses.replace(Shape.of(config), **given)

    def share_of(self, config: ModelConfig) -> float | None:
        """The share of the non-embedding parameters to keep; None where dimensions are given."""
        return self.share if self.megabytes is None else share_for_megabytes(config, self.megabytes)


def prune_run(job: PruneJob, target: PruneTarget, out: Path, *, resume: bool = False) -> dict[str, Any]:
    """Prune a checkpoint to a target; arguments and result are those of `prune_checkpoint`.

    Raises:
        UsageError: flags that do not go together, an impossible shape, or the model's own.
    """
    config = job.model_config()
    shape = target.shape(config, whole=job.changes_kinds)
    tried: list[dict[str, Any]] = []
    known: Scores | None = None
    share, tokens = target.share_of(config), target.search_tokens
    if shape == Shape.of(config) and not job.changes_kinds:
        sizes = ", ".join(f"{name} {size}" for name, size in dataclasses.asdict(shape).items())
        raise UsageError(f"{job.checkpoint}: nothing is cut, the model has that shape ({sizes}); ask for less")
    if tokens is not None and (share is None or job.recovery is None):
        raise UsageError("--search needs a size (--params or --size-mb) and --recover TOKENS")
    if target.megabytes is not None and config.has_large_vocabulary:
        tables = 1 - config.block_parameters / config.parameters
        log(f"embedding and head are {tables:.0%} of the parameters and stay whole; prune-vocabulary cuts them")
    if share is not None and tokens != 0:
        if tokens is None:
            tokens = 0 if job.recovery is None else round(_SEARCH_SHARE * length(job.recovery))
        _check_out(job, out, share)
        beside = out.with_name(f"{out.name}.search")
        shape, tried, known = search_shape(job, share, tokens, target.finalists, beside)
    return prune_checkpoint(job, shape, out, resume=resume, search=tried, known=known)


def _check_out(job: PruneJob, out: Path, share: float) -> None:
    """Refuse an `out` that another job made before the search, and not when its work is done.

    Raises:
        ConflictError: it holds something else.
    """
    config = job.model_config()
    even = shape_for_share(config, share)
    made = manifest_of(out).results.get("shape")
    own = (shape for shape in candidate_shapes(config, share) if dataclasses.asdict(shape) == made)
    finished_manifest(out, job.stage(next(own, even)))
