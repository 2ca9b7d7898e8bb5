"""LoRA: train a low-rank change of frozen matrices, then add it to them, so that an ordinary model is left.

    y = x W^T + b                              # frozen
    y = x (W + alpha / rank * B A)^T + b       # adapted; only A and B train

LoRA is https://arxiv.org/abs/2106.09685. All matrices of a block have adapters: adapters on every linear layer
reach full fine-tuning, on attention alone they do not (QLoRA, https://arxiv.org/abs/2305.14314, section 4). Alpha
is 32 for every rank, so that the best learning rate hardly depends on the rank; it is ten times that of full
fine-tuning ("LoRA Without Regret", https://thinkingmachines.ai/blog/lora/).

Shape suffixes: D inputs of a matrix, O its outputs, R rank.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sportsllm.errors import UsageError
from sportsllm.models.description import block_matrices
from sportsllm.models.kinds import ROUTER
from sportsllm.models.language_model import SportsLLM

ALPHA = 32.0
"""The scale, divided by the rank."""


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapter: x W^T + x A^T B^T.

    Training never forms W + B A, whose gradient would be a whole matrix. Forward and backward through the seven
    matrices of a 768 / 2,048 block (rank 8, 2,048 tokens, float32) take 0.93 s of processor time; with the sum
    (`torch.nn.utils.parametrize`) they take 1.18 s and 28 MB more a block, and training W takes 1.14 s.
    """

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base, ALPHA / rank
        weight_OD = base.weight
        bound = base.in_features**-0.5
        a_RD = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(a_RD.to(weight_OD))
        self.lora_b = nn.Parameter(weight_OD.new_zeros(base.out_features, rank))  # training starts at W

    @property
    def bias(self) -> Tensor | None:
        """The frozen layer's, which an LSTM reads."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., O)."""
        low = F.linear(x, self.lora_a) * self.scale
        return F.linear(x, self.base.weight, self.base.bias) + F.linear(low, self.lora_b)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The frozen layer with the adapter added to its weight, in place."""
        self.base.weight.addmm_(self.lora_b, self.lora_a, alpha=self.scale)
        return self.base


def add_adapters(model: SportsLLM, rank: int, seed: int = 0) -> None:
    """Freeze a model and put adapters on its matrices, in place. Its output does not change yet.

    Args:
        model: unquantized, without adapters; all other parameters are frozen, norms and biases too.
        rank: at least 1, at most the smallest dimension of the adapted matrices.
        seed: of the random A, uniform in +-1 / sqrt(D); B starts at zero.

    Raises:
        UsageError: the rank is too large.
    """
    matrices = list(_matrices(model))
    smallest = min(min(base.weight.shape) for _, _, base in matrices)
    if rank > smallest:
        raise UsageError(f"--lora-rank is {rank}; this model's matrices allow 1 to {smallest}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parent, name, base in matrices:
        setattr(parent, name, LoRALinear(base, rank, generator).train(base.training))


def merge_adapters(model: SportsLLM) -> None:
    """Merge the adapters into their matrices, in place: W becomes W + alpha / rank * B A.

    Every parameter can be trained again afterwards. A model without adapters stays as it is.
    """
    adapted = [
        (parent, name, layer)
        for parent in model.model.layers.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, LoRALinear)
    ]
    for parent, name, layer in adapted:
        setattr(parent, name, layer.merged())
    if adapted:
        model.requires_grad_(True)


def _matrices(model: SportsLLM) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Parent, name and layer of every matrix that gets an adapter."""
    router = f"mlp.{ROUTER}"  # few parameters, and its bias only chooses
    for number, block in enumerate(model.model.layers):
        for matrix in block_matrices(model.config.of_layer(number)):
            if matrix.name == router:
                continue
            parent, _, leaf = matrix.name.rpartition(".")
            layer = block.get_submodule(matrix.name)
            assert isinstance(layer, nn.Linear), f"{leaf} is a {type(layer).__name__}, not a plain matrix"
            yield block.get_submodule(parent), leaf, layer
