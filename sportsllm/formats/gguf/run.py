"""A GGUF file as a stage: a checkpoint directory in Hugging Face's layout."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from sportsllm.errors import UsageError
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.checkpoint import write_checkpoint
from sportsllm.formats.gguf.config import architecture, read_config
from sportsllm.formats.gguf.file import open_gguf
from sportsllm.formats.gguf.tokenizer import write_tokenizer
from sportsllm.formats.gguf.weights import read_weights
from sportsllm.models.config import ModelConfig
from sportsllm.text.tokenizer import load_tokenizer


def _shortened(config: ModelConfig, context: int | None) -> ModelConfig:
    most = config.max_position_embeddings
    if context is not None and context > most:
        raise UsageError(f"--context is {context}; the model was trained for at most {most} tokens")
    return config.with_changes(max_position_embeddings=context or most)


def import_gguf(source: Path, out: Path, context: int | None = None) -> dict[str, Any]:
    """Write the model of a GGUF file as a float32 checkpoint with its tokenizer.

    Args:
        source: a file of one of `sportsllm.formats.gguf.config.READ_ARCHITECTURES`, in any format that `gguf` reads.
        out: the directory to make.
        context: the longest sequence in tokens, where less than the model's own is enough.

    Returns:
        The results, as `import --json` prints them.

    Raises:
        UsageError: `context` is longer than the model's own.
        ArtifactError: cut short or damaged, another architecture, an unknown tokenizer, a tensor too few or too many.
    """

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        file = open_gguf(source)
        config = _shortened(read_config(file), context)
        write_tokenizer(file, directory)
        load_tokenizer(directory, config)
        write_checkpoint(directory, config, read_weights(file, config))
        bytes_of: Counter[str] = Counter()
        for tensor in file.tensors.values():
            bytes_of[tensor.tensor_type.name] += int(tensor.n_bytes)
        return {
            "name": file.value_or(None, "general.name", str),
            "license": file.value_or(None, "general.license", str),
            "architecture": architecture(file),
            "formats": [name for name, _ in bytes_of.most_common()],
            "parameters": config.parameters,
            "vocab_size": config.vocab_size,
            "source_bytes": source.stat().st_size,
            "seconds": time.perf_counter() - started,
        }

    return run_stage(out, Stage("import", {"source": source, "context": context}, [source]), make)
