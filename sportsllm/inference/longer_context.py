"""Opens a model to score text in windows of another length than it was trained with."""

import math
from pathlib import Path

from sportsllm.errors import UsageError
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.model_directory import checkpoint_with
from sportsllm.inference.decoder import Decoder, is_onnx_directory, open_decoder
from sportsllm.models.config import ModelConfig
from sportsllm.models.rope import LONGEST, with_rope_scaling

UNSCALED = "none"
"""Of `--rope-scaling`: longer windows with the rotary table that goes on as it is."""


def open_with_context(
    directory: Path,
    context: int | None,
    scaling: str | None,
    threads: int | None = None,
    kernels: str = "auto",
    provider: str = "cpu",
) -> Decoder:
    """As `open_decoder`, for windows of `context` tokens.

    Args:
        context: the longest that `scaling` allows where it is not given.
        scaling: see `sportsllm.models.rope.with_rope_scaling`, or `UNSCALED`.

    Raises:
        UsageError: the context is beyond what the model reads, or the scaling is not possible.
    """
    if context is None and scaling is None:
        return open_decoder(directory, threads, kernels, provider)
    if scaling is not None and is_onnx_directory(directory):
        raise UsageError(
            f"--rope-scaling: the rotary table of {directory} is in its graph; export the checkpoint with "
            "--rope-scaling, or score the checkpoint"
        )
    config = load_config(directory)
    longest = _longest(directory, config, context, scaling)
    with checkpoint_with(directory, longest) as source:
        decoder = open_decoder(source, threads, kernels, provider)
    decoder.config = longest.with_changes(max_position_embeddings=context or longest.max_position_embeddings)
    return decoder


def _longest(directory: Path, config: ModelConfig, context: int | None, scaling: str | None) -> ModelConfig:
    """The model with the longest context that it is asked to read."""
    own = config.max_position_embeddings
    if config.position_kind == "none" and scaling is None and context is not None:
        return config.with_changes(max_position_embeddings=max(own, context))  # nothing depends on it
    if config.position_kind != "rotary" and context is not None and context > own:
        raise UsageError(
            f"--context {context:,}: {directory} has learned positions for {own:,} tokens; give at most that"
        )
    if scaling == UNSCALED:
        if context is None or context > LONGEST:
            raise UsageError(f"--rope-scaling none: say how far to read with --context N, at most {LONGEST:,}")
        return config.with_changes(max_position_embeddings=max(own, context))
    longest = config if scaling is None else with_rope_scaling(config, scaling)
    reach = longest.max_position_embeddings
    if context is not None and context > reach:
        factor = math.ceil(context / own * (config.rope_scaling.factor if config.rope_scaling else 1))
        if is_onnx_directory(directory):
            advice = f"export the checkpoint with --rope-scaling yarn:{factor}"
        elif config.rope_scaling is not None:
            advice = "give at most that, or --rope-scaling none to go on as the model is"
        else:
            advice = f"give --rope-scaling yarn:{factor}, or --rope-scaling none to read on without"
        by = f" with --rope-scaling {scaling}" if scaling is not None else ""
        raise UsageError(f"--context {context:,}: {directory} reads {reach:,} tokens{by}; {advice}")
    return longest
