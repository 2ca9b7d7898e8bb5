"""The decoder: pre-norm blocks of attention and feed-forward; RMSNorm and rotary positions, or what a config says.

Shape suffixes: B sequences, T tokens, D hidden_size, E head_dim, V vocabulary.
Module names are Hugging Face's, so a state dict is a checkpoint.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sportsllm.models.config import ModelConfig
from sportsllm.models.description import block_matrices, check_parameters, parameters
from sportsllm.models.experts import MixtureOfExperts
from sportsllm.models.latent import LatentAttention
from sportsllm.models.layers import FeedForward, GroupedQueryAttention, KVCache, Rope, residual_norm, softcapped
from sportsllm.models.lstm import LSTMLayer
from sportsllm.models.rope import rope_tables
from sportsllm.models.selection import SelectedAttention

gelu_tanh = partial(F.gelu, approximate="tanh")
ATTENTION_MODULES: dict[str, Callable[[ModelConfig, int], nn.Module]] = {
    "grouped_query": GroupedQueryAttention,
    "latent": LatentAttention,
    "selected": SelectedAttention,
    "lstm": LSTMLayer,
}
"""The module of each kind in `kinds.ATTENTION`, made from the config and the layer's number."""
FEED_FORWARD_MODULES: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "swiglu": lambda c: FeedForward(c.hidden_size, c.intermediate_size, F.silu, c.mlp_bias),
    "geglu": lambda c: FeedForward(c.hidden_size, c.intermediate_size, gelu_tanh, c.mlp_bias),
    "gelu": lambda c: FeedForward(c.hidden_size, c.intermediate_size, gelu_tanh, c.mlp_bias, gated=False),
    "gelu_erf": lambda c: FeedForward(c.hidden_size, c.intermediate_size, F.gelu, c.mlp_bias, gated=False),
    "relu": lambda c: FeedForward(c.hidden_size, c.intermediate_size, F.relu, c.mlp_bias, gated=False),
    "experts": MixtureOfExperts,
}
"""The module of each kind in `kinds.FEED_FORWARD`."""

_ROPE_TABLES = ("rope_cos", "rope_sin", "rope_local_cos", "rope_local_sin")


def rope_of(config: ModelConfig, device: torch.device | None = None) -> Rope:
    """A model's tables on a device, one row a position of its context; none without rotary positions."""
    if config.position_kind == "none":
        return ()
    kinds = (False,) if config.rope_local_theta is None else (False, True)
    tables = [rope_tables(config, local) for local in kinds]
    return tuple(torch.from_numpy(table).to(device) for pair in tables for table in pair)


def first_positions(rope: Rope, x_BTD: Tensor) -> Rope:
    """The tables of the first T positions, for x (B, T, D)."""
    return tuple(table[: x_BTD.shape[1]] for table in rope)


def embed(config: ModelConfig, rows_BTD: Tensor, positions: Tensor | None) -> Tensor:
    """What the first layer reads, (B, T, D): the tokens' rows of the embedding, scaled, and their positions' rows.

    `positions` are rows of a model's table of learned positions, if it has one: (B, T, D), or (N, D) of the first N.
    """
    x_BTD = rows_BTD if config.embedding_scale == 1.0 else rows_BTD * config.embedding_scale
    return x_BTD if positions is None else x_BTD + positions[..., : x_BTD.shape[1], :]


