"""The interface of a language model to `generate`, `eval` and `bench`, whatever runs it.

Shape suffixes: B sequences, T tokens, V vocabulary. Arrays are numpy's, so that a device needs no torch.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from sportsllm.errors import UsageError
from sportsllm.files import require_directory
from sportsllm.models.config import ModelConfig

Logits = npt.NDArray[np.float32]


class Decoder(Protocol):
    """A causal language model with a key/value cache."""

    config: ModelConfig

    def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None) -> Logits:
        """Forget the cache, read one prompt per sequence, and return the logits after its last token, (B, V).

        Args:
            rows: token ids of each prompt; lengths may differ.
            max_length: room to keep in the cache, prompt included; the context length by default.
        """

    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one further token per sequence and return the logits after it, (B, V)."""

    def score(self, rows: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Natural-log probability of every token given those before it, per row; shape (len(row) - 1,).

        Neither reads nor changes the cache.
        """


def is_onnx_directory(directory: Path) -> bool:
    """Whether `directory` holds an export rather than a PyTorch checkpoint."""
    return (directory / "model.onnx").exists() or bool(web_graphs(directory))


def web_graphs(directory: Path) -> list[Path]:
    """Graphs where transformers.js looks for them; none in a directory with PyTorch weights."""
    return [] if any(directory.glob("*.safetensors")) else sorted((directory / "onnx").glob("model*.onnx"))


def open_decoder(directory: Path, threads: int | None = None, kernels: str = "auto", provider: str = "cpu") -> Decoder:
    """Open a checkpoint (PyTorch) or an export (ONNX Runtime) for generation and scoring.

    Args:
        directory: a checkpoint or an export.
        threads: CPU threads; the library chooses by default.
        kernels: for an export, `auto`, `native` or `portable`: see `export.runtime.kernels`.
        provider: for an export, `cpu` or another: see `export.runtime.providers`.

    Raises:
        ArtifactError: no such directory, or its files are damaged.
        UsageError: kernels or a provider for a checkpoint, kernels for a graph that calls none, an unknown provider.
        ResourceError: `native` but the kernels are not built, or a provider that is not installed or does not start.
    """
    require_directory(directory, "a checkpoint or an export")
    # By name, so that this package depends neither on `export` nor, on a device, on torch.
    if is_onnx_directory(directory):
        runtime = importlib.import_module("export.runtime.decoder")
        return cast(Decoder, runtime.open(directory, threads, kernels, provider))
    if provider != "cpu":
        raise UsageError(f"--provider {provider}: {directory} is a checkpoint, which PyTorch runs; export it first")
    if kernels != "auto":
        raise UsageError(f"--kernels {kernels}: {directory} is a checkpoint, which PyTorch runs; export it first")
    return cast(Decoder, importlib.import_module("sportsllm.inference.torch_decoder").open(directory, threads))


def kernels_of(decoder: Decoder) -> tuple[str, str] | None:
    """What runs an export, `native` or `portable`, and a line for people; None for a checkpoint, which PyTorch runs."""
    chosen = getattr(decoder, "kernels", None)
    return None if chosen is None else (chosen.name, str(chosen))


def placement_of(decoder: Decoder) -> tuple[dict[str, Any], str] | None:
    """Where an export's nodes run, and a line for people; None on the CPU provider, and for a checkpoint."""
    found = getattr(decoder, "placement", None)
    return None if found is None else (found.to_dict(), str(found))


def log_runtime(decoder: Decoder) -> tuple[str | None, dict[str, Any] | None]:
    """Log what runs an export and where its nodes run; returns the kernels' name and the placement, None if none."""
    from sportsllm.console import log  # not in a measured process, whose memory counts

    kernels, placement = kernels_of(decoder), placement_of(decoder)
    for found in (kernels, placement):
        if found is not None:
            log(found[1])
    return kernels and kernels[0], placement and placement[0]


def log_softmax(logits: Logits) -> Logits:
    """Natural-log probabilities along the last axis, computed in float64 and stable for large logits."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return cast(Logits, (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(np.float32))
