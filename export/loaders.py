"""Which loaders open an export of a model. Imports no torch."""

from __future__ import annotations

from sportsllm.formats.huggingface.config import family_of
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_state


def caches_keys_and_values(config: ModelConfig) -> bool:
    """Whether a model caches what loaders other than this program's know."""
    return [state.name for state in block_state(config)] == ["key", "value"]


def not_opened_by(config: ModelConfig) -> str | None:
    """A line on the loaders that cannot open an export of a model; None where all can."""
    if not caches_keys_and_values(config):
        *others, last = (state.name for state in block_state(config))
        cached = f"{', '.join(others)} and {last}" if others else last
        return f"{cached} vectors are cached, which no other loader knows: the export runs in this program alone"
    if family_of(config) is None:
        return (
            "config.json: this mix of parts is of no family that Hugging Face's loaders know; optimum and "
            "transformers.js cannot open the export, onnxruntime-genai and this program can"
        )
    return None
