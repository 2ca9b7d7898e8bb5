"""The kinds of attention and feed-forward. A kind is a function from a config to a `Sublayer`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sportsllm.models.sublayer import HIDDEN, Activation, Kept, Matrix, State, Sublayer, Unit, Vector

if TYPE_CHECKING:
    from sportsllm.models.config import Experts, ModelConfig

INDEX = ("index_q_proj", "index_k_proj")
"""The indexer's matrices: queries of all heads, and the key."""
LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever the model's own is, as in `transformers`."""
GATES = ("i", "f", "g", "o")
READ = "last_hidden"
"""What an LSTM's recurrent matrices read: h of the token before."""
ROUTER, SHARED = "gate", "shared_experts"

Kind = Callable[["ModelConfig"], Sublayer]


def grouped_query(config: ModelConfig) -> Sublayer:
    """Query, key, value and output matrices. Documents of a batch are joined, which copies attention's output."""
    hidden, queries, keys, size = config.hidden_size, config.query_size, config.key_value_size, config.head_dim
    heads, kv_heads, norm = config.num_attention_heads, config.num_key_value_heads, config.qk_norm
    bias, cached = config.attention_bias, (kv_heads, size)
    q = Matrix("q_proj", queries, hidden, "query_head", HIDDEN, HIDDEN, bias=bias)
    k = Matrix("k_proj", keys, hidden, "kv_head", HIDDEN, HIDDEN, bias=bias)
    v = Matrix("v_proj", keys, hidden, "kv_head", HIDDEN, HIDDEN, bias=bias)
    o = Matrix("o_proj", hidden, queries, HIDDEN, "query_head", "mixed", True, config.attention_output_bias, "v_proj")
    together = config.joint_qk_norm
    norms = (Vector("q_norm", queries, rows_of="q_proj"), Vector("k_norm", keys, rows_of="k_proj"))
    norms = norms if together else (Vector("q_norm", size), Vector("k_norm", size))
    made = Activation("q", (heads, size)), *(Activation(f"{name}, cached", cached, "cache") for name in "kv")
    scores = Activation("attention scores", (heads,), "scores", held=config.attention_softcap is not None)
    return Sublayer(
        matrices=(q, k, v, o),
        tensors=(q, k, v, *made, scores, Activation("attention output", (heads, size)), o),
        units=(
            Unit("kv_head", "num_key_value_heads", kv_heads, size),
            Unit("query_head", "num_attention_heads", heads, size, group="kv_head"),
        ),
        kept=Kept(
            computed=queries,
            float32=heads + (2 if together else heads + kv_heads) * norm,
            attended=2 * (queries + keys),
            normed=(queries + keys) * norm,
        ),
        vectors=norms if norm else (),
        state=(State("key", cached), State("value", cached)),
        macs=2 * queries,
        prompt_macs=2 * queries,
    )


def selected(config: ModelConfig) -> Sublayer:
    """`grouped_query` with an indexer, which pruning leaves whole."""
    full, size, bias = grouped_query(config), index_size(config), config.attention_bias
    hidden, heads = config.hidden_size, config.chosen_selection.heads
    index = (
        Matrix(INDEX[0], heads * size, hidden, "index_head", HIDDEN, HIDDEN, bias=bias),
        Matrix(INDEX[1], size, hidden, "index_key", HIDDEN, HIDDEN, bias=bias),
    )
    made = (
        Activation("index q", (heads, size)),
        Activation("index k, cached", (size,), "cache"),
        Activation("index scores", (heads,), "scores", held=False),
    )
    values, kept = (heads + 1) * size, full.kept
    return replace(
        full,
        matrices=(*full.matrices[:3], *index, full.matrices[3]),
        tensors=(*full.tensors[:3], *index, *full.tensors[3:6], *made, *full.tensors[6:]),
        units=(*full.units, Unit("index_head", "selection", heads, size), Unit("index_key", "selection", 1, size)),
        kept=kept._replace(computed=kept.computed + values, float32=kept.float32 + values),
        state=(*(State(f"selected_{old.name}", old.shape) for old in full.state), State("selected_index", (size,))),
    )


def index_pairs(config: ModelConfig) -> int:
    """Rotary pairs of a part of the index key, the last of P."""
    own, whole = config.chosen_selection.pairs, config.head_dim // 2
    return whole if own is None else min(own, whole)


