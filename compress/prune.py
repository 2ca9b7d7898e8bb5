"""The verb `prune`: a smaller model of the most important parts of a large one, refitted and recovered.

Resolve the inputs, calibrate, score the units, choose a shape, cut, refit, recover, write. Heavy imports are inside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.pruning.shapes import Shape, Target, fewer_experts
from sportsllm import options
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed import quantization_config
from sportsllm.results import TrainingResult
from sportsllm.settings import DISTILLATION, PRUNING, SIGNALS, STEPS, TEXT, TRAINING, parse_settings

if TYPE_CHECKING:
    from compress.pruning.job import Calibration, PruneJob
    from compress.pruning.search import Finalist
    from sportsllm.models.config import ModelConfig
    from sportsllm.models.language_model import SportsLLM
    from sportsllm.text.documents import Reading

_shape = partial(typer.Option, rich_help_panel="Shape")
_recovery = partial(typer.Option, rich_help_panel="Recovery")
_CUT = "cut.json"  # in an unfinished directory: what a resumed run need not find again


@dataclass(frozen=True, kw_only=True)
class PruneResult(TrainingResult):
    """A pruned checkpoint. Fields of a recovery, a search or a vocabulary cut are None without it.

    Attributes:
        shape: dimensions by name.
        share_of_block_parameters: share of the full model's non-embedding parameters that is kept.
        kv_cache_bytes_per_token, kv_cache_bytes_per_token_before: cache size by precision of the cache.
        calibration_tokens: number of calibration tokens.
        kept_layers: indices of the kept layers in the full model.
        layers_tried: loss without each run of layers that was a candidate.
        search: finalists, best first.
        bits_per_byte_before_recovery: quality of the pruned model, estimated from a part of the report split.
        vocab_size, vocab_size_before: tokens in the vocabulary after and before a vocabulary cut.
        tokens_per_byte_before, tokens_per_byte_after: around a vocabulary cut, of `--valid`, else calibration text.
        bits_per_byte_after: quality after a vocabulary cut; `bits_per_byte_before` is that before it.
    """

    shape: dict[str, int] = field(default_factory=dict)
    share_of_block_parameters: float = 1.0
    kv_cache_bytes_per_token: dict[str, int] = field(default_factory=dict)
    kv_cache_bytes_per_token_before: dict[str, int] = field(default_factory=dict)
    calibration_tokens: int | None = None
    kept_layers: list[int] = field(default_factory=list)
    layers_tried: list[dict[str, float]] = field(default_factory=list)
    search: list[JsonObject] = field(default_factory=list)
    bits_per_byte_before_recovery: float | None = None
    vocab_size: int | None = None
    vocab_size_before: int | None = None
    tokens_per_byte_before: float | None = None
    tokens_per_byte_after: float | None = None
    bits_per_byte_after: float | None = None


def prune(
    checkpoint: options.Checkpoint,
    *,
    out: options.Out,
    params: Annotated[float | None, typer.Option(help="Fraction of the non-embedding parameters to keep.")] = None,
    size_mb: Annotated[
        float | None, typer.Option("--size-mb", help="Size of the float32 weights to reach, in MB (10^6).")
    ] = None,
    recover: Annotated[
        int | None,
        typer.Option(parser=options.count, metavar="N", help="Tokens to distil from the unpruned model after the cut."),
    ] = None,
    corpus: options.Corpus = None,
    hidden: Annotated[int | None, _shape(min=1, help="Hidden channels to keep.")] = None,
    intermediate: Annotated[int | None, _shape(min=1, help="FFN neurons of each layer to keep.")] = None,
    heads: Annotated[int | None, _shape(min=1, help="Query heads of each layer to keep.")] = None,
    kv_heads: Annotated[int | None, _shape(min=1, help="Key/value heads; merged if --heads is not given.")] = None,
    head_dim: Annotated[int | None, _shape(min=2, help="Channels of each head to keep, an even number.")] = None,
    layers: Annotated[int | None, _shape(min=1, help="Layers to keep; one contiguous run is dropped.")] = None,
    experts: Annotated[
        int | None, _shape("--experts", min=1, help="Experts of each layer to keep, the strongest.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        _shape(
            min=1,
            help="Tokens to keep in model and tokenizer, those that the calibration text needs most. Cut alone.",
        ),
    ] = None,
    calibration: options.Calibration = None,
    search: Annotated[
        int | None,
        _recovery(
            parser=partial(options.count, least=0),
            metavar="N",
            help="With --params or --size-mb: recovery tokens of each finalist; 0: cut all widths by the same factor.",
            show_default="5% of --recover",
        ),
    ] = None,
    valid: options.Valid = None,
    settings: options.Settings = None,
    resume: options.Resume = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> PruneResult:
    """Cut width, depth, experts, key/value cache or vocabulary; the result is an ordinary checkpoint."""
    given = parse_settings(settings, PRUNING, STEPS, TRAINING, DISTILLATION, SIGNALS, TEXT)
    sizes = {"hidden": hidden, "intermediate": intermediate, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"layers": layers, "head_dim": head_dim}
    target = Target(params, size_mb, sizes, search, given.get("finalists", 3))
    _check_request(checkpoint, None if vocab_size is not None else target, experts)
    from compress.distillation.starts import plan_training
    from compress.distillation.student import StudentText
    from compress.pruning.job import Calibration, PruneJob
    from compress.pruning.scores import load_scores
    from compress.pruning.search import choose_shape
    from sportsllm.processors import use_processor
    from sportsllm.text.documents import recorded_text, take_reading
    from sportsllm.training.settings import Run, Start

    use_processor(threads, device)
    reading = take_reading(given, checkpoint)
    if recover is None:
        rare = [f"--set {name}" for name in given if name not in ("samples", "scores")]
        if names := ["--corpus"] * bool(corpus) + rare + ["--resume"] * resume + ["--seed"] * bool(seed):
            also = ", or give --calibration" if corpus else ""
            raise UsageError(f"options of --recover: {', '.join(names)}; add --recover TOKENS{also}, or leave them out")
    instead = "--calibration" if recover is None else "--corpus"  # --corpus is one of --recover's options
    text = tuple(calibration or corpus or recorded_text(checkpoint, "corpus", instead))
    if vocab_size is not None:
        others = (*sizes.values(), params, size_mb, recover, search, experts)
        if any(value is not None for value in others):
            raise UsageError(
                "the vocabulary is cut alone, since the result no longer shares its teacher's tokens: cut it first "
                "(prune --vocab-size), fine-tune the result (train CHECKPOINT), then prune that"
            )
        if given:
            raise UsageError(f"--set {', '.join(given)}: --vocab-size counts all of the calibration text; leave it out")
        return _prune_vocabulary(checkpoint, out, vocab_size, text, valid or [], reading)
    recovery = None
    if recover is not None:
        run = Run(Start.PRUNED, load_config(checkpoint))
        recovery = plan_training(run, checkpoint, recover, given, corpus, valid, seed, reading)
    elif valid is not None:
        raise UsageError("--valid scores a recovery or a smaller vocabulary: add --recover or --vocab-size, or omit it")
    scores = Path(given["scores"]) if "scores" in given else None
    job = PruneJob(checkpoint, text, given.get("samples"), scores, recovery, experts, reading)
    if scores is not None:
        load_scores(scores, job.model_config())  # refused before the calibration
    read = None if recovery is None else cache(partial(StudentText.read, recovery, out))
    work = Calibration(job, out.parent, text=read)
    shape, found = choose_shape(work, target, out, partial(_recovered, work))
    result = prune_checkpoint(work.job, shape, out, work, resume=resume, search=found)
    _print_result(result)
    return result


def _check_request(checkpoint: Path, target: Target | None, experts: int | None) -> None:
    """Refuse an impossible request before torch is loaded; `target` is None for a vocabulary."""
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized; prune the unquantized checkpoint, then quantize")
    config = load_config(checkpoint)
    if experts is not None:
        config = fewer_experts(config, experts)
    if target is not None:
        shape, _ = target.shape(config, whole=experts is not None)
        shape.applied_to(config)


def _recovered(work: Calibration, job: PruneJob, shape: Shape, out: Path) -> float:
    """Bits per byte of the text for choices, of a finalist of the search after a brief recovery."""
    return float(prune_checkpoint(job, shape, out, work, resume=True).best_bits_per_byte or 0.0)


def prune_checkpoint(
    job: PruneJob,
    shape: Shape,
    out: Path,
    work: Calibration | None = None,
    *,
    resume: bool = False,
    search: Sequence[Finalist] = (),
) -> PruneResult:
    """Prune a checkpoint directory to a shape: calibrate, score, cut, refit, recover, write.

    Args:
        work: what a search has calibrated and scored already.
        resume: continue an interrupted recovery, if there is one; nothing before it is done again.
        search: the finalists of the search that found the shape, for the results.
    """
    from compress.pruning.job import Calibration
    from sportsllm.files import has_state
    from sportsllm.formats.artifact import partial_directory, run_stage
    from sportsllm.formats.checkpoint import save_checkpoint
    from sportsllm.models.memory import kv_cache_bytes_per_token

    work = work or Calibration(job, out.parent)
    full, config, recovery = load_config(job.checkpoint), job.model_config(), job.recovery
    smaller = shape.applied_to(config)
    resume = resume and has_state(partial_directory(out))
    signals = None
    if recovery is not None:
        from compress.distillation.student import RunDirectory, StudentText, recover

        signals = recovery.prepare(smaller)
    stage = job.stage(shape)

    def make(directory: Path) -> JsonObject:
        started = time.perf_counter()
        text = None if recovery is None else (work.text or partial(StudentText.read, recovery, out))()
        network, cut = _cut(job, work, shape, directory, resume)
        training: JsonObject = {}
        if recovery is not None and text is not None:
            work.forget(refitted=bool(search))
            run = RunDirectory(directory, stage.identity(), resume)
            training = recover(network, recovery.matching_kept(cut["kept_layers"]), signals, run, text)
        seconds = time.perf_counter() - started
        save_checkpoint(directory, network, job.checkpoint)
        _note_loaders(job.checkpoint, directory, smaller)
        (directory / _CUT).unlink()
        return {
            "parameters": smaller.parameters,
            "share_of_block_parameters": smaller.block_parameters / full.block_parameters,
            "shape": shape.sizes(),
            "kv_cache_bytes_per_token": kv_cache_bytes_per_token(smaller),
            "kv_cache_bytes_per_token_before": kv_cache_bytes_per_token(full),
            **cut,
            **({"search": [finalist.row() for finalist in search]} if search else {}),
            **training,
            "seconds": seconds,
        }

    return PruneResult.of(run_stage(out, stage, make, resume))


def _cut(job: PruneJob, work: Calibration, shape: Shape, directory: Path, resume: bool) -> tuple[SportsLLM, JsonObject]:
    """The smaller model before its recovery, and what is known of the cut.

    Importance scores are written beside it. A resumed run gets a model whose weights the saved state will replace.
    """
    from compress.pruning.cut import PrunedModel, with_types
    from compress.pruning.scores import save_scores
    from sportsllm.files import atomic_write_text, read_json
    from sportsllm.models.language_model import SportsLLM

    full, kept = job.model_config(), directory / _CUT
    smaller = shape.applied_to(full)
    if resume and kept.exists():
        cut = read_json(kept)
        network = SportsLLM(with_types(smaller, full, cut["kept_layers"]))
        network.initialize(0)
        return network, cut
    if job.experts is None or shape != Shape.of(full):
        searched = work.job.search is not None and job.recovery is not None  # the weights that it was ranked by
        pruned = work.cut(smaller, work.split_samples()[1] if searched else work.samples, refit=True)
        if job.scores is None:
            save_scores(directory, work.scores)
    else:
        pruned = PrunedModel(work.model, list(range(full.num_hidden_layers)), [])
    cut = {
        "calibration_tokens": sum(sample.numel() for sample in work.samples),
        "kept_layers": pruned.layers,
        "layers_tried": [run._asdict() for run in pruned.tried],
    }
    atomic_write_text(kept, json.dumps(cut))
    return pruned.model, cut


def _prune_vocabulary(
    checkpoint: Path, out: Path, size: int, calibration: Sequence[Path], valid: Sequence[Path], reading: Reading
) -> PruneResult:
    """Cut the vocabulary, and nothing else."""
    from compress.pruning.vocabulary import prune_vocabulary
    from sportsllm.console import output

    result = PruneResult.of(prune_vocabulary(checkpoint, out, size, calibration, valid, reading))
    output().print(
        f"{out}: {result.vocab_size:,} of {result.vocab_size_before:,} tokens, {result.parameters:,} parameters; "
        f"{result.tokens_per_byte_before:.4f} -> {result.tokens_per_byte_after:.4f} tokens per byte"
    )
    if valid:
        output().print(f"bits per byte {result.bits_per_byte_before:.4f} -> {result.bits_per_byte_after:.4f} held out")
    return result


def _note_loaders(checkpoint: Path, directory: Path, config: ModelConfig) -> None:
    """Say which programs do not open the pruned model."""
    from sportsllm.console import log
    from sportsllm.files import read_json
    from sportsllm.formats.huggingface import OWN_MODEL_TYPE

    if config.hidden_size != config.query_size and config.attention_kind == "grouped_query":
        log(f"note: hidden size {config.hidden_size} is not heads x head_dim {config.query_size}; optimum needs that")
    before, after = (read_json(path / "config.json").get("model_type") for path in (checkpoint, directory))
    if after == OWN_MODEL_TYPE != before:
        log(
            f"note: {before} has no such shape, so model_type is {after}: this program and its exports run it, "
            "transformers does not open it; keep --heads and --head-dim whole for that"
        )


def _print_result(result: PruneResult) -> None:
    from sportsllm.console import output

    shape = ", ".join(f"{key} {value}" for key, value in result.shape.items())
    output().print(
        f"{result.out}: {result.parameters:,} parameters ({shape}), "
        f"{result.share_of_block_parameters:.1%} of the non-embedding parameters"
    )
    cache, before = result.kv_cache_bytes_per_token["fp32"], result.kv_cache_bytes_per_token_before["fp32"]
    if cache != before:
        output().print(f"cache of {cache:,} bytes per token, {cache / before:.1%} of the {before:,} before (float32)")
    if result.valid_bits_per_byte:
        output().print(
            f"bits per byte {result.bits_per_byte_before_recovery:.4f} after the cut, "
            f"{result.valid_bits_per_byte:.4f} recovered on {result.tokens:,} tokens{result.warning}"
        )
