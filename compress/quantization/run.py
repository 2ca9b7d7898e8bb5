"""Checkpoint in, quantized checkpoint out: the methods of `quantize`, from round to nearest upwards."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.distillation.recovery import Recovery, prepare_recovery, recover
from compress.quantization.aware_training import pack_trained, round_in_training
from compress.quantization.channel_scaling import RULES
from compress.quantization.layer_by_layer import quantize_calibrated
from compress.quantization.mixed_precision import Group, choose_bits, measure_groups, spare_bytes
from compress.quantization.packed_checkpoint import EMBEDDING, HEAD, PackedTensors, Precision
from sportsllm.console import progress_bar, say
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.storage.artifact import Stage, run_stage
from sportsllm.storage.checkpoint import load_block, load_checkpoint, read_ends, write_checkpoint
from sportsllm.storage.packed_weights import ROW_BITS, stored_bits
from sportsllm.storage.safetensors_files import TensorFiles, bitsandbytes_kind, quantization_config
from sportsllm.text.calibration import calibration_samples
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.setup import manifest_setting

NF4 = "nf4"
METHODS = ("rtn", "mse", NF4, "awq", "smooth", "gptq", "awq+gptq", "smooth+gptq")
CALIBRATED = METHODS[3:]
SAMPLES, SAMPLE_TOKENS = 64, 512
SENSITIVITY_SAMPLES = 16


def quantize_text_free(checkpoint: Path, config: ModelConfig, packed: PackedTensors, search: bool) -> None:
    """Fill `packed` by rounding each matrix by itself.

    Args:
        checkpoint: an unquantized one, read one layer at a time.
        config: its shape.
        packed: empty.
        search: see `compress.quantization.grid.fit_grid`.
    """
    tensors = TensorFiles(checkpoint)
    with progress_bar("quantize", config.num_hidden_layers + 1) as bar:
        for name, tensor in read_ends(tensors, config).items():
            module = name.removesuffix(".weight")
            if module in (EMBEDDING, HEAD):
                packed.add_matrix(module, tensor, search)
            else:
                packed.add(name, tensor)
        bar.advance()
        for layer in range(config.num_hidden_layers):
            for name, tensor in load_block(tensors, config, layer).named_parameters():
                whole = f"model.layers.{layer}.{name}"
                if tensor.ndim == 2:
                    packed.add_matrix(whole.removesuffix(".weight"), tensor, search)
                else:
                    packed.add(whole, tensor)
            bar.advance()


def quantize(
    *,
    checkpoint: Path,
    out: Path,
    precision: Precision,
    method: str | None = None,
    calibration: Sequence[Path] = (),
    samples: int | None = None,
    bits_per_weight: float | None = None,
    size_mb: float | None = None,
    recovery: Recovery | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Quantize a checkpoint directory into a new one.

    Args:
        checkpoint: an unquantized checkpoint, or one that bitsandbytes quantized, which is rounded a second time.
        out: directory to make.
        precision: bits of every matrix.
        method: `rtn` (round to nearest), `mse` (the grid of least squared error first), `nf4` (bitsandbytes' codes for
            the layers' matrices), or those that look at calibration text: `awq` or `smooth` (scales first), `gptq`, and
            both; if not given, gptq where there is calibration text or training (smooth+gptq per row), else mse.
        calibration: text files, never held-out ones; those that the checkpoint was made from if not given.
        samples: pieces of at most 512 tokens that are read; 64 if not given, or what there is.
        bits_per_weight, size_mb: budget for a mixture with 8 bits, see
        `compress.quantization.mixed_precision.spare_bytes`.
        recovery: training as rounded, see `compress.quantization.aware_training`.
        resume: go on with an interrupted training.

    Returns:
        The results, as `quantize --json` prints them; for matrices that were packed before also `regridded_from` and
        `regrid_relative_error`.

    Raises:
        UsageError: a method that is not known, or calibration text for one that reads none.
        ArtifactError: the checkpoint is damaged or quantized already, or the text is missing or too short.
    """
    mixed = bits_per_weight is not None or size_mb is not None
    per_row = precision.bits == ROW_BITS
    chosen = method or (("smooth+gptq" if per_row else "gptq") if calibration or recovery else "mse")
    if chosen not in METHODS:
        raise UsageError(f"--method {method!r} is not known; choose one of {', '.join(METHODS)}")
    if per_row and mixed:
        raise UsageError("--per-row is one precision for all; leave --bits-per-weight and --size-mb out")
    if "smooth" in chosen and not per_row:
        raise UsageError(f"--method {chosen} prepares whole rows; add --per-row, or choose awq or gptq")
    if chosen == NF4 and (precision.bits != 4 or mixed or recovery is not None):
        raise UsageError(
            "--method nf4 has 4 bits in every matrix and no training; leave out --bits, --per-row, --bits-per-weight, "
            "--size-mb and --qad, or choose another method"
        )
    reads_text = chosen in CALIBRATED or mixed
    if not reads_text and (calibration or samples):
        raise UsageError(f"--method {chosen} reads no calibration text; leave it out, or choose gptq")
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized already; give the unquantized checkpoint")
    corpus = manifest_setting(checkpoint, "corpus")
    files = list(calibration) or [Path(name) for name in corpus or []]
    if reads_text and not files:
        asked = f"--method {chosen}" if chosen in CALIBRATED else "mixing precisions"
        raise UsageError(
            f"{asked} needs calibration text, and {checkpoint} does not say what it was made from; "
            "give --calibration FILE, or --method mse with one precision, which needs none"
        )
    settings = {
        "checkpoint": str(checkpoint),
        "bits": precision.bits,
        "method": chosen,
        "block_size": precision.block_size,
        "head_bits": precision.head_bits,
        "symmetric": precision.symmetric,
        "corpus": corpus,
        "valid": manifest_setting(checkpoint, "valid"),
    }
    parents = [checkpoint]
    if reads_text:
        settings |= {"calibration": [str(path) for path in files], "samples": samples}
        parents += files
    config, signals, spare = load_config(checkpoint), None, 0
    if mixed:
        spare = spare_bytes(config, precision, bits_per_weight, size_mb)
        settings |= {"bits_per_weight": bits_per_weight, "size_mb": size_mb}
    if recovery is not None:
        signals = prepare_recovery(recovery, checkpoint, config)
        settings |= recovery.settings(checkpoint)
        parents += recovery.inputs()
    stage = Stage("quantize", settings, parents, seed=None if recovery is None else recovery.config.seed)

    packed_as = bitsandbytes_kind(checkpoint)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        # Scaling moves columns up and what makes their inputs down: no number has a counterpart then.
        rule = next((rule for rule in RULES if rule in chosen), None)
        regridded: dict[str, Any] = {}
        if packed_as is not None:
            say(
                f"{checkpoint}: bitsandbytes stored its matrices as {packed_as}; they are rounded again; "
                "start from the full-precision checkpoint where there is one"
            )
        read = calibration_text(checkpoint, config, files, samples) if reads_text else []
        groups: list[Group] = []
        final = precision
        if mixed:
            groups = measure_groups(load_checkpoint(checkpoint), precision, read[:SENSITIVITY_SAMPLES])
            final = choose_bits(precision, groups, spare)
        packed = PackedTensors(final, nf4=chosen == NF4)
        if chosen in CALIBRATED:
            quantize_calibrated(checkpoint, config, packed, read, scaled=rule, fitted="gptq" in chosen)
        else:
            quantize_text_free(checkpoint, config, packed, search=chosen != "rtn")
        write_checkpoint(directory, config, packed.tensors, checkpoint, {"method": chosen, **packed.record()})
        trained: dict[str, Any] = {}
        if recovery is not None:
            model = load_checkpoint(directory)
            round_in_training(model, None if rule else load_checkpoint(checkpoint))
            model, trained = recover(
                model,
                recovery,
                checkpoint,
                directory=directory,
                identity=stage.fingerprint(),
                resume=resume,
                signals=signals,
            )
            pack_trained(model, packed)
            record = {"method": f"{chosen}+qad", **packed.record()}
            write_checkpoint(directory, config, packed.tensors, checkpoint, record)
        if packed_as is not None:
            error = None if rule else regrid_error(checkpoint, packed)
            regridded = {"regridded_from": packed_as, "regrid_relative_error": error}
        return {
            **trained,
            **regridded,
            "parameters": config.parameters,
            "bits": stored_bits(precision.bits),
            "per_row": per_row,
            "method": chosen,
            "block_size": precision.block_size,
            "head_bits": precision.head_bits,
            "symmetric": precision.symmetric,
            "bits_per_weight": packed.bits_of_layers(),
            "sensitivity": [dataclasses.asdict(group) | {"bits": final.of(group.modules[0])} for group in groups],
            "seconds": time.perf_counter() - started,
        }

    return run_stage(out, stage, make, resume)


def regrid_error(checkpoint: Path, packed: PackedTensors) -> float:
    """Root mean square of what rounding changed in the layers' matrices, over that of the numbers stored before."""
    changed, before = 0.0, 0.0
    tensors = TensorFiles(checkpoint)
    for module in packed.modules:
        if module in (EMBEDDING, HEAD):
            continue
        stored = tensors[f"{module}.weight"].float()
        before += float(stored.square().sum(dtype=torch.float64))
        changed += float((packed.matrix(module) - stored).square().sum(dtype=torch.float64))
    return math.sqrt(changed / before) if before else 0.0


def calibration_text(checkpoint: Path, config: ModelConfig, files: Sequence[Path], samples: int | None) -> list[Tensor]:
    """Token ids of calibration pieces, each (1, T).

    Raises:
        ArtifactError: there is none, or less than asked for.
    """
    found = calibration_samples(files, load_tokenizer(checkpoint, config), config, samples, SAMPLE_TOKENS)
    return found if samples is not None else found[:SAMPLES]
