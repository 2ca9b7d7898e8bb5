"""The tensors of a quantized checkpoint, gathered or written matrix by matrix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from compress.quantization.config import UNPACKED, GridSpec, QuantizationConfig
from compress.quantization.gptq import gptq_weight
from compress.quantization.grid import fit_grid
from sportsllm.errors import ArtifactError
from sportsllm.formats.packed import QuantizedWeight
from sportsllm.formats.safetensors import Kind, StreamedTensors
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, HEAD, parameters

ROWS = 8192
"""Rounded together: bounds the memory that a head takes."""


def round_weight(weight_NK: Tensor, spec: GridSpec, search: bool, weights_K: Tensor | None = None) -> QuantizedWeight:
    """Every number to the nearest of its block's grid; other arguments as in `compress.quantization.grid.fit_grid`."""

    def rounded(rows_NK: Tensor) -> QuantizedWeight:
        rows_NK = rows_NK.float() if weights_K is None else rows_NK.to(weights_K)
        grid = fit_grid(rows_NK, *spec, search=search, weights_K=weights_K)
        return grid.pack(grid.round(rows_NK))

    return stack_rows(map(rounded, torch.split(weight_NK, ROWS)), len(weight_NK))


def stack_rows(parts: Iterable[QuantizedWeight], rows: int) -> QuantizedWeight:
    """Matrices of one grid, one under the other, `rows` in all; one part is in memory beside the result."""
    whole, start = dict[str, np.ndarray](), 0
    for part in parts:
        stop = start + part.out_features
        for name in ("packed", "scales", "zero_points"):
            if (array := getattr(part, name)) is not None:
                whole.setdefault(name, np.empty((rows, *array.shape[1:]), array.dtype))[start:stop] = array
        start = stop
    return dataclasses.replace(part, **cast(dict[str, Any], whole))


def stored_kinds(model: ModelConfig, config: QuantizationConfig) -> dict[str, Kind]:
    """Type and shape of every tensor of a quantized checkpoint."""
    kinds: dict[str, Kind] = {}
    for name, shape, role, *_ in parameters(model):
        module = name.removesuffix(".weight")
        if role not in ("matrix", "embedding", "head") or config.bits_for(module) == UNPACKED:
            kinds[name] = torch.float32, shape
            continue
        (rows, columns), spec = shape, config.grid_for(module)
        groups = -(-columns // spec.block_size)
        width = spec.block_size * spec.bits // 8
        kinds[f"{module}.weight_packed"] = torch.uint8, (rows, groups, width)
        kinds[f"{module}.weight_scale"] = torch.float16, (rows, groups)
        if not spec.symmetric:
            kinds[f"{module}.weight_zero_point"] = torch.uint8, (rows, -(-groups * spec.bits // 8))
    return kinds


class PackedCheckpoint:
    """Collects the tensors of a quantized checkpoint, and what its quantization_config records.

    Attributes:
        model, config: the model's shape; bits and grid of every matrix.
        method: one of `compress.quantization.config.METHODS`.
        tensors: in memory, or in the file `path` of the directory that is being made.
        scratch: that directory.
        modules: packed matrices by module, with bits and block size.
        originals: with `keep_originals` the layers' matrices before rounding, scaled, by module, for
            `compress.quantization.qad`.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: QuantizationConfig,
        method: str = "rtn",
        path: Path | None = None,
        keep_originals: bool = False,
    ) -> None:
        self.model, self.config, self.method = model, config, method
        self.keep_originals, self.originals = keep_originals, dict[str, Tensor]()
        self.scratch = None if path is None else path.parent
        self.tensors: MutableMapping[str, Tensor] = {}
        if path is not None:
            self.tensors = StreamedTensors(path, stored_kinds(model, config))
        self.modules: dict[str, dict[str, int]] = {}
        self._parameters = {parameter.name: parameter for parameter in parameters(model)}

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor of the model: a matrix is rounded to the nearest values of its grid; others stay."""
        if self._parameters[name].role in ("matrix", "embedding", "head"):
            self.add_matrix(name.removesuffix(".weight"), tensor)
        else:
            self.add_vector(name, tensor)

    def add_vector(self, name: str, tensor: Tensor) -> None:
        """A tensor as it is, for example a norm's weight."""
        # A copy, since a tensor that is read in place would keep the whole file in memory.
        self.tensors[name] = tensor.detach().to("cpu", copy=True)

    def add_matrix(self, module: str, weight_NK: Tensor) -> None:
        """A module's matrix, each value rounded to the nearest, or kept at 32 bits."""
        if self.config.bits_for(module) == UNPACKED:
            self.add_vector(f"{module}.weight", weight_NK)
        else:
            self.add_packed(module, round_weight(weight_NK, self.config.grid_for(module), self.method != "rtn"))

    def add_packed(self, module: str, packed: QuantizedWeight) -> None:
        """A module's packed matrix.

        Raises:
            ArtifactError: its weights are too large for float16 scales.
        """
        if not np.isfinite(packed.scales).all():
            raise ArtifactError(f"{module}: weights overflow float16 scales; the checkpoint is damaged")
        arrays = {
            "weight_packed": packed.packed,
            "weight_scale": packed.scales.astype(np.float16),
            "weight_zero_point": packed.zero_points,
        }
        self.tensors.update({f"{module}.{name}": torch.from_numpy(a) for name, a in arrays.items() if a is not None})
        self.modules[module] = {"bits": packed.bits, "block_size": packed.block_size}

    def add_by_gptq(self, module: str, weight_NK: Tensor, gram_KK: Tensor) -> None:
        """A module's matrix, rounded for inputs with the damped second moment `gram_KK`."""
        spec, refine = self.config.grid_for(module), self.method == "gptq"
        parts = (gptq_weight(rows.to(gram_KK), gram_KK, *spec, refine) for rows in torch.split(weight_NK, ROWS))
        self.add_packed(module, stack_rows(parts, len(weight_NK)))

    def matrix(self, module: str, rows_N: Tensor | None = None) -> Tensor:
        """What a module's stored matrix, or given rows of it, stands for, (N, K) float32."""
        wanted = slice(None) if rows_N is None else rows_N
        if (dense := self.tensors.get(f"{module}.weight")) is not None:
            return dense[wanted]
        zeros = self.tensors.get(f"{module}.weight_zero_point")
        packed = QuantizedWeight(
            self.tensors[f"{module}.weight_packed"][wanted].numpy(),
            self.tensors[f"{module}.weight_scale"][wanted].float().numpy(),
            None if zeros is None else zeros[wanted].numpy(),
            **self.modules[module],
            in_features=self._parameters[f"{module}.weight"].shape[-1],
        )
        return torch.from_numpy(packed.dequantize())

    def relative_change(self, stored: Mapping[str, Tensor]) -> float:
        """Root mean square of the change of the layers' matrices by rounding, relative to the `stored` values."""
        changed, before = 0.0, 0.0
        for module in self.modules.keys() - {EMBEDDING, HEAD}:
            weight = stored[f"{module}.weight"].double()
            before += float(weight.square().sum())
            changed += float((self.matrix(module) - weight).square().sum())
        return math.sqrt(changed / before) if before else 0.0

    def check_complete(self) -> None:
        """Every tensor that the model's kinds describe must be there."""
        stored = self.tensors.keys() | {f"{module}.weight" for module in self.modules}
        assert not (missing := self._parameters.keys() - stored), f"{sorted(missing)}: not quantized"

    def record(self) -> dict[str, Any]:
        """For config.json."""
        return {"method": self.method, **self.config.record(), "modules": self.modules}
