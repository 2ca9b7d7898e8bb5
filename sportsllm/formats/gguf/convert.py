"""Whole GGUF files as checkpoints."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from sportsllm.console import log
from sportsllm.files import JsonObject, write_json
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.checkpoint import write_checkpoint, write_config
from sportsllm.formats.gguf.config import architecture, open_gguf, read_config
from sportsllm.formats.gguf.tokenizer import write_tokenizer
from sportsllm.formats.gguf.weights import GGUFTensors
from sportsllm.formats.manifest import GGUF_RECORD, MANIFEST, read_manifest
from sportsllm.text.tokenizer import load_tokenizer

_READER = 1  # changes when the same file gives another checkpoint
_LARGE = 8e9  # bytes of float32 weights: those of a larger model stay in the file


def convert_gguf(source: Path, out: Path) -> JsonObject:
    """Write the model of a GGUF file as a float32 checkpoint with its tokenizer.

    The weights of a large model stay in the file: the checkpoint names it, and each tensor is dequantized when it is
    read, see `sportsllm.formats.safetensors.TensorFiles`.

    Args:
        source: a file of one of `ARCHITECTURES`, in any number format that the package `gguf` reads.
        out: the directory to make; one that is up to date is kept.

    Raises:
        ArtifactError: cut short or damaged, another architecture, an unknown tokenizer, a tensor too few or too many.
    """
    file = open_gguf(source)
    config = read_config(file)
    linked = 4 * config.parameters > _LARGE
    stage = Stage("gguf", {"source": source.name, "reader": _READER}, [source.absolute()])

    def make(directory: Path) -> JsonObject:
        tensors = GGUFTensors(file, config)
        write_tokenizer(file, directory)
        load_tokenizer(directory, config)
        if linked:
            write_json(directory / GGUF_RECORD, {"sha256": stage.input_digests[0], "bytes": source.stat().st_size})
            write_config(directory, config)
        else:
            write_checkpoint(directory, config, tensors.items())
        bytes_of: Counter[str] = Counter()
        for tensor in file.tensors.values():
            bytes_of[tensor.tensor_type.name] += int(tensor.n_bytes)
        return {
            "name": file.value_or(None, "general.name", str),
            "source_license": file.value_or(None, "general.license", str),
            "architecture": architecture(file),
            "formats": [name for name, _ in bytes_of.most_common()],
            "parameters": config.parameters,
        }

    result = run_stage(out, stage, make)
    if result["cached"]:
        # Name the file that was read just now, which may have been moved, or written after the manifest.
        manifest, here = read_manifest(out), source.absolute()
        if manifest.parents[0].path != str(here) or here.stat().st_mtime > (out / MANIFEST).stat().st_mtime:
            replace(manifest, parents=(replace(manifest.parents[0], path=str(here)),)).write(out)
    else:
        how = "each tensor is read from it when needed" if linked else f"converted to the float32 checkpoint {out}"
        log(f"{source}: {', '.join(result['formats'])}, {how}")
    return result
