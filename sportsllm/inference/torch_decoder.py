"""A PyTorch checkpoint behind the `Decoder` protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.decoder import Logits
from sportsllm.models.attention import KVCache
from sportsllm.models.language_model import SportsLLM

_SCORE_TOKENS = 8_192  # tokens in one scoring batch, padding included
_SCORE_CHUNK = 1_024  # tokens whose logits exist at once


class TorchDecoder:
    """`prefill`, `step` and `score` over a `SportsLLM`; each sequence has its own cache."""

    def __init__(self, model: SportsLLM) -> None:
        self.model, self.config = model, model.config
        self._caches: list[KVCache] = []

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None) -> Logits:
        """See `Decoder.prefill`."""
        context = self.config.max_position_embeddings
        length = min(max_length or context, context)
        for row in rows:
            if not 0 < len(row) <= length:
                raise UsageError(f"the prompt has {len(row)} tokens; between 1 and {length} fit the context")
        self._caches = [KVCache(self.config, 1, length) for _ in rows]
        return np.concatenate([self._forward(row, cache) for row, cache in zip(rows, self._caches, strict=True)])

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Logits:
        """See `Decoder.step`."""
        return np.concatenate([self._forward([t], c) for t, c in zip(tokens, self._caches, strict=True)])

    def _forward(self, tokens: Sequence[int], cache: KVCache) -> Logits:
        hidden = self.model.hidden(torch.tensor([list(tokens)]), cache=cache)
        return cast(Logits, self.model.logits(hidden[:, -1]).float().numpy())

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """See `Decoder.score`. Rows of like length share a batch; padding at the right changes nothing."""
        was_training = self.model.training
        self.model.eval()
        device = self.model.head_weight.device
        results: list[npt.NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(rows)
        order = sorted((i for i, row in enumerate(rows) if len(row) > 1), key=lambda i: len(rows[i]))
        while order:
            longest = len(rows[order[-1]])
            members = order[-max(1, _SCORE_TOKENS // longest) :]
            del order[-len(members) :]
            tokens = torch.zeros(len(members), longest, dtype=torch.long, device=device)
            for position, member in enumerate(members):
                tokens[position, : len(rows[member])] = torch.tensor(list(rows[member]))
            scores = self._next_token_scores(tokens)
            for position, member in enumerate(members):
                results[member] = scores[position, : len(rows[member]) - 1]
        self.model.train(was_training)
        return results

    def _next_token_scores(self, tokens_BT: torch.Tensor) -> npt.NDArray[np.float32]:
        hidden_ND = self.model.hidden(tokens_BT[:, :-1]).flatten(0, 1)
        targets_N = tokens_BT[:, 1:].flatten()
        pieces = []
        for start in range(0, len(hidden_ND), _SCORE_CHUNK):
            logits = self.model.logits(hidden_ND[start : start + _SCORE_CHUNK]).float()
            target = targets_N[start : start + _SCORE_CHUNK, None]
            pieces.append(logits.gather(1, target)[:, 0] - logits.logsumexp(dim=-1))
        scores = torch.cat(pieces).view(tokens_BT.shape[0], -1)
        return cast("npt.NDArray[np.float32]", scores.cpu().numpy())


def open(directory: Path, threads: int | None = None) -> TorchDecoder:  # named like the ONNX runtime's own
    """Load a checkpoint directory; see `sportsllm.inference.decoder.open_decoder`."""
    if threads:
        torch.set_num_threads(threads)
    return TorchDecoder(load_checkpoint(directory))