def index_size(config: ModelConfig) -> int:
    """I, the size of an index head and of the index key."""
    return config.chosen_selection.parts * 2 * index_pairs(config)


def latent(config: ModelConfig) -> Sublayer:
    """Low-rank queries if `q_lora_rank` is set, low-rank keys and values. Pruning leaves the ranks whole.

    When decoding, scores and sums are over latent vectors, and the absorbed matrices are kv_b_proj's own. In a prompt
    they are over keys and values that kv_b_proj makes once a token.
    """
    hidden, heads, rank, rotated = config.hidden_size, config.num_attention_heads, config.kv_rank, config.head_dim
    scored, value, query_rank = config.unrotated_dim + rotated, config.value_dim, config.q_lora_rank
    if query_rank is None:
        query: tuple[Matrix, ...] = (Matrix("q_proj", heads * scored, hidden, "query_head", HIDDEN, HIDDEN),)
    else:
        query = (
            Matrix("q_a_proj", query_rank, hidden, "query_latent", HIDDEN, HIDDEN),
            Matrix("q_b_proj", heads * scored, query_rank, "query_head", "query_latent", "query_latent"),
        )
    made_from = (
        *query,
        Matrix("kv_a_proj_with_mqa", rank + rotated, hidden, "cached", HIDDEN, HIDDEN),
        Matrix("kv_b_proj", heads * (config.unrotated_dim + value), rank, "query_head", "latent", "latent"),
    )
    o = Matrix("o_proj", hidden, heads * value, HIDDEN, "query_head", "mixed", True)
    ranks = rank + (query_rank or 0)
    query_norm = () if query_rank is None else (Vector("q_a_layernorm", query_rank, LATENT_EPS),)
    return Sublayer(
        matrices=(*made_from, o),
        tensors=(
            *made_from,
            Activation("q", (heads, scored)),
            Activation("latent and rotated key, cached", (rank + rotated,), "cache"),
            Activation("k", (heads, scored)),
            Activation("v", (heads, value)),
            Activation("attention scores", (heads,), "scores", held=False),
            Activation("attention output", (heads, value)),
            o,
        ),
        units=(
            *([] if query_rank is None else [Unit("query_latent", "q_lora_rank", query_rank)]),
            Unit("latent", "kv_lora_rank", rank),
            Unit("cached", "kv_lora_rank", rank + rotated),
            Unit("query_head", "num_attention_heads", heads, value),
        ),
        kept=Kept(ranks, float32=2 * ranks + heads * (2 * scored + 2 * value + 1), cast=heads * value),
        vectors=(*query_norm, Vector("kv_a_layernorm", rank, LATENT_EPS)),
        state=(State("latent", (rank + rotated,)),),
        macs=heads * (2 * rank + rotated),
        prompt_macs=heads * (scored + value),
    )


def lstm(config: ModelConfig) -> Sublayer:
    """Four matrices from the input, four from the last state, one to the residual stream.

    Pruning leaves the cells whole: each is read by all others at the next token. Kept are, in float32, x, the gates,
    both states, tanh(c), and h a second time in the order of tokens.
    """
    hidden, cells = config.hidden_size, config.cells
    gates = (
        *(Matrix(f"{gate}_proj", cells, hidden, "cell", HIDDEN, HIDDEN, bias=True) for gate in GATES),
        *(Matrix(f"h{gate}_proj", cells, cells, "cell", "cell", READ, stepwise=True) for gate in GATES),
    )
    out = Matrix("out_proj", hidden, cells, HIDDEN, "cell", "mixed", True)
    return Sublayer(
        matrices=(*gates, out),
        tensors=(
            *gates,
            Activation("gates", (len(GATES), cells)),
            Activation("hidden state, kept", (cells,), "state"),
            Activation("cell state, kept", (cells,), "state"),
            Activation("hidden states", (cells,)),
            out,
        ),
        units=(Unit("cell", "cells", cells),),
        kept=Kept(float32=hidden + 8 * cells, cast=cells),
        state=(State("hidden", (cells,), False), State("cell", (cells,), False)),
        own_macs=3 * cells,
    )