class Block(nn.Module):
    """One layer: attention and feed-forward, each after its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config = config.of_layer(layer)
        self.input_layernorm = residual_norm(config) if config.input_norms else nn.Identity()
        self.self_attn = ATTENTION_MODULES[config.attention_kind](config, layer)
        self.attention_output_norm = residual_norm(config) if config.output_norms else None
        self.post_attention_layernorm = residual_norm(config) if config.input_norms else nn.Identity()
        self.mlp = FEED_FORWARD_MODULES[config.mlp_kind](config)
        self.feed_forward_output_norm = residual_norm(config) if config.output_norms else None

    def forward(
        self, x_BTD: Tensor, rope: Rope, documents: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """(B, T, D) to (B, T, D); `documents` and `cache` as in `SportsLLM.hidden`."""
        after_BTD = self.add_sublayer("self_attn", x_BTD, rope, documents, cache)
        return self.add_sublayer("mlp", after_BTD, rope, read_BTD=x_BTD if self.config.parallel_residual else None)

    def add_sublayer(
        self,
        name: str,
        x_BTD: Tensor,
        rope: Rope,
        documents: Sequence[int] | None = None,
        cache: KVCache | None = None,
        read_BTD: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after `self_attn` or `mlp`: x + sublayer(norm(x)), the change normed too in Gemma 3.

        In a block with `parallel_residual` `mlp` reads another stream than x, the block's own input.
        """
        change: Tensor
        read_BTD = x_BTD if read_BTD is None else read_BTD
        if name == "self_attn":
            change = self.self_attn(self.input_layernorm(read_BTD), rope, documents, cache)
            output_norm = self.attention_output_norm
        else:
            change = self.mlp(self.post_attention_layernorm(read_BTD))
            output_norm = self.feed_forward_output_norm
        if output_norm is not None:
            change = output_norm(change)
        return x_BTD + F.dropout(change, self.config.dropout, self.training)


def block_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all matrices but routers inside the blocks of a model, or of a block."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    return [
        block.get_parameter(f"{matrix.name}.weight")
        for block in blocks
        for matrix in block_matrices(block.config)
        if not matrix.router
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
        for name, table in zip(_ROPE_TABLES, rope_of(config), strict=False):
            self.register_buffer(name, table, persistent=False)
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
            for module in self.modules():
                if isinstance(module, LSTMLayer):
                    module.initialize(generator)

    @property
    def rope(self) -> Rope:
        """The rotary tables of the whole context."""
        return tuple(table for name, table in self.named_buffers(recurse=False) if name in _ROPE_TABLES)

    def embedded(self, tokens_BT: Tensor, places: slice | Tensor | None = None) -> Tensor:
        """What the first layer reads, (B, T, D); `places` are the tokens' positions, the first T if not given."""
        table = self.model.embed_positions.weight if self.config.positions else None
        rows = table[places] if table is not None and places is not None else table
        return embed(self.config, self.model.embed_tokens(tokens_BT), rows)

    @property
    def head_weight(self) -> Tensor:
        """The (V, D) matrix that turns hidden states into logits."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        weight_VD: Tensor = getattr(head, "weight")  # noqa: B009  # packed layers have a property of this name
        return weight_VD

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head_weight.device

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
            documents: ends of packed documents, see `in_documents`; positions start again in each.
            cache: read before and extended by these tokens; not together with `documents`.
            states: if given, gets the residual stream (B, T, D) after the embedding and after each layer.
        """
        places = self._places(tokens_BT, documents, cache)
        x_BTD, rope = self.embedded(tokens_BT, places), tuple(table[places] for table in self.rope)
        for layer in self.model.layers:
            if states is not None:
                states.append(x_BTD)
            if self.checkpoint_activations and self.training:
                x_BTD = checkpoint(layer, x_BTD, rope, documents, cache, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, rope, documents, cache)
        if states is not None:
            states.append(x_BTD)
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        normed_BTD: Tensor = self.model.norm(x_BTD)
        return normed_BTD

    def forward(
        self, tokens_BT: Tensor, cache: KVCache | None = None, documents: Sequence[int] | None = None
    ) -> Tensor:
        """Logits of every position, (B, T, V). Training uses `hidden` and a chunked loss instead."""
        return self.logits(self.hidden(tokens_BT, documents, cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) to logits (..., V)."""
        return softcapped(F.linear(hidden, self.head_weight), self.config.logit_softcap)

    def auxiliary_loss(self) -> Tensor | None:
        """Sum of the losses that blocks add of their own (balance of experts, the indexer's); None without any."""
        losses: list[Tensor] = []
        for module in self.modules():
            if module is not self and isinstance(loss := getattr(module, "auxiliary_loss", None), Tensor):
                losses.append(loss)
                setattr(module, "auxiliary_loss", None)  # of one batch, with its graph  # noqa: B010
        return sum(losses[1:], losses[0]) if losses else None

    def _places(self, tokens_BT: Tensor, documents: Sequence[int] | None, cache: KVCache | None) -> slice | Tensor:
        """Where the tokens stand, (B, T); as a slice if all sequences are alike."""
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
