"""Which experts the router of a mixture chooses for a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.experts import MixtureOfExperts, route
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.tokenizer import TextTokenizer


def mixtures(model: SportsLLM) -> dict[int, MixtureOfExperts]:
    """The mixtures of experts, by layer.

    Raises:
        UsageError: the model has none.
    """
    feed_forwards = [block.mlp for block in model.model.layers]
    found = {layer: mlp for layer, mlp in enumerate(feed_forwards) if isinstance(mlp, MixtureOfExperts)}
    if not found:
        raise UsageError("--experts: the model has none; give a mixture, such as one trained from tiny-experts")
    return found


@torch.inference_mode()
def count_choices(
    model: SportsLLM, tokenizer: TextTokenizer, documents: Iterable[str], most_tokens: int, description: str
) -> tuple[dict[int, Tensor], int]:
    """How often each expert of each layer is chosen.

    Args:
        model: in evaluation mode; read, never changed.
        documents: each is read from its begin token, in pieces of at most the context.
        most_tokens: reading stops at this many.
        description: of the progress bar.

    Returns:
        For each layer with experts (N,) choices, as many a token as experts are active; and the tokens that were read,
        begin tokens included.

    Raises:
        UsageError: the model has no experts.
        ArtifactError: there is no text.
    """
    found, context = mixtures(model), model.config.max_position_embeddings
    counts = {
        number: torch.zeros(mixture.config.chosen_experts.count, dtype=torch.long) for number, mixture in found.items()
    }

    def counting(number: int) -> Callable[..., None]:
        def hook(mixture: MixtureOfExperts, given: tuple[Tensor, ...]) -> None:
            chosen_XK = route(mixture, given[0].flatten(0, 1))[1]
            counts[number] += torch.bincount(chosen_XK.flatten(), minlength=len(counts[number])).cpu()

        return hook

    handles = [mixture.register_forward_pre_hook(counting(number)) for number, mixture in found.items()]
    read = 0
    try:
        with progress_bar(description, most_tokens) as bar:
            for text in documents:
                words = tokenizer.encode(text)
                for start in range(0, len(words), context - 1):
                    ids = [tokenizer.begin_id, *words[start : start + context - 1]][: most_tokens - read]
                    model.hidden(torch.tensor([ids], device=model.head_weight.device))
                    read += len(ids)
                    bar.advance(len(ids))
                    if read >= most_tokens:
                        return counts, read
    finally:
        for handle in handles:
            handle.remove()
    if not read:
        raise ArtifactError(f"{description}: the text is empty; give a file with text in it")
    return counts, read
