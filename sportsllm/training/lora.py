"""LoRA: train a low-rank change of frozen matrices, then add it to them, so that an ordinary model is left.

    y = x W^T + b                              # frozen
    y = x (W + alpha / rank * B A)^T + b       # adapted; only A and B train

LoRA is https://arxiv.org/abs/2106.09685. All matrices of a block are adapted by default: adapters on attention
alone stay behind full fine-tuning, on every linear layer they reach it (QLoRA, https://arxiv.org/abs/2305.14314,
section 4; "LoRA Without Regret", https://thinkingmachines.ai/blog/lora/). From the latter too: alpha is 32 whatever
the rank is, so that the best learning rate hardly depends on the rank, and that rate is ten times the one of full
fine-tuning.

Shape suffixes: D inputs of a matrix, O its outputs, R rank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sportsllm.errors import UsageError
from sportsllm.models.experts import ROUTER
from sportsllm.models.kinds import block_matrices
from sportsllm.models.language_model import SportsLLM

ALPHA = 32.0


@dataclass(frozen=True)
class Adapters:
    """Which adapters to train, as flags or a recipe give them; `add_adapters` checks them against a model.

    `targets` are names of matrices, all of a block's if None.
    """

    rank: int
    targets: tuple[str, ...] | None = None
    alpha: float = ALPHA


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapter, x A^T B^T beside x W^T.

    The sum W + B A is not made in training: its gradient would be a whole matrix again. On the seven matrices of a
    768 / 2,048 block, rank 8, 2,048 tokens in float32, forward and backward take 0.93 s of processor time this way,
    1.18 s with the sum (`torch.nn.utils.parametrize`), which also keeps 28 MB more a block, and 1.14 s training W.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        weight_OD = base.weight
        bound = base.in_features**-0.5
        a_RD = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(a_RD.to(weight_OD))
        self.lora_b = nn.Parameter(weight_OD.new_zeros(base.out_features, rank))  # so that training starts at W

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., O)."""
        low = F.linear(x, self.lora_a) * self.scale
        return F.linear(x, self.base.weight, self.base.bias) + F.linear(low, self.lora_b)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The frozen layer with the adapter added to its weight, in place."""
        self.base.weight.addmm_(self.lora_b, self.lora_a, alpha=self.scale)
        return self.base


def parse_targets(text: str) -> tuple[str, ...]:
    """Names of matrices, separated by commas; `add_adapters` checks them against a model.

    Raises:
        UsageError: there is no name.
    """
    names = tuple(sorted({name.strip() for name in text.split(",") if name.strip()}))
    if not names:
        raise UsageError("--set lora_targets names no matrix; give one or more, for example q_proj,v_proj")
    return names


def adapter_settings(rank: int | None, targets: str | None, alpha: float | None, optimizer: str) -> Adapters | None:
    """The adapters of --lora-rank, lora_targets and lora_alpha, None where not given; None without --lora-rank.

    Muon is refused: it evens out all directions of a whole matrix's change, which says nothing about its two factors.

    Raises:
        UsageError: flags that do not go together, or no targets.
    """
    if rank is None:
        if targets is not None or alpha is not None:
            raise UsageError("lora_targets and lora_alpha belong to --lora-rank; add it or leave them out")
        return None
    if optimizer == "muon":
        raise UsageError("--optimizer muon trains whole matrices, not the factors of adapters; use adamw")
    return Adapters(rank, None if targets is None else parse_targets(targets), ALPHA if alpha is None else float(alpha))


def add_adapters(
    model: SportsLLM, rank: int, targets: Sequence[str] | None = None, alpha: float = ALPHA, seed: int = 0
) -> int:
    """Freeze a model and put adapters on its matrices, in place. Its output does not change yet.

    Args:
        model: unquantized; every other parameter is frozen, norms and biases too.
        rank: at least 1, at most the smallest dimension of the adapted matrices.
        targets: which matrices of a block, by the last part of their names; all if None.
        alpha: the adapters count alpha / rank times.
        seed: of the random A, uniform in +-1 / sqrt(D); B starts at zero.

    Returns:
        How many numbers will be trained.

    Raises:
        UsageError: rank, targets or alpha are out of range, or the model is quantized or has adapters.
    """
    if not 0.0 < alpha < math.inf:
        raise UsageError(f"--set lora_alpha={alpha}: must be above 0")
    chosen = list(_matrices(model, targets))
    smallest = min(min(base.weight.shape) for _, _, base in chosen)
    if not 1 <= rank <= smallest:
        raise UsageError(f"--lora-rank is {rank}; this model's matrices allow 1 to {smallest}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parent, name, base in chosen:
        setattr(parent, name, LoRALinear(base, rank, alpha, generator).train(base.training))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


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


def _matrices(model: SportsLLM, targets: Sequence[str] | None) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Parent, name and layer of every matrix that gets an adapter."""
    router = f"mlp.{ROUTER}"  # few numbers, and its bias is none of its output's
    layers = [model.config.of_layer(layer) for layer in range(model.config.num_hidden_layers)]
    names = [[matrix.name for matrix in block_matrices(own) if matrix.name != router] for own in layers]
    known = list(dict.fromkeys(name.rpartition(".")[2] for own in names for name in own))
    unknown = [target for target in targets or () if target not in known]
    if unknown:
        raise UsageError(f"--set lora_targets names {unknown[0]!r}; use one or more of {', '.join(known)}")
    for block, own in zip(model.model.layers, names, strict=True):
        for name in own:
            parent, _, leaf = name.rpartition(".")
            if targets is not None and leaf not in targets:
                continue
            layer = block.get_submodule(name)
            if not isinstance(layer, nn.Linear):
                raise UsageError(f"{leaf} is a {type(layer).__name__}; adapters go on plain, unquantized matrices")
            yield block.get_submodule(parent), leaf, layer
