"""The decoder: pre-norm blocks of attention and feed-forward; RMSNorm and rotary positions, or what a config says.

The kinds of attention and feed-forward (`sportsllm.models.kinds`) define the two halves of a block.
Shape suffixes: B sequences, T tokens, D hidden_size, E head_dim, V vocabulary.
Module names are Hugging Face's, so a state dict is a checkpoint.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sportsllm.models.attention import KVCache
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import NORMS, OUTPUT_NORMS, check_parameters, parameters, sublayers
from sportsllm.models.parts import Kind
from sportsllm.models.rope import rope_tables

_ROPE_TABLES = ("rope_cos", "rope_sin", "rope_local_cos", "rope_local_sin")
Rope = tuple[Tensor, ...]
"""Cosine and sine tables, each (T, E / 2) or (B, T, E / 2); then those of sliding layers, where they have their own."""


def rope_of(config: ModelConfig) -> Rope:
    """A model's tables, one row a position of its context; none without rotary positions."""
    if config.position_kind == "none":
        return ()
    bases = [config.rope_theta] + [config.rope_local_theta] * (config.rope_local_theta is not None)
    tables = [rope_tables(config, config.max_position_embeddings, local=place > 0) for place in range(len(bases))]
    return tuple(torch.from_numpy(table) for pair in tables for table in pair)


def first_positions(rope: Rope, x_BTD: Tensor) -> Rope:
    """The tables of the first T positions, for x (B, T, D)."""
    return tuple(table[: x_BTD.shape[1]] for table in rope)