def feed_forward(config: ModelConfig, activation: str, gated: bool) -> Sublayer:
    """Three matrices around a gate, or two without; what they make, f of it and its product with the gate are kept."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    first = [Matrix(name, inner, hidden, "neuron", HIDDEN, HIDDEN, bias=bias) for name in names]
    source = "up_proj" if gated else None
    down = Matrix("down_proj", hidden, inner, HIDDEN, "neuron", "inner", True, bias, scale_source=source)
    made = ("gate", "up", f"{activation}(gate) * up") if gated else ("up", f"{activation}(up)")
    tensors: tuple[Matrix | Activation, ...] = (*first, *(Activation(name, (inner,)) for name in made), down)
    units, kept = (Unit("neuron", "intermediate_size", inner),), Kept(computed=(4 if gated else 2) * inner)
    return Sublayer((*first, down), tensors, units, kept)


def mixture(config: ModelConfig) -> Sublayer:
    """The router, every expert's matrices and those of the shared ones, which are one wider expert.

    Pruning cuts the neurons of each expert to the same number. Kept are input, inner tensors and output of each chosen
    expert, and the scores of all.
    """
    experts, hidden, inner = config.chosen_experts, config.hidden_size, config.intermediate_size
    router = Matrix(ROUTER, experts.count, hidden, "expert", HIDDEN, HIDDEN, bias=experts.choice_bias, router=True)
    units, matrices = [Unit("expert", "experts", experts.count)], list[Matrix]()
    for name in expert_names(experts):
        unit, width, routed = f"neuron of {name}", inner * (experts.shared if name == SHARED else 1), name != SHARED
        units.append(Unit(unit, "intermediate_size", inner, width // inner))
        read = [f"{name}.gate_proj"] * experts.gated + [f"{name}.up_proj"]
        bias, source = not experts.gated, read[-1] if experts.gated else None
        matrices += [Matrix(each, width, hidden, unit, HIDDEN, HIDDEN, bias=bias, routed=routed) for each in read]
        matrices.append(
            Matrix(f"{name}.down_proj", hidden, width, HIDDEN, unit, f"{name}.inner", True, bias, source, routed)
        )
    made = (
        Activation("scores of experts", (experts.count,)),
        Activation("weights of the chosen", (experts.active,)),
    )
    first, last = ([m for m in matrices if m.writes_residual == writes] for writes in (False, True))
    chosen = Activation("inner, of each chosen", (experts.active, inner))
    shared = sum(m.numel for m in matrices if m.name.startswith(SHARED))
    routed_numel = sum(m.numel for m in matrices) - shared
    kept_inner = (4 if experts.gated else 2) * inner
    return Sublayer(
        matrices=(router, *matrices),
        tensors=(router, *made, *first, chosen, *last),
        units=tuple(units),
        kept=Kept(
            computed=experts.active * (2 * hidden + kept_inner) + experts.shared * kept_inner, float32=3 * experts.count
        ),
        active=router.numel + routed_numel // experts.count * experts.active + shared,
    )


def routed_names(experts: Experts) -> list[str]:
    """The modules of the routed experts."""
    return [f"experts.{number}" for number in range(experts.count)]


def expert_names(experts: Experts) -> list[str]:
    """The modules of the routed experts, then of the shared ones."""
    return routed_names(experts) + [SHARED] * (experts.shared > 0)


def unused_line(unused: Mapping[int, Sequence[int]]) -> str | None:
    """The experts that no token was sent to, by layer, in a line; None if all were used."""
    where = "; ".join(f"layer {layer}: {', '.join(map(str, experts))}" for layer, experts in unused.items() if experts)
    return f"experts that no token was sent to: {where}" if where else None


def least_bits(name: str) -> int:
    """The fewest bits that a matrix is rounded to, by its name in a feed-forward.

    A choice that rounding turns is another model, and what every token reads is a small part of a mixture.
    """
    return 8 if name == ROUTER or name.startswith(f"{SHARED}.") else 0


ATTENTION: dict[str, Kind] = {"grouped_query": grouped_query, "latent": latent, "selected": selected, "lstm": lstm}
FEED_FORWARD: dict[str, Kind] = {
    "swiglu": partial(feed_forward, activation="silu", gated=True),
    "geglu": partial(feed_forward, activation="gelu", gated=True),
    "gelu": partial(feed_forward, activation="gelu", gated=False),
    "gelu_erf": partial(feed_forward, activation="gelu", gated=False),
    "relu": partial(feed_forward, activation="relu", gated=False),
    "experts": mixture,
}
"""The kinds by the names in `ModelConfig`; `sportsllm.models.language_model` has their modules."""
