"""How many bits a matrix is rounded to."""

from __future__ import annotations

import pytest

from compress.quantization.config import QuantizationConfig, matrix_bytes
from sportsllm.models.config_records import Experts
from sportsllm.models.memory import component_bytes
from tests.support.models import tiny_config

MIXTURE = tiny_config(mlp_kind="experts", experts=Experts(count=4, active=2, shared=1))


def test_what_every_token_reads_of_a_mixture_keeps_eight_bits() -> None:
    config, layer = QuantizationConfig(bits=4), "model.layers.0."
    for name, bits in (("gate", 8), ("shared_experts.up_proj", 8), ("experts.0.up_proj", 4), ("up_proj", 4)):
        assert config.bits_for(f"{layer}mlp.{name}") == bits
    assert config.bits_for(f"{layer}self_attn.q_proj") == 4


@pytest.mark.parametrize("symmetric", [True, False])
def test_sizes_are_foretold(symmetric: bool) -> None:
    config = QuantizationConfig(bits=4, symmetric=symmetric)
    foretold = component_bytes(MIXTURE, "int4", zero_points=not symmetric)
    assert matrix_bytes(MIXTURE, config) == sum(foretold.values()) - foretold["norms"]