def embed(config: ModelConfig, rows_BTD: Tensor, positions: Tensor | None) -> Tensor:
    """What the first layer reads, (B, T, D): the tokens' rows of the embedding, scaled, and their positions' rows.

    `positions` are rows of a model's table of learned positions, if it has one: (B, T, D), or (N, D) of the first N.
    """
    x_BTD = rows_BTD if config.embedding_scale == 1.0 else rows_BTD * config.embedding_scale
    return x_BTD if positions is None else x_BTD + positions[..., : x_BTD.shape[1], :]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight, in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any (..., size) in, the same shape out; see `_compute_type`."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(_compute_type(x))


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, in float32 (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """As `RMSNorm.forward`."""
        return F.layer_norm(x.float(), (x.shape[-1],), self.weight.float(), self.bias.float(), self.eps).to(
            _compute_type(x)
        )


ResidualNorm = RMSNorm | LayerNorm


def residual_norm(config: ModelConfig) -> ResidualNorm:
    """A norm of the residual stream."""
    return (RMSNorm if config.norm_kind == "rms" else LayerNorm)(config.hidden_size, config.rms_norm_eps)


def _compute_type(x: Tensor) -> torch.dtype:
    """Autocast's type, so that a norm's output is cast once for all its readers."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Sublayer(nn.Module):
    """Attention or feed-forward: the modules that its kind lists, by name, and the kind's own `forward`."""

    def __init__(self, kind: Kind, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.kind, self.config, self.layer = kind, config, layer
        for matrix in kind.matrices(config):
            *path, name = matrix.name.split(".")
            parent: nn.Module = self
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(name, nn.Linear(matrix.columns, matrix.rows, bias=matrix.bias))
        for vector in kind.vectors(config):
            self.add_module(vector.name, RMSNorm(vector.size, vector.eps or config.rms_norm_eps))

    def forward(
        self,
        x_BTD: Tensor,
        rope: Rope | None = None,
        documents: Sequence[int] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        return self.kind.forward(self, x_BTD, rope, documents, cache)


class Block(nn.Module):
    """One layer: attention and feed-forward, each after its norm and added to the residual stream."""

    input_layernorm: ResidualNorm
    self_attn: Any
    post_attention_layernorm: ResidualNorm
    mlp: Any

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        config = config.of_layer(layer)
        self.dropout = config.dropout
        self.output_norms = config.output_norms
        for name, kind in sublayers(config).items():
            self.add_module(NORMS[name], residual_norm(config))
            self.add_module(name, Sublayer(kind, config, layer))
            if config.output_norms:
                self.add_module(OUTPUT_NORMS[name], residual_norm(config))

    def forward(
        self, x_BTD: Tensor, rope: Rope, documents: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        for half in NORMS:
            x_BTD = self.add_half(half, x_BTD, rope, documents, cache)
        return x_BTD

    def add_half(
        self, half: str, x_BTD: Tensor, rope: Rope, documents: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """The residual stream after one of `NORMS`: x + half(norm(x)), the change normed too with `output_norms`."""
        normed = self.get_submodule(NORMS[half])(x_BTD)
        change = self.get_submodule(half)(normed, rope, documents, cache)
        if self.output_norms:
            change = self.get_submodule(OUTPUT_NORMS[half])(change)
        return x_BTD + F.dropout(change, self.dropout, self.training)


def block_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all matrices inside the blocks of a model, or of a module that holds one."""
    return [
        half.get_parameter(f"{matrix.name}.weight")
        for half in model.modules()
        if isinstance(half, Sublayer)
        for matrix in half.kind.matrices(half.config)
    ]


class Backbone(nn.Module):
    """Embedding, blocks and final norm; the `model.` of a Hugging Face checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # From a table that is there: drawing one at random on the meta device imports torch's compiler, a second long.
        sizes = config.vocab_size, config.hidden_size
        self.embed_tokens: nn.Module = nn.Embedding(*sizes, _weight=torch.empty(sizes))
        if config.positions:
            sizes = config.positions, config.hidden_size
            self.embed_positions = nn.Embedding(*sizes, _weight=torch.empty(sizes))
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = residual_norm(config)


class SportsLLM(nn.Module):
    """The whole model. `hidden` and `head_weight` are for training, `forward` for everything else."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for place, table in enumerate(rope_of(config)):
            self.register_buffer(_ROPE_TABLES[place], table, persistent=False)
        self.checkpoint_activations = False
        check_parameters(config, {name: tuple(p.shape) for name, p in self.named_parameters()})

    def initialize(self, seed: int, std: float = 0.02) -> None:
        """Draw fresh weights: N(0, std), matrices that write to the residual stream scaled by 1 / sqrt(2 L).

        Source: GPT-2's report for the residual scaling.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = std / (2 * self.config.num_hidden_layers) ** 0.5
        described = {parameter.name: parameter for parameter in parameters(self.config)}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if described[name].role == "bias":
                    parameter.zero_()
                elif described[name].role == "norm":
                    parameter.fill_(1.0)
                else:
                    spread = residual_std if described[name].writes_residual else std
                    parameter.normal_(0.0, spread, generator=generator)
            for half in self.modules():
                if isinstance(half, Sublayer):
                    half.kind.initialize(half)

    @property
    def rope(self) -> Rope:
        """The rotary tables of the whole context."""
        return tuple(cast(Tensor, getattr(self, name)) for name in _ROPE_TABLES if hasattr(self, name))

    def embedded(self, tokens_BT: Tensor, places: slice | Tensor | None = None) -> Tensor:
        """What the first layer reads, (B, T, D); `places` are the tokens' positions, the first T if not given."""
        table = self.model.embed_positions.weight if self.config.positions else None
        rows = table[places] if table is not None and places is not None else table
        return embed(self.config, self.model.embed_tokens(tokens_BT), rows)

    @property
    def head_weight(self) -> Tensor:
        """The (V, D) matrix that turns hidden states into logits."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return cast(Tensor, head.weight)

    def hidden(
        self,
        tokens_BT: Tensor,
        documents: Sequence[int] | None = None,
        cache: KVCache | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Final hidden states, (B, T, D), after the last norm.

        Args:
            tokens_BT: token ids.
            documents: ends of packed documents, see `attend_documents`; positions start again in each.
            cache: read before and extended by these tokens; not together with `documents`.
            states: where given, gets the residual stream (B, T, D) after the embedding and after each layer.
        """
        places = self._places(tokens_BT, documents, cache)
        x_BTD, rope = self.embedded(tokens_BT, places), tuple(table[places] for table in self.rope)
        for layer in self.model.layers:
            if states is not None:
                states.append(x_BTD)
            if self.checkpoint_activations and self.training:
                x_BTD = cast(Tensor, checkpoint(layer, x_BTD, rope, documents, cache, use_reentrant=False))
            else:
                x_BTD = layer(x_BTD, rope, documents, cache)
        if states is not None:
            states.append(x_BTD)
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        return cast(Tensor, self.model.norm(x_BTD))

    def forward(
        self, tokens_BT: Tensor, cache: KVCache | None = None, documents: Sequence[int] | None = None
    ) -> Tensor:
        """Logits of every position, (B, T, V). Training uses `hidden` and a chunked loss instead."""
        return self.logits(self.hidden(tokens_BT, documents, cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) to logits (..., V)."""
        return F.linear(hidden, self.head_weight)

    def auxiliary_loss(self) -> Tensor | None:
        """Sum of the losses that blocks add of their own (balance of experts, the indexer's); None without any."""
        parts: list[Any] = [part for block in self.model.layers for part in (block, block.self_attn, block.mlp)]
        losses = []
        for part in parts:
            if getattr(part, "auxiliary_loss", None) is not None:
                losses.append(part.auxiliary_loss)
                part.auxiliary_loss = None  # of one batch, with its graph
        return cast(Tensor, sum(losses)) if losses else None

    def _places(self, tokens_BT: Tensor, documents: Sequence[int] | None, cache: KVCache | None) -> slice | Tensor:
        """Where the tokens stand, (B, T); as a slice where all sequences are alike."""
        batch, length = tokens_BT.shape
        start = cache.length if cache is not None else 0
        if documents is None:
            if start + length > self.config.max_position_embeddings:
                raise ValueError(f"{start + length} tokens; the context is {self.config.max_position_embeddings}")
            return slice(start, start + length)
        ends = torch.as_tensor(documents, device=tokens_BT.device)
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        starts = torch.repeat_interleave(ends - lengths, lengths)
        return (torch.arange(batch * length, device=tokens_BT.device) - starts).view(batch, length)
