"""Read and write checkpoint directories in Hugging Face's layout, quantized ones included.

Every tensor is checked for name, shape and type.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from sportsllm import processes
from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, write_json
from sportsllm.formats.huggingface import load_config, special_ids, to_hf
from sportsllm.formats.layouts import parts_of
from sportsllm.formats.packed import QUANT_METHOD
from sportsllm.formats.packed_modules import QuantizedEmbedding, QuantizedLinear, read_packed
from sportsllm.formats.safetensors import WEIGHTS, StreamedTensors, TensorFiles, check_shape
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, HEAD, LAST_NORM, POSITIONS, parameters
from sportsllm.models.language_model import Block, SportsLLM, embed, rope_of
from sportsllm.models.layers import KVCache, ResidualNorm, Rope, residual_norm
from sportsllm.process_memory import available_bytes

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja",
)  # fmt: skip
_CPU = torch.device("cpu")
_SHARE_OF_MEMORY = 0.75  # of what is free, for weights; the rest is for activations
_PACKED = ("_packed", "_scale", "_zero_point")


class StoredBlock(nn.Module):
    """A layer that is read from its files whenever it runs; `change`, if set, is applied to what is read.

    `scratch` is the directory for results of the layers, if they are changed.
    """

    def __init__(self, read: Callable[[], Block], scratch: Path | None = None) -> None:
        super().__init__()
        self.read, self.scratch, self.change = read, scratch, cast(Callable[[Block], None] | None, None)

    def forward(
        self, x_BTD: Tensor, rope: Rope, documents: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        block = self.read().to(x_BTD.device)
        if self.change is not None:
            self.change(block)
        after_BTD: Tensor = block(x_BTD, rope, documents, cache)
        return after_BTD


def open_model(directory: Path) -> SportsLLM:
    """Open a checkpoint to run it: as `load_checkpoint` does, or layer by layer if its weights exceed the free memory.

    Both compute the same. Layers that are not in memory have no parameters.

    Raises:
        ArtifactError: as `load_checkpoint`; about a layer when it runs.
    """
    config = load_config(directory)
    if (size := 4 * config.parameters) <= _SHARE_OF_MEMORY * available_bytes():
        return load_checkpoint(directory)
    log(
        f"{directory}: {size / 1e9:.1f} GB of float32 weights exceed the free memory; each layer is loaded when it runs"
    )
    return open_layers(directory)


def open_layers(directory: Path, scratch: Path | None = None) -> SportsLLM:
    """A checkpoint as a model of `StoredBlock`s; errors are those of `open_model`."""
    config, tensors = load_config(directory), TensorFiles(directory)
    check_names(tensors, config)
    with torch.device("meta"):
        model = SportsLLM(config)
    model.model.layers = nn.ModuleList(
        StoredBlock(partial(load_block, tensors, config, layer), scratch) for layer in range(config.num_hidden_layers)
    )
    _fill(model, tensors)
    return model.eval()


def load_checkpoint(directory: Path) -> SportsLLM:
    """Open a checkpoint as a float32 model in evaluation mode; packed matrices stay packed.

    Raises:
        ArtifactError: a file is missing, damaged, of the wrong shape, not finite, or not supported.
    """
    config = load_config(directory)
    tensors = TensorFiles(directory)
    names = _model_names(config, tensors)
    with torch.device("meta"):
        model = SportsLLM(config)
    _fill(model, tensors)
    _refuse_unknown(names - model.state_dict().keys(), directory)
    return model.eval()


def _model_names(config: ModelConfig, tensors: TensorFiles) -> set[str]:
    """Names of a checkpoint's tensors, without those that say nothing of their own.

    Raises:
        ArtifactError: config.json ties embedding and head, and the files hold a head that is another matrix.
    """
    names = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "lm_head.weight" in names:  # some writers store the tied matrix twice
        names.discard("lm_head.weight")
        embedding = f"{EMBEDDING}.weight"
        if embedding in names and not torch.equal(tensors["lm_head.weight"], tensors[embedding]):
            raise ArtifactError(
                f"{tensors.directory}: config.json ties embedding and head, but lm_head.weight "
                "differs from it; set tie_word_embeddings to false there"
            )
    return names


def load_block(tensors: TensorFiles, config: ModelConfig, layer: int) -> Block:
    """One layer of a checkpoint, so that a model can be read layer by layer; float32, packed matrices stay packed."""
    with torch.device("meta"):
        block = Block(config, layer)
    _fill(block, tensors, f"model.layers.{layer}.")
    return block.eval().requires_grad_(False)


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint that is computed one layer after the other, on `device`; each part is read when it is asked for."""

    tensors: TensorFiles
    config: ModelConfig
    device: torch.device = _CPU

    @cached_property
    def rope(self) -> Rope:
        """Rotary tables."""
        return rope_of(self.config, self.device)

    @cached_property
    def last_norm(self) -> ResidualNorm:
        """The norm before the head."""
        with torch.device("meta"):
            norm = residual_norm(self.config)
        _fill(norm, self.tensors, f"{LAST_NORM}.")
        return norm.to(self.device).eval().requires_grad_(False)

    @property
    def head_name(self) -> str:
        """The module of the head's matrix."""
        return EMBEDDING if self.config.tie_word_embeddings else HEAD

    def table(self, module: str) -> Tensor:
        """The embedding's or the head's matrix, packed or not, in the CPU's memory, (V, D) float32."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        if f"{module}.weight_packed" in self.tensors:
            return torch.from_numpy(read_packed(self.tensors, module, shape).dequantize())
        return read_tensor(self.tensors, f"{module}.weight", shape)

    def block(self, layer: int) -> Block:
        """One layer."""
        return load_block(self.tensors, self.config, layer).to(self.device)

    def first_states(self, table_VD: Tensor, samples: Iterable[Tensor]) -> Iterator[Tensor]:
        """The residual stream before the first layer, (B, T, D) for each sample of rows of the embedding, (B, T)."""
        positions = None
        if self.config.positions:
            shape = self.config.positions, self.config.hidden_size
            positions = read_tensor(self.tensors, f"{POSITIONS}.weight", shape)
        return (embed(self.config, table_VD[tokens].float(), positions).to(self.device) for tokens in samples)


def check_names(tensors: TensorFiles, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Refuse tensors that belong to no part of the model, and a head that contradicts the declared tying.

    Returns:
        Names and shapes of the model's parameters.

    Raises:
        ArtifactError: there is such a tensor.
    """
    shapes = {item.name: item.shape for item in parameters(config)}
    packed = {f"{name}{suffix}" for name in shapes if name.endswith(".weight") for suffix in _PACKED}
    _refuse_unknown(_model_names(config, tensors) - shapes.keys() - packed, tensors.directory)
    return shapes


