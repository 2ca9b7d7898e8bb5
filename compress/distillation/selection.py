"""A model that attends to selected tokens only, made of one that attends to all; its indexer learns first.

It starts from the model's own queries and keys (`compress.pruning.indexer`). Then, as DeepSeek-V3.2 does it
(https://arxiv.org/abs/2512.02556), the indexer learns the distribution of full attention, while all other weights stay;
then the whole model trains with the selection on, and the indexer with it, each by its own loss.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from compress.distillation.starts import Checkpoint, Start
from compress.distillation.student_training import StudentText, StudentTraining
from sportsllm.console import log
from sportsllm.errors import InterruptedRun, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.models.attention_kinds import INDEX, Selection
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.selection import Document, SelectedAttention, kept_attention, selected_attention
from sportsllm.processors import training_device
from sportsllm.text.packing import Batch, PackedSequences, tokenize
from sportsllm.training import settings
from sportsllm.training.loop import train_model

DEFAULT_TOKENS = 1_000_000
"""Of the training behind, where no length is given."""
# Times AdamW's rate for random weights. tiny-1m with 8 key heads, from their closed form, 131,072 tokens: 0.0034 nats a
# token and layer from full attention before, 0.0025 after; ten times this rate 0.0114, a tenth of it 0.0027.
_INDEX_RATIO = 1 / 300
_INDEX_PARTS = 2
# Heads of 32 pairs choose as well by the slower half of them as by all; of 16 pairs the half keeps 93.5% of the
# attention that the best choice keeps, all of them 100%.
_LEAST_PAIRS = 16
_START_PIECES, _START_LENGTH = 16, 1_024
_JUDGED = 2  # documents that tell how much attention a choice keeps


Begin = Callable[[SportsLLM, SportsLLM, Sequence[Tensor]], None]
"""Sets the indexer of a model, given the same with full attention and calibration token ids, (1, T) each."""


@dataclass(frozen=True)
class Selecting(Checkpoint):
    """A student of a checkpoint's weights and an indexer, set by `begin`, which learns from `index_tokens` tokens of
    the corpus.
    """

    name: ClassVar[str] = "selection"
    # The model is to stay what it was, as after rounding, rather than to learn more.
    kind: ClassVar[settings.Start] = settings.Start.QUANTIZED
    begin: Begin
    index_tokens: int = 0

    def record(self) -> dict[str, Any]:
        return {
            "selection": dataclasses.asdict(self.shape.chosen_selection),
            "index_tokens": self.index_tokens,
        }

    def build(self, training: StudentTraining, text: StudentText) -> tuple[SportsLLM, StudentTraining]:
        """The student before training, its indexer trained."""
        selection, sequence = self.shape.chosen_selection, training.config.sequence
        longest = int(np.diff(text.documents.ends, prepend=0).max())
        if min(longest, sequence) <= selection.tokens:
            what = f"--sequence is {sequence}" if sequence <= longest else f"the longest document has {longest} tokens"
            raise UsageError(f"--select-tokens {selection.tokens}: {what}, all of which are selected; use longer ones")
        student = with_indexer(load_checkpoint(self.inputs[0]), self.shape, training.config.seed)
        pieces = spread_pieces(text, min(sequence, _START_LENGTH))
        self.begin(student, with_full_attention(student, sequence), pieces)
        learn_if_better(student, training, text, self.index_tokens)
        say_what_is_kept(student, text, sequence)
        return student, training


def selecting(start: Start, sizes: Mapping[str, int | None], begin: Begin, index_tokens: int = 0) -> Selecting:
    """The start of a student that is to select tokens.

    Args:
        start: what --student, --init and --start ask for.
        sizes: of the `Selection`; those that are None get their usual ones, of the indexer as many heads as the model
            has and two parts of half the rotary pairs.
        begin: sets the indexer.
        index_tokens: to teach it on.

    Raises:
        UsageError: there are no weights to start from, or their attention is of another kind.
    """
    if not isinstance(start, Checkpoint):
        raise UsageError("--select-tokens starts from trained weights; leave --student and --start out, or give --init")
    if start.shape.attention_kind != "grouped_query":
        kind = start.shape.attention_kind
        raise UsageError(
            f"--select-tokens: {start.inputs[0]} has {kind} attention; it is for grouped-query attention to all tokens"
        )
    keys, pairs = start.shape.num_key_value_heads, start.shape.head_dim // 2
    given = {name: size for name, size in sizes.items() if size is not None}
    usual_sizes = {"heads": start.shape.num_attention_heads, "parts": min(_INDEX_PARTS, keys)}
    usual_sizes["pairs"] = min(pairs, max(_LEAST_PAIRS, pairs // 2))
    selection = Selection(**usual_sizes | given)
    if selection.parts > keys:
        raise UsageError(f"--index-parts is {selection.parts}; the model has {keys} key heads, more tell nothing more")
    if selection.pairs is not None and selection.pairs > pairs:
        raise UsageError(f"--index-pairs is {selection.pairs}; a head has {pairs}")
    try:
        shape = start.shape.with_changes(attention_kind="selected", selection=selection)
    except UsageError as error:
        raise UsageError(f"--select-tokens {selection.tokens}: {error}") from None
    if selection.tokens >= shape.max_position_embeddings:
        raise UsageError(
            f"--select-tokens is {selection.tokens}, the context {shape.max_position_embeddings}: nothing would be "
            "left out; choose fewer"
        )
    return Selecting(shape, start.inputs, begin, index_tokens)


def with_indexer(model: SportsLLM, shape: ModelConfig, seed: int) -> SportsLLM:
    """A model of `shape` with the weights of one that attends to all tokens, and a fresh indexer."""
    student = SportsLLM(shape)
    student.initialize(seed)
    missing = student.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert all(name.split(".")[-2] in INDEX for name in missing), "a selection adds the indexer alone"
    return student


def learn_index(student: SportsLLM, training: StudentTraining, text: StudentText, tokens: int) -> None:
    """Teach a model's indexer which blocks its own full attention looks at, in place; nothing else changes.

    Args:
        student: on the CPU.
        training: its sequence, batch and seed are used.
        text: of the training.
        tokens: to read, rounded up to whole steps; 0 leaves the indexer as it is.
    """
    if not tokens:
        return
    shape = student.config
    model = with_full_attention(student, training.config.sequence)
    model.requires_grad_(False)
    for attention in selected_attention(model):
        attention.index_q_proj.requires_grad_(True)
        attention.index_k_proj.requires_grad_(True)
    steps = -(-tokens // (training.config.batch_size * training.config.sequence))
    rate = _INDEX_RATIO * settings.peak_rates(settings.Run(settings.Start.RANDOM, shape))[0]
    config = dataclasses.replace(
        training.config, steps=steps, accumulation=1, learning_rate=rate, optimizer="adamw", optimizer_bits=32,
        warmup=min(20, steps // 10), weight_decay=0.0, validate_every=0, try_rates=False, checkpoint_activations=False,
    )  # fmt: skip
    batches = PackedSequences(text.documents, config.sequence, config.batch_size, config.seed)
    model.to(training_device())
    with TemporaryDirectory() as folder:
        try:
            result = train_model(model, batches, _own_losses, config, Path(folder), description="indexer")
        except InterruptedRun:
            raise InterruptedRun("interrupted while the indexer learned; run the same command again") from None
    student.load_state_dict(model.state_dict())
    if result.loss is not None:
        log(f"the indexer is {result.loss / shape.num_hidden_layers:.4f} nats a layer from full attention")


def learn_if_better(student: SportsLLM, training: StudentTraining, text: StudentText, tokens: int) -> None:
    """`learn_index` for an indexer that chooses well already: where it then keeps less attention, it stays what it was.

    Judged on held-out text, where that has documents long enough.
    """
    if not tokens:
        return
    sequences = long_sequences(text, student.config.chosen_selection.tokens, training.config.sequence)
    before, state = attention_kept(student, sequences), copy.deepcopy(student.state_dict())
    learn_index(student, training, text, tokens)
    after = attention_kept(student, sequences)
    if before is not None and after is not None and after[0] < before[0]:
        student.load_state_dict(state)
        log(f"its choice kept {100 * before[0]:.2f}% of attention, then {100 * after[0]:.2f}%: it stays as it started")


def say_what_is_kept(student: SportsLLM, text: StudentText, sequence: int) -> None:
    """A line on how much attention the choice keeps of what the best choice would, and whether the newest tokens keep
    as much: then the indexer adds nothing yet. Nothing where no document is longer than a selection.
    """
    kept = attention_kept(student, long_sequences(text, student.config.chosen_selection.tokens, sequence))
    if kept is None:
        return
    chosen, newest = (100 * each / kept[2] for each in kept[:2])
    words = (
        f"of the attention that the best choice keeps, the indexer keeps {chosen:.1f}%, the newest tokens {newest:.1f}%"
    )
    more = "; it adds nothing yet: give more --index-tokens" if chosen <= newest else ""
    log(words + more)


def long_sequences(text: StudentText, least: int, most: int) -> list[Tensor]:
    """The longest held-out documents of more than `least` tokens, else the longest of the training's, cut to `most`;
    token ids, (1, T) each.
    """
    for documents in (tokenize(text.split.held_out, text.tokenizer), text.documents):
        lengths = np.diff(documents.ends, prepend=0)
        longest = [place for place in np.argsort(-lengths)[:_JUDGED] if min(lengths[place], most) > least]
        starts = documents.ends - lengths
        if longest:
            rows = (documents.ids[starts[place] : documents.ends[place]][:most] for place in longest)
            return [torch.from_numpy(row.astype(np.int64))[None] for row in rows]
    return []


def attention_kept(student: SportsLLM, sequences: Sequence[Tensor]) -> tuple[float, float, float] | None:
    """`kept_attention` where all layers before attend to all tokens, the mean over sequences and layers; None without
    sequences. Of a model on the CPU.
    """
    found: list[Tensor] = []

    def look(attention: SelectedAttention, args: tuple[Any, ...]) -> None:
        found.append(kept_attention(Document(student.config, *attention.parts(args[0], args[1]))))

    model = with_full_attention(student, max((tokens_1T.shape[1] for tokens_1T in sequences), default=1)).eval()
    hooks = [attention.register_forward_pre_hook(look) for attention in selected_attention(model)]
    try:
        with torch.inference_mode():
            for tokens_1T in sequences:
                model.hidden(tokens_1T)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return None
    chosen, newest, best = torch.stack(found).mean(dim=0).tolist()
    return chosen, newest, best


def spread_pieces(text: StudentText, length: int) -> list[Tensor]:
    """Pieces of the training text at equal distances; token ids, (1, `length`) each."""
    ids = text.documents.ids
    count = max(1, min(_START_PIECES, len(ids) // length))
    starts = np.linspace(0, max(0, len(ids) - length), count).astype(np.int64)
    return [torch.from_numpy(ids[start : start + length].astype(np.int64))[None] for start in starts]


def with_full_attention(student: SportsLLM, sequence: int) -> SportsLLM:
    """A copy whose selection leaves nothing of a sequence out."""
    selection = student.config.chosen_selection
    whole = max(selection.tokens, -(-sequence // selection.block) * selection.block)
    model = SportsLLM(student.config.with_changes(selection=dataclasses.replace(selection, tokens=whole)))
    model.load_state_dict(student.state_dict())
    return model


def _own_losses(model: SportsLLM, batch: Batch) -> Tensor:
    """Nothing beside what the blocks add themselves."""
    model.hidden(batch.tokens, batch.documents)
    return torch.zeros((), device=batch.tokens.device)
