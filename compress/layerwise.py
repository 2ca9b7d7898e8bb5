"""Layer by layer: hidden states streamed through the layers once, in memory or in a file, and what modules read.

Pruning and quantization change one layer after the other. Both the full and the changed model read the calibration text
up to that layer, so memory is that of a layer and of the residual streams. `compress.layer_fit` fits a changed layer.
Shape suffixes: B sequences, T tokens of one, D hidden_size, U channels, N tokens of all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from sportsllm.formats.checkpoint import StoredBlock
from sportsllm.formats.safetensors import StreamedTensors
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import NORMS
from sportsllm.models.language_model import Block, SportsLLM, first_positions
from sportsllm.models.layers import Rope
from sportsllm.process_memory import available_bytes

CPU = torch.device("cpu")
_KNOWN_BYTES, _KNOWN_SHARE = 2**28, 0.25  # of a GPU's memory, and of the free main memory, or disk for states in files
Key = TypeVar("Key")
Statistic = Callable[[Tensor, Tensor], Tensor]
"""From the input and the output of one call of a module to a new tensor, which is added up."""
BAND = 1024  # rows of a second moment that are one product


@contextmanager
def summed(watched: Mapping[Key, tuple[nn.Module, Statistic]]) -> Iterator[dict[Key, Tensor]]:
    """Sums over all calls of the modules inside the `with`; a module that is not called has none."""
    sums: dict[Key, Tensor] = {}

    def add_to(key: Key, statistic: Statistic) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            value = statistic(args[0], output)
            sums[key] = sums[key].add_(value) if key in sums else value

        return hook

    with ExitStack() as hooks:
        for key, (module, statistic) in watched.items():
            hooks.enter_context(module.register_forward_hook(add_to(key, statistic)))
        yield sums


def input_squares(inputs: Tensor, _output: Tensor) -> Tensor:
    """Statistic: sum of a^2 over all tokens of a module's inputs, (U,) float64."""
    return inputs.flatten(0, -2).double().square().sum(dim=0)


def half_moment(activations: Tensor, total_UU: Tensor | None = None) -> Tensor:
    """Sum of a a^T over all tokens, (U, U), by float32 products, added to `total_UU` in place if that is given.

    Far below the diagonal there are zeros, for `mirrored` to fill in.
    """
    a_NU = activations.flatten(0, -2).float()
    width = a_NU.shape[1]
    total_UU = a_NU.new_zeros(width, width) if total_UU is None else total_UU
    for start in range(0, width, BAND):
        end = start + BAND
        total_UU[:end, start:end] += a_NU[:, :end].T @ a_NU[:, start:end].contiguous()
    return total_UU


def mirrored(half_UU: Tensor) -> Tensor:
    """The whole of a sum of `half_moment`, in place."""
    for start in range(BAND, len(half_UU), BAND):
        half_UU[start:, start - BAND : start] = half_UU[start - BAND : start, start:].T
    return half_UU


def solved(left_XSS: Tensor, right_XSR: Tensor) -> Tensor:
    """The solutions of several systems, each by itself.

    With two threads PyTorch 2.13's LU of several matrices of 192 or more unknowns returns garbage on a CPU.
    """
    return torch.stack([torch.linalg.solve(*each) for each in zip(left_XSS, right_XSR, strict=True)])


def second_moment(activations: Tensor) -> Tensor:
    """Sum of a a^T over all tokens, (U, U), by float32 products."""
    return mirrored(half_moment(activations))


def input_moment(inputs: Tensor, _output: Tensor) -> Tensor:
    """Statistic: `half_moment` of a module's inputs."""
    return half_moment(inputs)


