"""The interface of a language model to `generate`, `eval` and `bench`, whatever runs it.

Shape suffixes: B sequences, T tokens, V vocabulary. Arrays are numpy's, so that a device needs no torch.
"""

import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject, require_directory
from sportsllm.inference.lookup import Draft
from sportsllm.models.config import ModelConfig

Logits = npt.NDArray[np.float32]


def logits_at_once(vocab_size: int) -> int:
    """Tokens whose logits `stream_logits` holds at once: 128, or fewer, so that they take 32 MB at most."""
    return max(1, min(128, 2**23 // vocab_size))


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

    def stream_logits(self, row: Sequence[int]) -> Iterator[Logits]:
        """Logits after every token of a sequence, in order: (`logits_at_once`, V), the last may be shorter.

        The next array may overwrite the one before. Neither reads nor changes the cache.
        """


class Verifier(Decoder, Protocol):
    """A decoder that reads several tokens of one sequence at once and can take the last ones back.

    Attributes:
        exact_rows: so many tokens have the same logits, bit by bit, as if they were read one by one.
    """

    exact_rows: int

    def read(self, tokens: Sequence[int]) -> Logits:
        """Read further tokens of the only sequence; returns the logits after each, (T, V)."""

    def rewind(self, count: int) -> None:
        """Forget the last tokens of the only sequence."""


def is_onnx_directory(directory: Path) -> bool:
    """Whether `directory` holds an export rather than a PyTorch checkpoint."""
    return (directory / "model.onnx").exists() or bool(web_graphs(directory))


def web_graphs(directory: Path) -> list[Path]:
    """Graphs where transformers.js looks for them; none in a directory with PyTorch weights."""
    return [] if any(directory.glob("*.safetensors")) else sorted((directory / "onnx").glob("model*.onnx"))


def open_decoder(directory: Path, threads: int | None = None, kernels: str = "auto", provider: str = "cpu") -> Decoder:
    """Open a checkpoint (PyTorch) or an export (ONNX Runtime) for generation and scoring.

    Args:
        kernels: for an export, `auto`, `native` or `portable`: see `export.runtime.session`.
        provider: for an export, `cpu` or another: see `export.runtime.providers`; of PyTorch for a checkpoint.

    Raises:
        ArtifactError: no such directory, or its files are damaged.
        UsageError: kernels for a checkpoint or for a graph that calls none, an unknown provider or device.
        ResourceError: `native` but the kernels are not built, or a provider that is not installed or does not start.
    """
    require_directory(directory, "a checkpoint or an export")
    # By name, so that this package depends neither on `export` nor, on a device, on torch.
    if is_onnx_directory(directory):
        decoder: Decoder = importlib.import_module("export.runtime.decoder").open(directory, threads, kernels, provider)
        return decoder
    if kernels != "auto":
        raise UsageError(f"--kernels {kernels}: {directory} is a checkpoint, which PyTorch runs; export it first")
    decoder = importlib.import_module("sportsllm.inference.torch_decoder").open(directory, threads, provider)
    return decoder


def open_draft(
    directory: Path, target: Path, decoder: Decoder, threads: int | None = None, kernels: str = "auto"
) -> Draft:
    """Open an export whose choices are proposed to the one in `target`.

    Raises:
        UsageError: a checkpoint, other tokens than the target's, or a target that reads tokens one by one.
        ArtifactError, ResourceError, UsageError: see `open_decoder`.
    """
    from sportsllm.text.tokenizer import load_tokenizer

    if not is_onnx_directory(directory):
        raise UsageError(f"--draft {directory}: not an export; make one of a checkpoint with `export`")
    if getattr(decoder, "exact_rows", 1) == 1:
        needed = "that takes INT4 or INT8 blocks, native kernels, and neither selected tokens nor an LSTM"
        raise UsageError(f"--draft: {target} cannot check several tokens in one step; {needed}")
    draft = open_decoder(directory, threads, kernels)
    if load_tokenizer(directory, draft.config).fingerprint() != load_tokenizer(target, decoder.config).fingerprint():
        raise UsageError(f"--draft {directory}: its tokenizer or chat template is not that of {target}")
    ours, theirs = draft.config.vocab_size, decoder.config.vocab_size
    if ours != theirs:  # rows beyond the tokenizer's tokens, which either could choose
        raise UsageError(f"--draft {directory}: its vocabulary has {ours} rows, that of {target} {theirs}")
    return cast(Draft, draft)


def kernels_of(decoder: Decoder) -> tuple[str, str] | None:
    """What runs an export, `native` or `portable`, and a line for people; None for a checkpoint, which PyTorch runs."""
    chosen = getattr(decoder, "kernels", None)
    return None if chosen is None else (chosen.name, str(chosen))


def placement_of(decoder: Decoder) -> tuple[JsonObject, str] | None:
    """Where an export's nodes run, and a line for people; None on the CPU provider, and for a checkpoint."""
    found = getattr(decoder, "placement", None)
    return None if found is None else (found.to_dict(), str(found))


def log_runtime(decoder: Decoder, provider: str) -> JsonObject:
    """Log what runs an export and where its nodes run; returns the results' `kernels`, `provider` and `placement`."""
    from sportsllm.console import log  # not in a measured process, whose memory counts

    kernels, placement = kernels_of(decoder), placement_of(decoder)
    for found in (kernels, placement):
        if found is not None:
            log(found[1])
    return {
        "kernels": kernels and kernels[0],
        "provider": kernels and provider,
        "placement": placement and placement[0],
    }


def log_probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    """Natural-log probabilities along the last axis, stable for large logits."""
    shifted: npt.NDArray[np.float64] = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def log_softmax(logits: Logits) -> Logits:
    """`log_probabilities` in float32."""
    return log_probabilities(logits).astype(np.float32)


def require_finite(figure: float, model: str = "the model") -> None:
    """Refuse a figure of logits that are infinite or no numbers: of those every choice is arbitrary.

    Raises:
        ArtifactError: the figure is not finite.
    """
    if not math.isfinite(figure):
        raise ArtifactError(
            f"{model}'s logits are not finite: its weights are damaged, or its activations overflow the type "
            "that it computes or caches in; use float32"
        )
