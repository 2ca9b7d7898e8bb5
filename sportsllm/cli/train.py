"""The command `train`. Heavy imports are inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.cli import flags
from sportsllm.cli.flag_groups import FlagGroup, expand_flag_groups
from sportsllm.data import DEFAULT_CORPUS, SIMULATED_MEGABYTES, simulate
from sportsllm.errors import UsageError


@dataclass(frozen=True)
class ShapeFlags(FlagGroup):
    """Dimensions that replace those of the model."""

    layers: Annotated[int | None, typer.Option(min=1, help="Layers.", show_default="the model's")] = None
    hidden: Annotated[int | None, typer.Option(min=1, help="Width: hidden channels.", show_default="the model's")] = (
        None
    )
    intermediate: Annotated[
        int | None, typer.Option(min=1, help="FFN neurons of a layer.", show_default="the model's")
    ] = None
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.", show_default="the model's")] = None
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads.", show_default="as many query heads share one as before")
    ] = None
    head_dim: Annotated[
        int | None,
        typer.Option(min=2, help="Channels of a head.", show_default="the model's; a changed width over the heads"),
    ] = None
    context: Annotated[
        int | None, typer.Option(min=2, help="Longest sequence (tokens).", show_default="the model's")
    ] = None
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Entries of the tokenizer that is trained.", show_default="the model's"),
    ] = None
    dropout: Annotated[
        float | None, typer.Option(help="Dropout in training.", show_default="the model's; presets 0")
    ] = None
    tied: Annotated[
        bool | None,
        typer.Option("--tied/--untied", help="One matrix as embedding and head, or two.", show_default="the model's"),
    ] = None


@dataclass(frozen=True)
class TokenizerFlags(FlagGroup):
    """The tokenizer of a new model."""

    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory with a tokenizer to use with --model.", show_default="a new one is trained"),
        flags.BY_NAME,
    ] = None
    digits: Annotated[
        str | None,
        typer.Option(
            help="In the tokenizer that is trained: grouped, or single (every digit is a token of its own).",
            show_default="grouped",
        ),
    ] = None


@expand_flag_groups
def train(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Train from scratch: a preset's name, or a directory whose config.json is used.",
            show_default="by --init; small where a shape is given",
        ),
        flags.BY_NAME,
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(help="Fine-tune this unquantized checkpoint.", show_default="by --model"),
        flags.BY_NAME,
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New directory.", show_default="runs/<model>, runs/custom for another shape, runs/<init>-tuned"
        ),
    ] = None,
    shape: ShapeFlags,
    text: flags.TextFlags,
    words: TokenizerFlags,
    lora: flags.LoraFlags,
    rope_scaling: flags.RopeScaling = None,
    length: flags.LengthFlags,
    training: flags.TrainingFlags,
    seed: flags.Seed = 0,
    threads: flags.Threads = None,
) -> dict[str, Any]:
    """Train a tokenizer (unless given one) and a base model, or fine-tune a checkpoint (--init).

    --steps 0 writes the model without training it.
    """
    from sportsllm.console import output
    from sportsllm.formats.hub import plain_name
    from sportsllm.formats.huggingface.config import load_config
    from sportsllm.models.presets import DEFAULT_PRESET
    from sportsllm.models.rope import with_rope_scaling
    from sportsllm.models.shape import changed_shape
    from sportsllm.training import pretrain
    from sportsllm.training.settings import DOCUMENTED_DROPOUT, Run, Start
    from sportsllm.training.setup import set_threads

    set_threads(threads)
    changes = shape.given()
    if model is None and init is None and changes:
        model = DEFAULT_PRESET
    _check_start(model, init, changes, words, lora)
    if training.documented and init is None:
        changes.setdefault("dropout", DOCUMENTED_DROPOUT)
    start, network = (
        (Start.TRAINED, load_config(init))
        if init is not None
        else (Start.RANDOM, changed_shape(pretrain.shape_of(str(model))[0], changes))
    )
    if rope_scaling is not None:
        network = with_rope_scaling(network, rope_scaling)
    config = training.config(
        Run(start, network, lora.lora_rank is not None), length.tokens, length.steps, seed=seed, parallel=True
    )
    adapters = lora.adapters(config.optimizer)
    if not out:
        name = "custom" if shape.given() else plain_name(Path(str(model)).resolve())
        out = Path("runs") / (f"{plain_name(init.resolve())}-tuned" if init else name)
    corpus = text.corpus or _default_corpus()
    valid = text.valid or ([] if text.corpus else [DEFAULT_CORPUS / "valid.jsonl"])
    run = pretrain.Pretraining(corpus, valid, out, config, training.resume, rope_scaling)
    if init is not None:
        result = pretrain.fine_tune(init, run, adapters)
    else:
        result = pretrain.train_base(str(model), run, words.tokenizer, changes, words.digits or "grouped")
    print_training(result)
    if result.get("bits_per_byte_before") is not None:
        output().print(
            f"{result['out']}: {result['trained_parameters']:,} parameters trained, "
            f"held-out bits per byte before {result['bits_per_byte_before']:.4f}"
        )
    return result


def _check_start(
    model: str | None, init: Path | None, changes: Mapping[str, Any], words: TokenizerFlags, lora: flags.LoraFlags
) -> None:
    """Refuse flags of `train` that do not go together."""
    if (model is None) == (init is None):
        raise UsageError("give --model PRESET to train from scratch or --init CHECKPOINT to fine-tune, one of the two")
    if init is not None and words.tokenizer is not None:
        raise UsageError(f"--tokenizer cannot be changed with --init: {init} was trained with its own; leave it out")
    if init is None and lora.lora_rank is not None:
        raise UsageError("--lora-rank adapts weights that are there; give --init CHECKPOINT instead of --model")
    if init is not None and changes:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in changes)
        raise UsageError(
            f"{names}: {init} has its shape already; give --model {init} for a new model, or leave them out"
        )
    decided = {"--digits": words.digits, "--vocab-size": changes.get("vocab_size")}
    given = [flag for flag, value in decided.items() if value is not None]
    if given and (words.tokenizer or init):
        raise UsageError(
            f"{given[0]} is decided when a tokenizer is trained, and {words.tokenizer or init} has one; "
            f"leave {given[0]} out"
        )


def _default_corpus() -> list[Path]:
    from sportsllm.console import log

    if not (DEFAULT_CORPUS / "train.jsonl").exists():
        log(f"no --corpus given: simulating {SIMULATED_MEGABYTES:g} MB of matches into {DEFAULT_CORPUS}")
        simulate(out=DEFAULT_CORPUS)
    return [DEFAULT_CORPUS / "train.jsonl"]


def print_training(result: dict[str, Any]) -> None:
    """The line that training commands end with."""
    from sportsllm.console import output

    quality = result.get("valid_bits_per_byte")
    output().print(
        f"{result['out']}: {result['parameters']:,} parameters, {result['size_bytes'] / 1e6:.1f} MB, "
        f"{result['tokens']:,} tokens at {result['tokens_per_s']:,.0f} tokens/s, "
        f"held-out bits per byte {'not measured' if quality is None else format(quality, '.4f')}, "
        f"peak memory {result['peak_rss_bytes'] / 1e6:,.0f} MB"
    )
