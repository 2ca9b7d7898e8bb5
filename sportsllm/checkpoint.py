"""Read and write checkpoint directories in Hugging Face's layout, quantized ones included.

Those that bitsandbytes quantized read as dense ones, see `sportsllm.bnb_checkpoint`. Only safetensors are read:
pickle runs code. Every tensor is checked for name, shape, type and finiteness.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sportsllm.artifacts import MANIFEST, read_manifest
from sportsllm.bnb_checkpoint import companions, read_dense
from sportsllm.config import ModelConfig, load_config, packed_by_bitsandbytes, read_json
from sportsllm.errors import ArtifactError
from sportsllm.linear import SUFFIXES, QuantizedEmbedding, QuantizedLinear
from sportsllm.model import Block, SportsLLM
from sportsllm.quantized import BITS, BLOCK_SIZES, ROW_BITS, Nf4Weight, QuantizedWeight, stored_bits

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANT_METHOD = "sportsllm-nbits"
NF4_CODES = "nf4"  # a matrix's `codes` in quantization_config; plain whole numbers where it has none
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read from disk when asked for; bitsandbytes' matrices as dense ones."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        self._where: dict[str, Path] = {}
        for path in _weight_files(directory):
            _refuse_duplicate_names(path)
            try:
                handle = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ArtifactError(f"{path}: not a whole safetensors file ({error}); copy or make it again") from None
            self._files[str(path)] = handle
            for name in list(cast(Any, handle).keys()):
                if name in self._where:
                    raise ArtifactError(f"{path}: tensor {name!r} is also in {self._where[name].name}")
                self._where[name] = path
        self._dense = bitsandbytes_kind(directory) is None
        self._beside = frozenset() if self._dense else companions(self._where)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._beside:
            raise KeyError(name)
        path = self._where[name]
        tensor = self._stored(name) if self._dense else read_dense(name, self._beside, self._stored, str(path))
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{path}: tensor {name!r} holds NaN or infinity; use an undamaged checkpoint")
        return tensor

    def _stored(self, name: str) -> Tensor:
        return cast(Tensor, self._files[str(self._where[name])].get_tensor(name))

    def __contains__(self, name: object) -> bool:
        return name in self._where and name not in self._beside  # without reading it

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._where if name not in self._beside)

    def __len__(self) -> int:
        return len(self._where) - len(self._beside)


def _refuse_duplicate_names(path: Path) -> None:
    """The library keeps the last of two tensors with one name; a file that has two is damaged or made to deceive."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ArtifactError(f"{path}: names {twice!r} twice; make the file again")
        return dict(pairs)

    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > path.stat().st_size:
            return  # the library says what is wrong
        try:
            json.loads(stream.read(length), object_pairs_hook=unique)
        except ValueError:
            return  # here too


def _weight_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory; give a checkpoint directory")
    if (directory / MANIFEST).exists():
        for name, entry in read_manifest(directory)["files"].items():
            path = directory / name
            size = path.stat().st_size if path.exists() else -1
            if size != entry["bytes"]:
                found = "missing" if size < 0 else f"{size} bytes instead of {entry['bytes']}"
                raise ArtifactError(f"{path}: {found}; the directory is damaged, copy or make it again")
    if (directory / INDEX).exists():
        names = sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
        if any(Path(name).name != name for name in names):
            raise ArtifactError(f"{directory / INDEX}: names a file outside the directory; refuse")
        missing = [name for name in names if not (directory / name).exists()]
        if missing or not names:
            raise ArtifactError(f"{directory / INDEX}: {missing or 'no shard'} missing; copy the directory again")
        return [directory / name for name in names]
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if pickles:
        raise ArtifactError(
            f"{directory}: only {pickles[0]} found; pickle files can run code and are not read, "
            "convert them to safetensors"
        )
    raise ArtifactError(f"{directory}: no {WEIGHTS}; is it a finished checkpoint?")


