"""A PyTorch checkpoint behind the `Decoder` protocol."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import open_model
from sportsllm.inference.decoder import Logits, logits_at_once
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.layers import KVCache
from sportsllm.processors import find_device, set_threads

_SCORE_TOKENS = 8_192  # tokens in one scoring batch, padding included
_SCORE_CHUNK = 1_024  # tokens whose logits exist at once


class TorchDecoder:
    """`prefill`, `step` and `score` over a `SportsLLM`; sequences of one length share a forward pass and a cache."""

    def __init__(self, model: SportsLLM) -> None:
        self.model, self.config = model, model.config
        self._caches: list[tuple[list[int], KVCache]] = []  # sequences, and their cache

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None) -> Logits:
        """See `Decoder.prefill`."""
        context = self.config.max_position_embeddings
        length = min(max_length or context, context)
        by_length: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            if not 0 < len(row) <= length:
                raise UsageError(f"the prompt has {len(row)} tokens; between 1 and {length} fit the context")
            by_length.setdefault(len(row), []).append(number)
        device = self.model.device
        self._caches = [
            (members, KVCache(self.config, len(members), length, device=device)) for members in by_length.values()
        ]
        return self._forward(rows)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Logits:
        """See `Decoder.step`."""
        if not self._caches:
            raise UsageError("step without a prompt; call prefill first")
        return self._forward([[token] for token in tokens])

    def _forward(self, rows: Sequence[Sequence[int]]) -> Logits:
        logits_BV = np.empty((len(rows), self.config.vocab_size), dtype=np.float32)
        for members, cache in self._caches:
            tokens_BT = torch.tensor([list(rows[member]) for member in members], device=self.model.device)
            hidden_BTD = self.model.hidden(tokens_BT, cache=cache)
            logits_BV[members] = self.model.logits(hidden_BTD[:, -1]).float().cpu().numpy()
        return logits_BV

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """See `Decoder.score`. Rows of similar length share a batch; padding on the right changes nothing."""
        was_training = self.model.training
        self.model.eval()
        device = self.model.device
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

    def stream_logits(self, row: Sequence[int]) -> Iterator[Logits]:
        """See `Decoder.stream_logits`."""
        with torch.inference_mode():
            tokens_1T = torch.tensor([list(row)], device=self.model.device)
            hidden_TD = self.model.hidden(tokens_1T)[0]
        for part_TD in torch.split(hidden_TD, logits_at_once(self.config.vocab_size)):
            with torch.inference_mode():
                logits_TV: Logits = self.model.logits(part_TD).float().cpu().numpy()
            yield logits_TV

    def _next_token_scores(self, tokens_BT: torch.Tensor) -> npt.NDArray[np.float32]:
        hidden_ND = self.model.hidden(tokens_BT[:, :-1]).flatten(0, 1)
        targets_N = tokens_BT[:, 1:].flatten()
        chunks = []
        for start in range(0, len(hidden_ND), _SCORE_CHUNK):
            logits = self.model.logits(hidden_ND[start : start + _SCORE_CHUNK]).float()
            target = targets_N[start : start + _SCORE_CHUNK, None]
            chunks.append(logits.gather(1, target)[:, 0] - logits.logsumexp(dim=-1))
        scores: npt.NDArray[np.float32] = torch.cat(chunks).view(tokens_BT.shape[0], -1).cpu().numpy()
        return scores


def open(directory: Path, threads: int | None = None, provider: str = "cpu") -> TorchDecoder:
    """Load a checkpoint directory; see `sportsllm.inference.decoder.open_decoder`. Named like ONNX Runtime's own."""
    device = find_device(provider, f"{directory}: --provider")
    set_threads(threads)
    return TorchDecoder(open_model(directory).to(device))
