"""Shared by the training commands: batches, validation, settings, and the record of the result."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from sportsllm.console import say
from sportsllm.errors import UsageError
from sportsllm.inference.evaluate import score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.artifact import read_manifest
from sportsllm.text.packing import PackedSequences
from sportsllm.text.split import TextSplit
from sportsllm.text.tokenizer import TextTokenizer
from sportsllm.training.loop import TrainConfig, TrainResult, Validate

_VALIDATION_TOKENS = 65_536


def validator(corpus: TextSplit, tokenizer: TextTokenizer) -> Validate:
    """Bits per byte on the held-out documents, at most about 65,536 tokens of them."""

    def validate(model: SportsLLM) -> float:
        score = score_documents(
            TorchDecoder(model), tokenizer, corpus.held_out, max_tokens=_VALIDATION_TOKENS, description="validate"
        )
        return score.bits_per_byte

    return validate


def train_config(
    base: TrainConfig, tokens: int | None, overrides: Mapping[str, Any], settings: Sequence[str], parallel: bool = False
) -> TrainConfig:
    """A command's defaults changed by the flags that are not None and by `--set key=value` pairs.

    `tokens` stand instead of steps and are rounded up to whole ones. `parallel` tells whether the command's loss can
    be computed for several batches side by side.

    Raises:
        UsageError: an unknown key, a value of the wrong kind, or batches side by side where they cannot be.
    """
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    changes: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator or key not in fields:
            raise UsageError(f"--set {text}: write key=value with a key of {', '.join(fields)}")
        changes[key] = _parse(key, value, type(getattr(base, key)))
    config = dataclasses.replace(base, **changes)
    if tokens is not None:
        if "steps" in changes:
            raise UsageError("give --steps or --tokens, not both")
        config = dataclasses.replace(config, steps=-(-tokens // config.tokens_per_step))
    if config.parallel_batches > 1 and not parallel:
        raise UsageError(
            f"--set parallel_batches={config.parallel_batches}: is for train; students see their batches one after "
            "another, and `run --jobs` trains several students at a time"
        )
    return config


def _parse(key: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value not in ("true", "false"):
            raise UsageError(f"--set {key}={value}: write true or false")
        return value == "true"
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"--set {key}={value}: is not a valid {kind.__name__}") from None


def training_device() -> torch.device:
    """A CUDA GPU where there is one, which is said, else the CPU."""
    if torch.cuda.is_available():
        say(f"training on {torch.cuda.get_device_name()}")
        return torch.device("cuda")
    return torch.device("cpu")


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads in torch."""
    if threads:
        torch.set_num_threads(threads)


def training_results(model: SportsLLM, result: TrainResult, batches: PackedSequences) -> dict[str, Any]:
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


def held_out_files(directory: Path) -> list[Path]:
    """The held-out text that a directory's manifest names, as far as it is there."""
    return [path for path in map(Path, manifest_setting(directory, "valid") or []) if path.exists()]