def read_ends(tensors: TensorFiles, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors outside the layers, one after the other: embedding, final norm and an untied head; float32."""
    shapes = check_names(tensors, config)
    yield from (
        (name, read_tensor(tensors, name, shapes[name])) for name in shapes if not name.startswith("model.layers.")
    )


def read_tensor(tensors: TensorFiles, name: str, shape: tuple[int, ...]) -> Tensor:
    """One of the model's tensors that are not packed, float32.

    Raises:
        ArtifactError: it is missing, of another shape or not finite.
    """
    if name not in tensors:
        stored = tensors.stored_name(name)
        raise ArtifactError(f"{tensors.directory}: tensor {stored!r} is missing; config.json asks for it")
    tensor = tensors[name]
    check_shape(tensor, shape, name, tensors.directory)
    return tensor.float().contiguous()


def _refuse_unknown(names: set[str], directory: Path) -> None:
    if names:
        raise ArtifactError(f"{directory}: tensor {sorted(names)[0]!r} belongs to no part of this model")


def _fill(model: nn.Module, tensors: TensorFiles, prefix: str = "") -> None:
    """Give a model on the meta device its weights; packed matrices become modules that hold them."""

    def put(name: str, value: nn.Parameter | nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, value)

    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear | nn.Embedding) or f"{prefix}{name}.weight_packed" not in tensors:
            continue
        shape = tuple(module.weight.shape)
        quantized = read_packed(tensors, prefix + name, shape)
        if isinstance(module, nn.Embedding):
            put(name, QuantizedEmbedding(quantized, tied=getattr(model, "lm_head", None) is None))
        else:
            bias = None if module.bias is None else read_tensor(tensors, f"{prefix}{name}.bias", (shape[0],))
            put(name, QuantizedLinear(quantized, bias))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            put(name, nn.Parameter(read_tensor(tensors, prefix + name, tuple(parameter.shape))))


def save_checkpoint(directory: Path, model: SportsLLM, tokenizer_from: Path | None = None) -> None:
    """Write config and float32 weights into `directory`; see `write_checkpoint`.

    Of several processes all call this, and the first writes. Layers that are not in memory are written one by one.
    """
    tensors = {name: processes.whole(tensor) for name, tensor in model.state_dict().items()}
    stored = (
        (f"model.layers.{number}.{name}", tensor)
        for number, layer in enumerate(model.model.layers)
        if isinstance(layer, StoredBlock)
        for name, tensor in layer.read().state_dict().items()
    )
    if processes.rank() == 0:
        write_checkpoint(directory, model.config, chain(tensors.items(), stored), tokenizer_from)


def write_checkpoint(
    directory: Path, config: ModelConfig, tensors: Iterable[tuple[str, Tensor]], tokenizer_from: Path | None = None
) -> None:
    """Write an unquantized checkpoint's float32 tensors one after the other, in the order of `parameters`."""
    parts = parts_of(to_hf(config)["model_type"], config)
    joined, waiting = dict[str, list[Tensor]](), dict[str, list[Tensor]]()
    for item in parameters(config):
        joined.setdefault(parts[item.name].stored, []).append(torch.empty(item.shape, device="meta"))
    shapes = {part.stored: tuple(part.join(joined[part.stored]).shape) for part in parts.values()}
    file = StreamedTensors(directory / WEIGHTS, {name: (torch.float32, shape) for name, shape in shapes.items()})
    for name, tensor in tensors:
        part = parts[name]
        waiting.setdefault(part.stored, []).append(tensor)
        if len(waiting[part.stored]) == len(joined[part.stored]):
            file[part.stored] = part.join(waiting.pop(part.stored))
    write_config(directory, config, tokenizer_from)


def write_config(
    directory: Path, config: ModelConfig, tokenizer_from: Path | None = None, quantization: JsonObject | None = None
) -> None:
    """Write all files of a checkpoint but its weights.

    Args:
        tokenizer_from: a directory whose tokenizer and generation files are copied.
        quantization: recorded as config.json's quantization_config.
    """
    data = to_hf(config)
    if quantization is not None:
        data["quantization_config"] = {"quant_method": QUANT_METHOD, **quantization}
    write_json(directory / "config.json", data)
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, directory)
    if not (directory / "generation_config.json").exists():
        write_generation_config(directory, config)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; a full disk raises OSError as it does everywhere else."""
    try:
        save_file(tensors, str(path), metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code.group(1)), os.strerror(int(code.group(1))), str(path)) from None


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy tokenizer and generation files from one directory into another."""
    if not (source / "tokenizer.json").exists():
        raise ArtifactError(f"{source / 'tokenizer.json'}: not found; the checkpoint needs its tokenizer")
    for name in TOKENIZER_FILES:
        if (source / name).exists() and source != target:
            shutil.copyfile(source / name, target / name)


def write_generation_config(directory: Path, config: ModelConfig) -> None:
    """Sampling defaults and special tokens, as Hugging Face's loaders read them."""
    data = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "max_new_tokens": 100}
    write_json(directory / "generation_config.json", data | special_ids(config))
