"""The command `plan`. Heavy imports are inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm.cli import flags
from sportsllm.cli.flag_groups import FlagGroup, check_not_given, expand_flag_groups
from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from benchmarks.predict.plan_training import Cost


@dataclass(frozen=True)
class CostFlags(FlagGroup):
    """What a training takes."""

    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --training: FLOPs, time and energy of this many.")
    ] = None
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, metavar="X", help="With --training: of the device, for the training's price.")
    ] = None
    utilization: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --training: model FLOPs as a share of the device's peak.",
            show_default="0.3",
        ),
    ] = None

    def cost(self) -> Cost:
        """The flags that were given."""
        from benchmarks.predict.plan_training import Cost

        return Cost(**self.given())


@dataclass(frozen=True)
class StepFlags(FlagGroup):
    """A training step."""

    batch: Annotated[
        int, typer.Option("--batch-size", "--batch", metavar="N", help="Sequences of one training batch.")
    ] = 4
    length: Annotated[
        int | None,
        typer.Option(
            "--sequence",
            "--length",
            metavar="N",
            help="Tokens of one training sequence.",
            show_default="512, or the context if shorter",
        ),
    ] = None
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="adamw, or muon (Muon and AdamW).")] = "adamw"
    optimizer_bits: flags.OptimizerBits = None
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="That training computes in: fp32, bf16 or fp16.", show_default="bf16; --shapes fp32"
        ),
    ] = None


@dataclass(frozen=True)
class StorageFlags(FlagGroup):
    """Memory in use, and formats of weights and cache."""

    cache_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Also weights and cache together, with this many tokens in the cache."),
    ] = None
    cache_sequences: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequences in the cache, for --cache-tokens.")
    ] = 1
    block_size: Annotated[int, typer.Option(metavar="N", help="Weights of a quantized matrix that share a scale.")] = 32
    head_bits: Annotated[int, typer.Option(metavar="N", help="Bits of embedding and head at int8 and int4.")] = 8
    kv_cache: Annotated[
        str, typer.Option(metavar="FORMAT", help="Format of the key/value cache in predictions: fp32, fp16 or int8.")
    ] = "fp32"


@expand_flag_groups
def plan(
    *,
    shape: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A preset; 8b, 70b or 200b; a checkpoint or an export; or a number of parameters such as 7B.",
            show_default="small",
        ),
        flags.BY_NAME,
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The same as a flag.", show_default="small"), flags.BY_NAME
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Predict speed and memory on this device.")
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="A training step alone: its parts, what fits the device, how long.")
    ] = False,
    step: StepFlags,
    cost: CostFlags,
    storage: StorageFlags,
    shapes: Annotated[bool, typer.Option("--shapes", help="Also list every tensor of a training step.")] = False,
) -> dict[str, Any]:
    """Parameters, memory, KV cache and predicted speed, or what a training takes. Runs nothing."""
    from benchmarks.console_plan import print_plan
    from benchmarks.predict.plan import PlanRequest, plan
    from sportsllm.console import output

    if shape is not None and model is not None:
        raise UsageError(f"the model is given twice, {shape!r} and --model {model}; leave one out")
    if not training:
        check_not_given("--training", cost)
    if storage.cache_tokens is None and storage.cache_sequences != 1:
        raise UsageError("--cache-sequences belongs to --cache-tokens; give that too, or leave it out")
    given = step.given() | storage.given()
    if given.get("precision") == "auto":
        given.pop("precision")
    request = PlanRequest(device=device, shapes=shapes, training=training, cost=cost.cost(), **given)
    named = shape or model or "small"
    result = plan(named, request)
    print_plan(output(), result)
    return result