def quantization_config(directory: Path) -> dict[str, Any] | None:
    """How this program quantized a checkpoint; None for dense ones and for bitsandbytes', which read as dense.

    Raises:
        ArtifactError: another method quantized it.
    """
    data = read_json(directory / "config.json").get("quantization_config")
    if data is None or packed_by_bitsandbytes(data) is not None:
        return None
    if not isinstance(data, dict):
        raise ArtifactError(f"{directory / 'config.json'}: quantization_config is {data!r}, not an object; mend it")
    if data.get("quant_method") != QUANT_METHOD:
        raise ArtifactError(
            f"{directory / 'config.json'}: quant_method {data.get('quant_method')!r} is not supported; "
            "use the unquantized checkpoint"
        )
    return cast(dict[str, Any], data)


def bitsandbytes_kind(directory: Path) -> str | None:
    """`NF4`, `FP4` or `INT8` where bitsandbytes packed a checkpoint's matrices, else None."""
    return packed_by_bitsandbytes(read_json(directory / "config.json").get("quantization_config"))


def load_checkpoint(directory: Path) -> SportsLLM:
    """Open a checkpoint as a float32 model in evaluation mode; packed matrices stay packed.

    Args:
        directory: config.json and model.safetensors (or an index and shards).

    Raises:
        ArtifactError: a file is missing, damaged, of the wrong shape, not finite, or not supported.
    """
    config = load_config(directory)
    tensors = TensorFiles(directory)
    quantization = quantization_config(directory)
    with torch.device("meta"):
        model = SportsLLM(config)
    remaining = _model_names(config, tensors)
    for name, module in list(model.named_modules()):
        if f"{name}.weight_packed" in remaining:
            if quantization is None:
                raise ArtifactError(f"{directory}: {name} is packed but config.json has no quantization_config")
            _install_packed(model, name, module, tensors, directory)
            remaining -= {f"{name}.weight{suffix}" for suffix in SUFFIXES}
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            remaining.discard(name)
            continue
        _set(model, name, nn.Parameter(_read(tensors, name, tuple(parameter.shape))))
        remaining.discard(name)
    _refuse_unknown(remaining, directory)
    return model.eval()


def _model_names(config: ModelConfig, tensors: TensorFiles) -> set[str]:
    """Names of a checkpoint's tensors, without those that say nothing of their own.

    Raises:
        ArtifactError: config.json ties embedding and head, and the files hold a head that is another matrix.
    """
    names = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "lm_head.weight" in names:  # some writers store the tied matrix twice
        names.discard("lm_head.weight")
        embedding = "model.embed_tokens.weight"
        if embedding in names and not torch.equal(tensors["lm_head.weight"], tensors[embedding]):
            raise ArtifactError(
                f"{tensors.directory}: config.json says that embedding and head are one matrix, but lm_head.weight "
                "differs from it; set tie_word_embeddings to false there"
            )
    return names


def load_block(tensors: TensorFiles, config: ModelConfig, layer: int) -> Block:
    """One layer of a checkpoint, so that a model can be read layer by layer; float32, packed matrices stay packed.

    Raises:
        ArtifactError: a tensor is missing, or of another shape than the config asks for.
    """
    with torch.device("meta"):
        block = Block(config, layer)
    prefix = f"model.layers.{layer}."
    for name, module in list(block.named_modules()):
        if f"{prefix}{name}.weight_packed" in tensors:
            _install_packed(block, name, module, tensors, tensors.directory, prefix)
    for name, parameter in list(block.named_parameters()):
        if parameter.is_meta:
            read = _read(tensors, prefix + name, tuple(parameter.shape))
            _set(block, name, nn.Parameter(read, requires_grad=False))
    return block.eval()


