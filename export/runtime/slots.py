"""One model for several sequences at once: slots of one key/value cache, for `serve`.

Shape suffixes: B slots that are decoded together, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from export.runtime.decoder import OnnxDecoder
from export.runtime.kv_cache import Array
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.decoder import Logits


class SlotDecoder(OnnxDecoder):
    """An exported model whose cache has a slot for each running sequence.

    A slot reads its prompt alone, since the operator takes a batch only for single tokens; neighbouring slots are then
    decoded together. What a slot holds can be saved, restored in another one, and so shared by sequences that begin
    alike. See `sportsllm.serving.engine.Slots`.
    """

    def __init__(
        self, directory: Path, slots: int, room: int | None, threads: int | None, kernels: str = "auto"
    ) -> None:
        """Open an export for `slots` sequences of up to `room` tokens, or of the model's context.

        Raises:
            UsageError: more tokens than the model's context.
            ArtifactError, ResourceError, UsageError: see `export.runtime.decoder.open`.
        """
        context = load_config(directory).max_position_embeddings
        if room is not None and room > context:
            raise UsageError(f"--context {room} is more than the context of {directory}, {context}")
        super().__init__(directory, threads, kernels=kernels)
        self.slots, self.room = slots, room or context
        self._slots = self._make_cache(slots, self.room)
        self.recurrent = bool(self._slots.states)

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        return self._slots.lengths[slot]

    def clear(self, slot: int) -> None:
        """Forget what a slot holds."""
        self._slots.keep([0 if row == slot else length for row, length in enumerate(self._slots.lengths)])

    def read_slot(self, slot: int, tokens: Sequence[int], every: bool = False) -> Logits:
        """Read further tokens of one slot; returns the logits after the last, (1, V), or after `every` one, (T, V)."""
        ids = self._checked(tokens, self.room - self.length(slot))
        logits_TV = np.empty((len(ids) if every else 1, self.config.vocab_size), dtype=np.float32)
        self._run(self._slots, slice(slot, slot + 1), ids[None], logits_TV[None], keep=0 if every else 1)
        return logits_TV

    def step_slots(self, first: int, tokens: Sequence[int]) -> Logits:
        """Read one token in each of the slots from `first`; returns the logits, (B, V), until the next call."""
        return self._step(self._slots, tokens, first)

    def view(self, slot: int) -> list[Array]:
        """What a slot holds, without a copy."""
        length, cache = self.length(slot), self._slots
        return [
            buffer[slot] if name in cache.states else buffer[slot, ..., :length, :]
            for name, buffer in cache.buffers.items()
        ]

    def restore(self, slot: int, saved: Sequence[Array], length: int) -> None:
        """Let a slot hold the first `length` tokens of a view or of its copy; a recurrent state cannot be cut."""
        for (name, buffer), array in zip(self._slots.buffers.items(), saved, strict=True):
            if name in self._slots.states:
                buffer[slot] = array
            else:
                buffer[slot, ..., :length, :] = array[..., :length, :]
        self._slots.lengths[slot] = length

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first tokens of a slot."""
        self._slots.lengths[slot] = length

    def move(self, source: int, target: int) -> None:
        """Let one slot hold what another holds."""
        self.restore(target, self.view(source), self.length(source))