class StoredStates(Sequence[Tensor]):
    """Residual streams of samples in a scratch file: one sample is in memory when it is read."""

    def __init__(self, directory: Path, states: Iterable[Tensor]) -> None:
        """Write float32 tensors one after the other into a file of `directory` that has no name."""
        self._directory, self._shapes = directory, list[torch.Size]()
        self._file = TemporaryFile(dir=directory)  # noqa: SIM115  # closed with its owner
        self._starts = [0]
        self.extend(states)

    def extend(self, states: Iterable[Tensor]) -> None:
        """Add others at the end."""
        for state in states:
            self._file.seek(self._starts[-1])
            self._shapes.append(state.shape)
            self._device = state.device
            self._starts.append(self._starts[-1] + self._file.write(state.cpu().contiguous().numpy().data))

    def like(self, states: Iterable[Tensor]) -> StoredStates:
        """Others in a file of the same directory."""
        return StoredStates(self._directory, states)

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return self._starts[-1]

    def __len__(self) -> int:
        return len(self._shapes)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> list[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | list[Tensor]:
        chosen = range(len(self))[place]
        if isinstance(chosen, range):
            return [self[each] for each in chosen]
        state = torch.empty(self._shapes[chosen])
        self._file.seek(self._starts[chosen])
        self._file.readinto(state.numpy().data)
        return state.to(self._device)


def kept_in(scratch: Path | None, states: Iterable[Tensor]) -> StoredStates | list[Tensor]:
    """States in a file of the directory `scratch`, in memory if it is None."""
    return list(states) if scratch is None else StoredStates(scratch, states)


def kept_like(states: Sequence[Tensor], following: Iterable[Tensor]) -> StoredStates | list[Tensor]:
    """States kept as others are: in memory or in a file."""
    return states.like(following) if isinstance(states, StoredStates) else list(following)


def block_of(model: SportsLLM, layer: int) -> Block:
    """A layer of a model, read to the device of the model's head if it is not in memory."""
    block = model.model.layers[layer]
    return cast(Block, block.read().to(model.head_weight.device) if isinstance(block, StoredBlock) else block)


def blocks_of(model: SportsLLM) -> Iterator[Block]:
    """The layers of a model, one after the other."""
    return (block_of(model, layer) for layer in range(len(model.model.layers)))


def ends_of(model: SportsLLM) -> dict[str, Tensor]:
    """The tensors of a model outside its layers."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("model.layers.")}


def block_from(config: ModelConfig, layer: int, state: Mapping[str, Tensor]) -> Block:
    """A layer of copies of these tensors."""
    with torch.device("meta"):
        block = Block(config, layer)
    block.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    return block.eval()


def derived(
    model: SportsLLM, config: ModelConfig, ends: Mapping[str, Tensor], make: Callable[[int], Block], once: bool = False
) -> SportsLLM:
    """A model with copies of the tensors `ends` and with the layers that `make` returns by their numbers.

    If the layers of `model` are not in memory, each is made whenever it is read, or `once`, for a scratch file.
    """
    with torch.device("meta"):
        made = SportsLLM(config)
    made.model.layers = nn.ModuleList()
    made.load_state_dict({name: tensor.clone() for name, tensor in ends.items()}, assign=True)
    scratch = scratch_of(model)
    for layer in range(config.num_hidden_layers):
        made.model.layers.append(make(layer) if scratch is None else StoredBlock(partial(make, layer), scratch))
        if once and scratch is not None:
            replace_block(made, layer, make(layer))
    return made.to(model.head_weight.device).eval()


def replace_block(model: SportsLLM, layer: int, block: Block) -> None:
    """Put a changed layer into a model, or into a scratch file if the model's layers are not in memory."""
    stored = model.model.layers[layer]
    if not isinstance(stored, StoredBlock):
        model.model.layers[layer] = block
        return
    assert stored.scratch is not None, "the model's layers are changed"
    file = in_scratch_file(stored.scratch, block.state_dict())
    stored.read = partial(block_from, model.config, layer, file)


def in_scratch_file(directory: Path, state: Mapping[str, Tensor]) -> StreamedTensors:
    """Tensors in a file of a directory that goes with its last reader."""
    file = StreamedTensors(directory, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()})
    file.update(state)
    return file


