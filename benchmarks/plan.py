"""The verb `plan`: parameters, memory, KV cache and predicted speed of a model, or what a training takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError
from sportsllm.results import Result
from sportsllm.settings import TRAINING_STEP, parse_settings


@dataclass(frozen=True, kw_only=True)
class PlanResult(Result):
    """A model by arithmetic alone; nothing was run.

    Attributes:
        model: as asked for.
        parameters: in all.
        parameters_by_component, weight_bytes, kv_cache_bytes_per_token: by part or precision; None for a bare count.
        training_memory_bytes: of one step; None for a bare count.
        predicted: with --target, `precision`, `depth`, `ttft_ms`, `tpot_ms`, `peak_rss_bytes` and their bands.
        figures: everything, as `--json` prints it.
    """

    model: str
    parameters: int
    parameters_by_component: dict[str, int] | None = None
    weight_bytes: dict[str, int] | None = None
    kv_cache_bytes_per_token: dict[str, int] | None = None
    training_memory_bytes: int | None = None
    predicted: list[dict[str, Any]] | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return self.figures


def plan(
    model: Annotated[
        str,
        typer.Argument(help="A preset; 8b, 70b or 200b; a checkpoint or an export; or a number of parameters: 7B."),
        options.BY_NAME,
    ] = "small",
    *,
    target: options.Target = None,
    training: Annotated[
        bool, typer.Option("--training", help="A training step alone: its parts, what fits the target, how long.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            parser=options.count,
            metavar="N",
            help="With --training: FLOPs, time and energy of this many.",
            show_default="none",
            rich_help_panel="Training",
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="With --training: of the target, for the price.",
            show_default="none",
            rich_help_panel="Training",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences of one training batch.", rich_help_panel="Training")
    ] = 4,
    sequence: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of one training sequence.",
            show_default="512, or the context if shorter",
            rich_help_panel="Training",
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, or muon (Muon and AdamW).", rich_help_panel="Training")] = (
        "adamw"
    ),
    precision: Annotated[
        str | None,
        typer.Option(
            help="Compute dtype of training: fp32, bf16 or fp16.",
            show_default="bf16; fp32 with --shapes",
            rich_help_panel="Training",
        ),
    ] = None,
    group_size: Annotated[int, typer.Option(help="Weights per scale of a quantized matrix.")] = 32,
    kv_cache: Annotated[str, typer.Option(help="Format of the KV cache in predictions: fp32, fp16 or int8.")] = "fp32",
    shapes: Annotated[bool, typer.Option("--shapes", help="Also list every tensor of a training step.")] = False,
    settings: options.Settings = None,
) -> PlanResult:
    """Parameters, memory, KV cache and predicted speed, or what a training takes. Nothing is run."""
    from benchmarks.console_plan import print_plan
    from benchmarks.predict.plan import PlanRequest
    from benchmarks.predict.plan import plan as compute
    from benchmarks.predict.plan_training import Cost
    from sportsllm.console import output

    found = parse_settings(settings, TRAINING_STEP)
    cost = {"tokens": tokens, "price_per_hour": price_per_hour, "utilization": found.pop("utilization", None)}
    given = {name: value for name, value in cost.items() if value is not None}
    if given and not training:
        raise UsageError(f"{', '.join(given)}: belongs to --training; add it, or leave it out")
    if "cache_sequences" in found and "cache_tokens" not in found:
        raise UsageError("--set cache_sequences belongs to cache_tokens; give that too, or leave it out")
    step: dict[str, Any] = {"length": sequence, "precision": None if precision == "auto" else precision}
    step = {name: value for name, value in step.items() if value is not None} | found
    request = PlanRequest(
        device=target,
        shapes=shapes,
        training=training,
        cost=Cost(**given),
        batch=batch_size,
        optimizer=optimizer,
        block_size=group_size,
        kv_cache=kv_cache,
        **step,
    )
    result = compute(model, request)
    print_plan(output(), result)
    return PlanResult.of({**result, "figures": result})
