"""Shared by the training commands: batches, validation, settings, and the record of the result."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.formats.artifact import read_manifest
from sportsllm.formats.huggingface.config import load_config
from sportsllm.inference.evaluate import score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import preset
from sportsllm.text.packing import PackedSequences
from sportsllm.text.split import TextSplit
from sportsllm.text.tokenizer import TextTokenizer
from sportsllm.training.best_step import Validate, Validation
from sportsllm.training.loop import LoopResult
from sportsllm.training.settings import TrainConfig

HELD_OUT = "held_out"  # in a manifest: all that was held out, where that is more than `valid`
_VALIDATION_TOKENS = 65_536
_CHOOSING_TOKENS = 4_096, 32_768


def validator(corpus: TextSplit, tokenizer: TextTokenizer) -> Validate:
    """Bits per byte on the held-out text that is reported, at most about 65,536 tokens of it."""
    return _scorer(corpus.parts()[1], tokenizer, _VALIDATION_TOKENS)


def validation(corpus: TextSplit, tokenizer: TextTokenizer, config: TrainConfig, keep_start: bool) -> Validation | None:
    """How a run is judged; None if it has no steps. The best step is chosen on a sixteenth of the tokens it reads."""
    if not config.steps:
        return None
    least, most = _CHOOSING_TOKENS
    tokens = min(most, max(least, config.steps * config.tokens_per_step // 16))
    choosing, judging = corpus.parts()
    if choosing == judging:
        log("the held-out text is one short document: the best step is chosen on what is reported")
    judge = _scorer(judging, tokenizer, _VALIDATION_TOKENS)
    return Validation(_scorer(choosing, tokenizer, tokens), judge, keep_start)


def _scorer(documents: Sequence[str], tokenizer: TextTokenizer, tokens: int) -> Validate:
    def validate(model: SportsLLM) -> float:
        decoder = TorchDecoder(model)
        return score_documents(decoder, tokenizer, documents, max_tokens=tokens, description="validate").bits_per_byte

    return validate


def training_device() -> torch.device:
    """A CUDA GPU where there is one, which is said, else the CPU."""
    if torch.cuda.is_available():
        log(f"training on {torch.cuda.get_device_name()}")
        return torch.device("cuda")
    return torch.device("cpu")


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads in torch."""
    if threads:
        torch.set_num_threads(threads)


def shape_of(name: str) -> tuple[ModelConfig, list[Path]]:
    """The shape of a preset or of a directory's config.json, and the file it was read from, if any."""
    directory = Path(name)
    if directory.is_dir():
        return load_config(directory), [directory / "config.json"]
    return preset(name), []


def fit_vocabulary(shape: ModelConfig, vocab_size: int, name: str) -> ModelConfig:
    """A preset with the vocabulary of its tokenizer; logs a difference."""
    if vocab_size == shape.vocab_size:
        return shape
    log(f"{name}: the tokenizer has {vocab_size:,} entries, so the embedding has too (preset: {shape.vocab_size:,})")
    return shape.with_changes(vocab_size=vocab_size)


def check_sequence(sequence: int, config: ModelConfig) -> None:
    """Training sequences must fit the context."""
    if sequence > config.max_position_embeddings:
        raise UsageError(
            f"--sequence is {sequence}; the model's context is {config.max_position_embeddings}, use that or less"
        )


def training_results(model: SportsLLM, result: LoopResult, batches: PackedSequences) -> dict[str, Any]:
    """The keys that every training command reports."""
    return {
        "parameters": model.config.parameters,
        "tokens_per_parameter": round(result.tokens / model.config.parameters, 2),
        "epochs": round(result.tokens / batches.tokens_per_epoch, 2),
        **dataclasses.asdict(result),
    }


def manifest_setting(directory: Path, key: str) -> Any:
    """A setting that a directory's manifest records, or None."""
    if not (directory / "manifest.json").exists():
        return None
    return cast(Any, read_manifest(directory)["settings"].get(key))


def tokens_per_parameter(directory: Path) -> float | None:
    """How many tokens a parameter a checkpoint of `train` has read; None where that is not known."""
    if not (directory / "manifest.json").exists():
        return None
    manifest = read_manifest(directory)
    found = manifest["results"].get("tokens_per_parameter") if manifest["command"] == "train" else None
    return None if found is None or manifest["settings"].get("init") else float(found)


def held_out_files(directory: Path) -> list[Path]:
    """The held-out text that a directory's manifest names, as far as it is there."""
    named = manifest_setting(directory, HELD_OUT) or manifest_setting(directory, "valid") or []
    return [path for path in map(Path, named) if path.exists()]


def left_out(valid: Sequence[Path], *checkpoints: Path) -> tuple[Path, ...]:
    """What a training never reads: its own held-out text, and that of the checkpoints it learns from or starts from."""
    return tuple(dict.fromkeys([*valid, *(path for one in checkpoints for path in held_out_files(one))]))


def held_out_setting(valid: Sequence[Path], left: Sequence[Path]) -> dict[str, list[str]]:
    """For a manifest: `left_out`, where that is more than the `valid` which it names anyway."""
    return {HELD_OUT: [str(path) for path in left]} if set(left) - set(valid) else {}
