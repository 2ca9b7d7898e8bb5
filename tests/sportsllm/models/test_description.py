"""The description of a model against the model itself, for every kind and for a second kind of feed-forward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import config_from_hf, load_config, to_hf
from sportsllm.models.config import Experts
from sportsllm.models.description import block_matrices, check_parameters, input_groups, matrix_shapes, parameters
from sportsllm.models.kinds import ROUTER
from sportsllm.models.language_model import SportsLLM, block_weights
from sportsllm.models.memory import tensor_shapes
from sportsllm.models.training_memory import layer_activation_bytes
from sportsllm.text.packing import PackedSequences
from sportsllm.training.loop import language_model_loss, train_model
from sportsllm.training.settings import TrainConfig
from tests.support.models import fresh, saved, tiny_config, tiny_model

SHAPES: list[dict[str, Any]] = [
    {},
    {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    {"qk_norm": True, "tie_word_embeddings": False},
    {"mlp_kind": "experts", "experts": Experts(4, 2), "dense_layers": 1, "dense_intermediate_size": 128},
]


@pytest.mark.parametrize("changes", SHAPES)
def test_the_description_is_the_model(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    model = SportsLLM(config)
    assert [(p.name, p.shape) for p in parameters(config)] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    linears = {
        name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)
    }
    assert matrix_shapes(config) == linears
    assert config.parameters == sum(p.numel() for p in model.parameters())
    matrices = [name for name in matrix_shapes(config, layers_only=True) if not name.endswith(f"mlp.{ROUTER}")]
    assert len(block_weights(model)) == len(matrices)


def test_matrices_are_grouped_by_the_tensor_that_they_multiply() -> None:
    model, seen = tiny_model(), dict[str, torch.Tensor]()
    for matrix in block_matrices(model.config):
        model.model.layers[0].get_submodule(matrix.name).register_forward_pre_hook(
            lambda _module, args, name=matrix.name: seen.update({name: args[0]})
        )
    model(torch.tensor([[5, 6, 7]]))
    same = [{name for name, other in seen.items() if other is each} for each in seen.values()]
    groups = [{matrix.name for matrix in group} for group in input_groups(model.config)]
    assert len(groups) == 4 and all(same.count(group) == len(group) for group in groups)


def test_what_no_kind_describes_is_refused_by_name() -> None:
    config = tiny_config()
    shapes = {p.name: p.shape for p in parameters(config)}
    with pytest.raises(TypeError, match=r"experts\.weight: the model has \(2, 3, 4\), its description says None"):
        check_parameters(config, shapes | {"experts.weight": (2, 3, 4)})
    with pytest.raises(UsageError, match="mlp_kind is 'mixture'; use one of swiglu"):
        tiny_config(mlp_kind="mixture")


def test_a_second_kind_is_counted_trained_and_saved(gelu: str, batches: PackedSequences, tmp_path: Path) -> None:
    model = fresh(mlp_kind=gelu)
    config = model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    assert config.parameters_by_component()["feed_forward"] == 2 * (2 * hidden * inner + inner + hidden)
    assert config.parameters == sum(p.numel() for p in model.parameters())
    assert [s.name for s in tensor_shapes(config, 1, 8) if "gelu" in s.name] == ["gelu(up)"]
    swiglu = layer_activation_bytes(tiny_config(), True, "cpu")
    assert layer_activation_bytes(config, True, "cpu") == swiglu - 2 * 2 * inner  # two tensors, two bytes
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    settings = TrainConfig(steps=3, sequence=32, batch_size=2, accumulation=1, precision="fp32", optimizer="muon")
    train_model(model, batches, language_model_loss, settings, tmp_path)
    assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)
    saved(tmp_path / "saved", model)
    assert load_config(tmp_path / "saved") == config
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.inference_mode():
        assert torch.equal(load_checkpoint(tmp_path / "saved")(tokens), model.eval()(tokens))


def test_a_config_of_our_own_layout(gelu: str) -> None:
    config = tiny_config(mlp_kind=gelu, eos_token_id=(1, 3))
    data = to_hf(config)
    assert data["model_type"] == "sportsllm" and config_from_hf(data) == config
    with pytest.raises(ArtifactError, match="unknown field 'router'"):
        config_from_hf(data | {"router": 1})