def scratch_of(model: SportsLLM) -> Path | None:
    """The directory for what is computed of a model whose layers are not in memory."""
    first = model.model.layers[0]
    return first.scratch if isinstance(first, StoredBlock) else None


def embedded(model: SportsLLM, samples: Iterable[Tensor]) -> Sequence[Tensor]:
    """The residual stream before the first layer, (B, T, D) of every sample of token ids."""
    return kept_in(scratch_of(model), (model.embedded(tokens) for tokens in samples))


def run_layer(block: Block, states_BTD: Sequence[Tensor], rope: Rope) -> Sequence[Tensor]:
    """The residual stream after a layer, for every sample."""
    return kept_like(states_BTD, (block(x, first_positions(rope, x)) for x in states_BTD))


def after_sublayer(
    block: Block, sublayer: str, states_BTD: Sequence[Tensor], rope: Rope, read_BTD: Sequence[Tensor] | None = None
) -> Sequence[Tensor]:
    """The residual stream after one of the two sublayers (`NORMS`) of a layer, for every sample; see `add_sublayer`."""
    streams = zip(states_BTD, repeat(None) if read_BTD is None else read_BTD, strict=False)
    following = (block.add_sublayer(sublayer, x, first_positions(rope, x), read_BTD=read) for x, read in streams)
    return kept_like(states_BTD, following)


class LayerStates(NamedTuple):
    """Residual streams of every sample, (B, T, D) each, in a layer: after its attention, and at its end."""

    attention: Sequence[Tensor]
    end: Sequence[Tensor]

    @staticmethod
    def of(block: Block, states_BTD: Sequence[Tensor], rope: Rope) -> LayerStates:
        """The states of a layer that reads `states_BTD`."""
        attention, feed_forward = NORMS
        between = after_sublayer(block, attention, states_BTD, rope)
        read_BTD = states_BTD if block.config.parallel_residual else None
        return LayerStates(between, after_sublayer(block, feed_forward, between, rope, read_BTD))


class KnownStates:
    """A cache of samples' residual streams in the layers of a model, up to `_KNOWN_SHARE` of the free memory.

    Of streams in files only those at the layers' ends are kept, up to that share of the free disk.
    """

    def __init__(self, model: SportsLLM) -> None:
        scratch = scratch_of(model)
        free = available_bytes() if scratch is None else shutil.disk_usage(scratch).free
        in_gpu = scratch is None and model.head_weight.device != CPU
        self._left = _KNOWN_BYTES if in_gpu else int(_KNOWN_SHARE * free)
        self.model = model
        self._found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._ends: dict[tuple[tuple[int, int], ...], StoredStates] = {}

    def of(
        self, layer: int, samples: Sequence[Tensor], states_BTD: Sequence[Tensor], block: Block | None = None
    ) -> LayerStates:
        """The states of a layer, which is `block`, that reads `states_BTD`, those of `samples`.

        The samples must outlive this object.
        """
        keys = [(layer, id(tokens)) for tokens in samples]
        if all(key in self._found for key in keys):
            between, end = zip(*(self._found[key] for key in keys), strict=True)
            return LayerStates(between, end)
        block, attention = block or block_of(self.model, layer), next(iter(NORMS))
        if (ends := self._ends.get(tuple(keys))) is not None:
            return LayerStates(after_sublayer(block, attention, states_BTD, self.model.rope), ends)
        states = LayerStates.of(block, states_BTD, self.model.rope)
        size = states.end.nbytes if isinstance(states.end, StoredStates) else 2 * sum(x.nbytes for x in states.end)
        if size <= self._left:
            self._left -= size
            if isinstance(states.end, StoredStates):
                self._ends[tuple(keys)] = states.end
            else:
                self._found.update(zip(keys, zip(*states, strict=True), strict=True))
        return states
