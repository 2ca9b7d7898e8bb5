"""Tiny real models that any test may use, and where the shared data lies. Nothing is downloaded."""

from pathlib import Path

import torch

from sportsllm.formats.checkpoint import save_checkpoint
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
STORIES = DATA / "models" / "stories260K"
TINY_VOCAB = 384
FAMILIES: list[dict[str, object]] = [
    {},
    {"tie_word_embeddings": False},
    {"qk_norm": True},
    {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    {"mlp_kind": "gelu"},
]
"""Changes of a tiny model that give it every part that a plain one lacks."""


def tiny_config(**changes: object) -> ModelConfig:
    """Two layers, grouped heads, head_dim 16."""
    base = ModelConfig(
        vocab_size=TINY_VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    return base.with_changes(**changes)


BENCHED = tiny_config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=300,
)  # fmt: skip
"""Small enough to be measured often, with a context that has room for a depth of 32 tokens."""


def tiny_model(seed: int = 0, std: float = 0.2, **changes: object) -> SportsLLM:
    """Random weights, large enough that every part of the model shows in the logits."""
    model = SportsLLM(tiny_config(**changes))
    model.initialize(seed, std=std)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise) if "norm" in name else parameter.copy_(0.1 * noise)
    return model.eval()


def saved(directory: Path, model: SportsLLM, tokenizer_from: Path | None = None) -> Path:
    """A new checkpoint directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_checkpoint(directory, model, tokenizer_from)
    return directory


def fresh(**changes: object) -> SportsLLM:
    """A tiny model with the weights of seed 0."""
    model = SportsLLM(tiny_config(**changes))
    model.initialize(0)
    return model


def weights(model: SportsLLM) -> torch.Tensor:
    """All parameters in one row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
