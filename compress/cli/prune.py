"""The command prune. Heavy imports are inside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli import flags
from compress.cli.prune_vocabulary import VocabularyFlags, prune_vocabulary
from sportsllm.cli import flags as options
from sportsllm.cli.flag_groups import FlagGroup, check_not_given, expand_flag_groups
from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from compress.pruning.plan import PruneTarget
    from compress.pruning.run import PruneConfig


@dataclass(frozen=True)
class SizeFlags(FlagGroup):
    """How small."""

    params: Annotated[float | None, typer.Option(help="Share of the non-embedding parameters to keep.")] = None
    size_mb: Annotated[float | None, typer.Option(help="Size of the float32 weights to reach, in MB (10^6).")] = None
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden channels to keep.")] = None
    intermediate: Annotated[int | None, typer.Option(min=1, help="FFN neurons to keep in each layer.")] = None
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads to keep in each layer.")] = None
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads; merged where --heads stays.")] = None
    head_dim: Annotated[int | None, typer.Option(min=2, help="Channels of each head to keep; an even number.")] = None
    layers: Annotated[int | None, typer.Option(min=1, help="Layers to keep; one contiguous run is dropped.")] = None
    search: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --params or --size-mb: tokens to recover each finalist on; 0 cuts all widths alike instead.",
            show_default="5% of --recover",
        ),
    ] = None
    finalists: Annotated[int, typer.Option(min=1, help="The best shapes, which --search recovers.")] = 3

    def target(self) -> PruneTarget:
        """What to prune to."""
        from compress.pruning.plan import PruneTarget
        from sportsllm.models.shape import DIMENSIONS

        dimensions = {name: getattr(self, name) for name in DIMENSIONS}
        return PruneTarget(self.params, self.size_mb, dimensions, self.search, self.finalists)


@dataclass(frozen=True)
class ExpertFlags(FlagGroup):
    """Of a mixture of experts."""

    experts: Annotated[int | None, typer.Option(min=1, help="Experts that each layer will have.")] = None
    experts_per_token: Annotated[int | None, typer.Option(min=1, help="Experts that a token is sent to.")] = None
    experts_by: Annotated[str, typer.Option(help="use: those stay that add most; merge: alike ones become one.")] = (
        "use"
    )


@dataclass(frozen=True)
class LatentFlags(FlagGroup):
    """Of attention, made latent."""

    latent: Annotated[
        int | None,
        typer.Option(min=1, help="Rank of a joint latent of keys and values, all that is cached beside a rotated key."),
    ] = None


@dataclass(frozen=True)
class ChoiceFlags(FlagGroup):
    """How units are chosen, and what is done for those that stay."""

    importance: Annotated[str, typer.Option(help="output, activation (Minitron's), magnitude or random.")] = "output"
    repair: Annotated[
        bool, typer.Option("--repair/--no-repair", help="Refit what stays to the full model's values.")
    ] = True
    kv_merge: Annotated[str, typer.Option(hidden=True)] = "pca"
    scores: Annotated[Path | None, typer.Option(help="importance.safetensors of a run, or its directory.")] = None
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Pieces of calibration text.", show_default="up to 256, fewer for a model over 20M"),
    ] = None

    def config(self, seed: int) -> PruneConfig:
        """The settings of the cut."""
        from compress.pruning.run import PruneConfig

        if self.kv_merge != "pca":
            raise UsageError(f"--kv-merge {self.kv_merge} was dropped, since pca keeps more; leave --kv-merge out")
        return PruneConfig(self.importance, self.repair, self.samples, seed)


@dataclass(frozen=True)
class RecoverFlags(FlagGroup):
    """Training after the cut."""

    recover: Annotated[int | None, typer.Option(min=1, help="Tokens to distil from the unpruned model on.")] = None
    teacher: Annotated[Path | None, typer.Option(help="The teacher of --recover, if not the checkpoint itself.")] = None


@expand_flag_groups
def prune(
    *,
    checkpoint: Annotated[Path, typer.Argument(help="An unquantized checkpoint.", show_default=False), options.BY_NAME],
    out: options.Out,
    calibration: options.CalibrationText = None,
    size: SizeFlags,
    mixture: ExpertFlags,
    latent: LatentFlags,
    choice: ChoiceFlags,
    recover: RecoverFlags,
    corpora: options.TextFlags,
    distillation: flags.DistillationFlags,
    lora: options.LoraFlags,
    training: options.TrainingFlags,
    vocabulary: VocabularyFlags,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Cut width, depth, experts or the key/value cache; the result is an ordinary checkpoint."""
    from compress.distillation.recovery import Recovery
    from compress.distillation.run import teacher_corpus
    from compress.pruning.plan import prune_run
    from compress.pruning.run import PruneJob
    from sportsllm.formats.huggingface.config import load_config
    from sportsllm.processors import set_threads
    from sportsllm.training.settings import Run, Start

    set_threads(threads)
    if recover.recover is None:
        check_not_given("--recover TOKENS", recover, corpora, distillation, lora, training)
    if vocabulary.vocab_size is not None or vocabulary.min_count is not None:
        others = (size, mixture, latent, recover)
        if any(group.given() for group in others) or choice.scores is not None:
            raise UsageError(
                "the vocabulary is cut alone, since the result no longer shares its teacher's tokens: cut it first "
                "(prune-vocabulary), fine-tune it with train CHECKPOINT, then prune that"
            )
        domain = list(calibration or teacher_corpus(checkpoint, "corpus"))
        return prune_vocabulary(checkpoint=checkpoint, out=out, calibration=domain, **vars(vocabulary))
    check_not_given("--vocab-size or --min-count", vocabulary)
    if mixture.experts is None and mixture.experts_per_token is None:
        check_not_given("--experts N", mixture)
    recovery = None
    if recover.recover is not None:
        source = recover.teacher or checkpoint
        run = Run(Start.PRUNED, load_config(checkpoint), lora.lora_rank is not None)
        config = training.config(run, recover.recover, seed=seed)
        recovery = Recovery(
            config=config,
            corpus=tuple(corpora.corpus or teacher_corpus(source, "corpus")),
            valid=tuple(corpora.valid or ([] if corpora.corpus else teacher_corpus(source, "valid"))),
            objective=distillation.config(Start.PRUNED, source),
            teacher=recover.teacher,
            adapters=lora.adapters(config.optimizer),
        )
    text = tuple(calibration or teacher_corpus(checkpoint, "corpus"))
    job = PruneJob(checkpoint, text, choice.config(seed), choice.scores, recovery, **mixture.given(), **latent.given())
    result = prune_run(job, size.target(), out, resume=training.resume)
    _print_result(out, result)
    return result


def _print_result(out: Path, result: dict[str, Any]) -> None:
    from sportsllm.console import output

    shape = ", ".join(f"{key} {value}" for key, value in result["shape"].items())
    output().print(
        f"{out}: {result['parameters']:,} parameters ({shape}), "
        f"{result['share_of_block_parameters']:.1%} of the non-embedding parameters"
    )
    cache, before = result["kv_cache_bytes_per_token"]["fp32"], result["kv_cache_bytes_per_token_before"]["fp32"]
    if cache != before:
        output().print(f"cache of {cache:,} bytes a token, {cache / before:.1%} of the {before:,} before (float32)")
    if result.get("valid_bits_per_byte"):
        output().print(
            f"bits per byte {result['bits_per_byte_before_recovery']:.4f} after the cut, "
            f"{result['valid_bits_per_byte']:.4f} recovered on {result['tokens']:,} tokens"
        )
