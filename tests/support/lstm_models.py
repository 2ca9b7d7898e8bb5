"""Changes of a tiny model's shape that make it an LSTM."""

from typing import Any

LSTM: dict[str, Any] = {
    "attention_kind": "lstm",
    "position_kind": "none",
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 48,  # cells, of a width of 64
}
