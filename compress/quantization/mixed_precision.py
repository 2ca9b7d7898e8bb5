"""Mixed precision by measurement: which matrices get 8 bits, when the file may be a little larger than with 4 bits.

Matrices that read the same input share their bits, so that the runtime can multiply them together. So do the last
matrices of a layer's routed experts, which the kernels run in one format. Rounding one group alone costs a mean KL from
the full model over calibration tokens, computed to second order. Groups get 8 bits in the order of KL saved per byte,
as long as they fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.layerwise import CPU, kept_in, kept_like, run_layer
from compress.quantization.config import HIGH_BITS, QuantizationConfig
from compress.quantization.packed_checkpoint import round_weight
from sportsllm.console import progress_bar
from sportsllm.formats.checkpoint import StoredModel, check_names
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.inference.decoder import require_finite
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, block_matrices
from sportsllm.models.language_model import Block, first_positions
from sportsllm.models.layers import Rope, softcapped

_CHUNK = 128  # tokens of one backward pass, which gives one number for each matrix


@dataclass(frozen=True)
class SensitivityGroup:
    """Matrices that share their bits.

    Attributes:
        modules: their names.
        kl: mean KL(full || only this group rounded to the low precision) to second order, nats per token.
        extra_bytes: bytes that 8 bits add; 0 if all its matrices have 8 bits anyway.
    """

    modules: tuple[str, ...]
    kl: float
    extra_bytes: int

    def to_json(self, config: QuantizationConfig) -> dict[str, Any]:
        """With the bits of the group, leaving out matrices that always have 8, such as a router."""
        return dataclasses.asdict(self) | {"bits": min(map(config.bits_for, self.modules))}


@torch.no_grad()
def measure_groups(
    checkpoint: Path,
    model: ModelConfig,
    config: QuantizationConfig,
    samples: Sequence[Tensor],
    scratch: Path | None = None,
    draws: int = 4,
    seed: int = 0,
    device: torch.device = CPU,
) -> list[SensitivityGroup]:
    """The KL that rounding each group alone to `config.bits` costs, to second order.

    kl = mean over tokens t drawn from the model of  (gradient of log p(t) . change of weights)**2 / 2

    Fisher information as in FIT (https://arxiv.org/abs/2210.08502). The text runs forwards and the gradients of each
    draw backwards, with one layer in memory at a time. One pass gives all groups' gradients.

    Args:
        checkpoint: an unquantized one; errors are those of `load_checkpoint`.
        config: the low precision.
        samples: calibration token ids, each (1, T); read 128 at a time.
        scratch: directory for a file of the states between the layers, which are in memory if None.
        draws: tokens drawn at each position.
    """
    stored, layers = StoredModel(TensorFiles(checkpoint), model, device), range(model.num_hidden_layers)
    chunks = [chunk for tokens in samples for chunk in torch.split(tokens, _CHUNK, dim=1)]
    read, costs = sum(chunk.numel() for chunk in chunks), list[SensitivityGroup]()
    check_names(stored.tensors, model)
    with progress_bar("sensitivity", 2 * len(layers)) as bar:
        before: list[Sequence[Tensor]] = [kept_in(scratch, stored.first_states(stored.table(EMBEDDING), chunks))]
        for layer in layers:
            before.append(run_layer(stored.block(layer), before[-1], stored.rope))
            bar.advance()
        like = before[-1]
        gradients = kept_like(like, _last_gradients(stored, before.pop(), draws, seed))
        for layer in reversed(layers):
            block, prefix = stored.block(layer), f"model.layers.{layer}"
            matrices, alike = block_matrices(block.config), dict[str, list[str]]()
            for matrix in matrices:
                source = "inner of experts" if matrix.routed and matrix.writes_residual else matrix.input
                alike.setdefault(source, []).append(f"{prefix}.{matrix.name}")
            groups = list(map(tuple, alike.values()))
            weights = {f"{prefix}.{one.name}": block.get_parameter(f"{one.name}.weight") for one in matrices}
            squares, changes = dict.fromkeys(groups, 0.0), _watched(weights, config)
            gradients = kept_like(like, _backwards(block, stored.rope, before.pop(), gradients, changes, squares))
            sizes = {name: _extra_bytes(config, name, weight) for name, weight in weights.items()}
            costs[:0] = [
                SensitivityGroup(group, square / (2 * read), sum(sizes[name] for name in group))
                for group, square in squares.items()
            ]
            bar.advance()
    return costs


def _last_gradients(stored: StoredModel, states_BTD: Iterable[Tensor], draws: int, seed: int) -> Iterator[Tensor]:
    """(R, 1, T, D) for each chunk: gradients of the log probability of R draws by the states after the last layer.

    With logits W h the gradient by h is W[drawn] - sum over v of p(v) W[v], and its second term serves all draws.

    Raises:
        ArtifactError: the logits are not finite.
    """
    norm, cap, device = stored.last_norm, stored.config.logit_softcap, stored.device
    draw, head_VD = torch.Generator().manual_seed(seed), stored.table(stored.head_name).to(device)
    for x_BTD in states_BTD:
        with torch.enable_grad():
            last_BTD = x_BTD.detach().requires_grad_()
            normed_BTD = norm(last_BTD)
        logits_TV = softcapped(F.linear(normed_BTD[0], head_VD), cap)
        slope_TV = None if cap is None else 1 - (logits_TV / cap).square()
        require_finite(float(logits_TV.max()))
        p_TV = logits_TV.log_softmax(-1).exp_()
        del logits_TV
        p_here_TV = p_TV.cpu()  # so that all devices draw the same
        drawn = [torch.multinomial(p_here_TV, 1, generator=draw).to(device) for _ in range(draws)]
        del p_here_TV
        mean_TD = (p_TV if slope_TV is None else p_TV.mul_(slope_TV)) @ head_VD
        found: list[Tensor] = []
        for drawn_T1 in drawn:
            rows_TD = head_VD[drawn_T1[:, 0]] * (1 if slope_TV is None else slope_TV.gather(1, drawn_T1))
            found += torch.autograd.grad(normed_BTD, last_BTD, (rows_TD - mean_TD)[None], retain_graph=True)
        yield torch.stack(found)


def _watched(weights: Mapping[str, nn.Parameter], config: QuantizationConfig) -> dict[str, float]:
    """By matrix its gradient times its rounding error, anew with each backward pass; no gradient is kept."""
    changes: dict[str, float] = {}

    def take(name: str, error_NK: Tensor, weight: Tensor) -> None:
        assert weight.grad is not None, "the hook follows the gradient"
        changes[name] = float((weight.grad * error_NK).sum(dtype=torch.float64))
        weight.grad = None

    for name, weight in weights.items():
        rounded = round_weight(weight.detach(), config.grid_for(name), search=True)
        error_NK = torch.from_numpy(rounded.dequantize()).to(weight.device).sub_(weight.detach())
        hook = partial(take, name, error_NK)
        weight.requires_grad_().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return changes


def _backwards(
    block: Block,
    rope: Rope,
    states_BTD: Iterable[Tensor],
    gradients_RBTD: Iterable[Tensor],
    changes: dict[str, float],
    squares: dict[tuple[str, ...], float],
) -> Iterator[Tensor]:
    """The gradients by what a layer reads, given those by its result; mean squares of `changes` join `squares`."""
    for x_BTD, given_RBTD in zip(states_BTD, gradients_RBTD, strict=True):
        found = []
        with torch.enable_grad():
            read_BTD = x_BTD.detach().requires_grad_()
            after_BTD = block(read_BTD, first_positions(rope, read_BTD))
            for place, given_BTD in enumerate(given_RBTD, start=1):
                after_BTD.backward(given_BTD, retain_graph=place < len(given_RBTD))
                for group in squares:
                    squares[group] += sum(changes.get(name, 0.0) for name in group) ** 2 / len(given_RBTD)
                assert read_BTD.grad is not None, "a layer adds to what it reads"
                found.append(read_BTD.grad)
                read_BTD.grad = None
        yield torch.stack(found)


def _extra_bytes(config: QuantizationConfig, name: str, weight_NK: Tensor) -> int:
    """What 8 bits add to the bytes of a matrix."""
    high = dataclasses.replace(config, bits=HIGH_BITS, symmetric=True)
    return high.bytes_for(name, *weight_NK.shape) - config.bytes_for(name, *weight_NK.shape)


def choose_bits(config: QuantizationConfig, groups: Sequence[SensitivityGroup], spare_bytes: int) -> QuantizationConfig:
    """Give 8 bits to the groups that save most KL per byte, as long as `spare_bytes` last.

    Groups that have 8 bits anyway, such as a mixture's shared experts, are left out.
    """
    chosen: dict[str, int] = {}
    open_groups = [group for group in groups if group.extra_bytes > 0]
    for group in sorted(open_groups, key=lambda group: group.kl / group.extra_bytes, reverse=True):
        if group.extra_bytes <= spare_bytes:
            spare_bytes -= group.extra_bytes
            chosen |= dict.fromkeys(group.modules, HIGH_BITS)
    return dataclasses.replace(config, modules=chosen)