def load_table(tensors: TensorFiles, config: ModelConfig, module: str) -> Tensor:
    """The embedding's or the head's matrix, packed or not, (V, D) float32.

    Raises:
        ArtifactError: it is missing or of another shape.
    """
    shape = (config.vocab_size, config.hidden_size)
    if f"{module}.weight_packed" in tensors:
        return torch.from_numpy(read_packed(tensors, module, shape, tensors.directory).dequantize())
    return _read(tensors, f"{module}.weight", shape)


def check_names(tensors: TensorFiles, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Refuse tensors that belong to no part of the model, and a head that contradicts the declared tying.

    Returns:
        Names and shapes of the model's parameters.

    Raises:
        ArtifactError: there is such a tensor.
    """
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in SportsLLM(config).named_parameters()}
    packed = {f"{name}{suffix}" for name in shapes if name.endswith(".weight") for suffix in SUFFIXES}
    _refuse_unknown(_model_names(config, tensors) - shapes.keys() - packed, tensors.directory)
    return shapes


def read_ends(tensors: TensorFiles, config: ModelConfig) -> dict[str, Tensor]:
    """What is not in a layer: embedding, final norm, and the head where it is a matrix of its own; float32.

    Raises:
        ArtifactError: as `load_checkpoint`, for the names of all tensors too.
    """
    shapes = check_names(tensors, config)
    ends = [name for name in shapes if not name.startswith("model.layers.")]
    return {name: _read(tensors, name, shapes[name]) for name in ends}


def _read(tensors: TensorFiles, name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in tensors:
        raise ArtifactError(f"{tensors.directory}: tensor {name!r} is missing; config.json asks for it")
    tensor = tensors[name]
    _check_shape(tensor, shape, name, tensors.directory)
    return tensor.float().contiguous()


def _refuse_unknown(names: set[str], directory: Path) -> None:
    if names:
        raise ArtifactError(f"{directory}: tensor {sorted(names)[0]!r} belongs to no part of this model")


def _check_shape(tensor: Tensor, expected: tuple[int, ...], name: str, directory: Path) -> None:
    if tuple(tensor.shape) != expected:
        raise ArtifactError(
            f"{directory}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json asks for {expected}"
        )


def _set(model: nn.Module, name: str, value: nn.Parameter | nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, value)


def _install_packed(
    model: nn.Module, name: str, module: nn.Module, tensors: TensorFiles, directory: Path, prefix: str = ""
) -> None:
    shape = tuple(cast(Tensor, module.weight).shape)
    quantized = read_packed(tensors, prefix + name, shape, directory)
    if isinstance(module, nn.Embedding):
        _set(model, name, QuantizedEmbedding(quantized))
        return
    bias = _read(tensors, f"{prefix}{name}.bias", (shape[0],)) if cast(Any, module).bias is not None else None
    _set(model, name, QuantizedLinear(quantized, bias))


def read_packed(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], directory: Path
) -> QuantizedWeight | Nf4Weight:
    """One packed matrix of a checkpoint; bits and block size follow from the tensors' shapes, or are NF4's as recorded.

    Args:
        tensors: the checkpoint's tensors.
        name: the module's name; its tensors are `name`.weight_packed, _scale and _zero_point.
        shape: (N, K) that the config asks for.
        directory: for messages.
    """
    packed = tensors[f"{name}.weight_packed"]
    if f"{name}.weight_scale" not in tensors:
        raise ArtifactError(f"{directory}: {name}.weight_scale is missing beside the packed matrix")
    scales = tensors[f"{name}.weight_scale"]
    record = _module_record(directory, name)
    if record.get("codes") == NF4_CODES:
        return _read_nf4(packed, scales, name, shape, record.get("block_size"), directory)
    zero = tensors.get(f"{name}.weight_zero_point")
    recorded = record.get("bits")
    for bits in (*BITS, ROW_BITS):
        if recorded not in (None, bits):
            continue
        block = packed.shape[-1] * 8 // stored_bits(bits)
        groups = -(-shape[1] // block)
        known = block in BLOCK_SIZES if bits in BITS else block == shape[1] and zero is None and recorded == bits
        fits = known and tuple(packed.shape[:2]) == (shape[0], groups)
        if fits and tuple(scales.shape) == (shape[0], groups) and packed.dtype == torch.uint8:
            if bits == ROW_BITS and int(packed.max()) >= 2**ROW_BITS:
                raise ArtifactError(
                    f"{directory}: packed tensor of {name!r} holds numbers beyond 7 bits; make it again"
                )
            if zero is not None:
                _check_shape(zero, (shape[0], -(-groups * bits // 8)), f"{name}.weight_zero_point", directory)
            return QuantizedWeight(
                packed=packed.numpy(),
                scales=scales.float().numpy(),
                zero_points=None if zero is None else zero.numpy(),
                bits=bits,
                block_size=block,
                in_features=shape[1],
            )
    raise ArtifactError(f"{directory}: packed tensor of {name!r} does not fit shape {shape}; make it again")


def _read_nf4(
    packed: Tensor, scales: Tensor, name: str, shape: tuple[int, ...], block_size: Any, directory: Path
) -> Nf4Weight:
    if block_size not in BLOCK_SIZES:
        raise ArtifactError(f"{directory / 'config.json'}: NF4 block_size of {name!r} is {block_size!r}; make it again")
    block, count = int(block_size), shape[0] * shape[1]
    _check_shape(packed, (-(-count // 2),), f"{name}.weight_packed", directory)
    _check_shape(scales, (-(-count // block),), f"{name}.weight_scale", directory)
    if packed.dtype != torch.uint8:
        raise ArtifactError(f"{directory}: tensor '{name}.weight_packed' holds {packed.dtype}, not bytes")
    return Nf4Weight(packed.numpy(), scales.float().numpy(), block, *shape)


def _module_record(directory: Path, name: str) -> dict[str, Any]:
    """What config.json's quantization_config says of one matrix: `bits`, `block_size`, `codes` where they are NF4."""
    data = quantization_config(directory) or {}
    return cast("dict[str, Any]", data.get("modules", {}).get(name, {}))


def save_checkpoint(
    directory: Path,
    model: SportsLLM,
    tokenizer_from: Path | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Write config, weights (float32, packed matrices as bytes) and tokenizer files into `directory`.

    Args:
        directory: exists; usually the `.partial` of `output_directory`.
        model: what to write.
        tokenizer_from: a directory whose tokenizer and generation files are copied.
        quantization: recorded as config.json's quantization_config.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_checkpoint(directory, model.config, tensors, tokenizer_from, quantization)


def write_checkpoint(
    directory: Path,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    tokenizer_from: Path | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """As `save_checkpoint`, from tensors by name."""
    data = config.to_hf()
    if quantization is not None:
        data["quantization_config"] = {"quant_method": QUANT_METHOD, **quantization}
    write_json(directory / "config.json", data)
    save_tensors(directory / WEIGHTS, tensors)
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
        number = int(code.group(1))
        raise OSError(number, os.strerror(number), str(path)) from None


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy tokenizer and generation files from one directory into another."""
    if not (source / "tokenizer.json").exists():
        raise ArtifactError(f"{source / 'tokenizer.json'}: not found; the checkpoint needs its tokenizer")
    for name in TOKENIZER_FILES:
        if (source / name).exists() and source != target:
            shutil.copyfile(source / name, target / name)


def write_generation_config(directory: Path, config: ModelConfig) -> None:
    """Sampling defaults and special tokens, as Hugging Face's loaders read them."""
    data: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "max_new_tokens": 100,
    }
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        if value is not None:
            data[name] = list(value) if isinstance(value, tuple) else value
    write_json(directory / "generation_config.json", data)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """A JSON object, indented, with a newline at the end."""
    path.write_text(json.dumps(dict(data), indent=2) + "\n", encoding="utf-8")
