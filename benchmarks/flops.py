"""Floating-point operations (FLOPs) of reading and training on a token, from a model's shape alone.

One multiply-add is two. Counted are the products with weight matrices and attention, nearly all of the work (Kaplan et
al., appendix B of https://arxiv.org/abs/2001.08361; PaLM's appendix B, https://arxiv.org/abs/2204.02311, calls it model
FLOPs). Not counted: norms, rotations, the softmax over the vocabulary, the optimizer, validation and recomputation that
saves memory. Letters: T tokens of a sequence, L layers, D hidden_size, V vocabulary, H query heads, E head_dim.
"""

from __future__ import annotations

from sportsllm.models.config import ModelConfig
from sportsllm.models.description import mixing_macs, sublayers

# The backward pass is two products for each one of the forward pass (Kaplan et al., section 2.1).
FORWARDS_PER_STEP = 3


def matmul_parameters(config: ModelConfig) -> int:
    """N, the weights a token is multiplied by: the blocks' matrices, of experts the chosen ones, and the (V, D) head.

    The embedding is a look-up and free; a tied head is a product all the same and counts.
    """
    active = sum(layers * kind.active_parameters for part, layers in config.runs() for kind in sublayers(part).values())
    return active + config.vocab_size * config.hidden_size


def forward_flops_per_token(config: ModelConfig, sequence: int) -> int:
    """FLOPs of reading one token, the mean over a sequence of T = `sequence` tokens.

        2 N + 4 L (H E) c    with c = (T + 1) / 2, the mean number of positions a token attends to

    Each attended position costs 2 H E for its score and 2 H E for its value; kinds of attention that differ say what
    it costs them. PaLM and Chinchilla's appendix F
    (https://arxiv.org/abs/2203.15556) have c = T; causal attention needs half. Packed documents attend inside
    themselves only, so for them this is an upper bound.
    """
    mixing = mixing_macs(config, sequence + 1, prompt=True)  # of two mean depths
    return 2 * matmul_parameters(config) + config.num_hidden_layers * mixing


def training_flops_per_token(config: ModelConfig, sequence: int) -> int:
    """FLOPs of training on one token, 6 N + 12 L (H E) (T + 1) / 2: forward, and twice that backward."""
    return FORWARDS_PER_STEP * forward_flops_per_token(config, sequence)
