"""What every form of the parity gate starts from and ends in: limits, test sequences, the graph's facts, the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from export.cache_scales import CacheScales
from export.graph.matmul import FLAT, PER_ROW_PRODUCT
from export.parity.comparison import Limits, Pass
from export.paths import find_files
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.models.rope import rope_tables
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer

# Float32 in another order of additions. Measured: 2e-6 to 1e-5 of the spread for 5 to 12 layers, trained or fresh;
# 5e-6 for 32 fresh layers, and 1e-4 where these have weights six times as large, so that they amplify any difference.
EXACT = Limits(error=3e-4, kl=1e-6, greedy_match=0.99)
# This pass bounds what rounding costs; finding mistakes is the exact pass's work. Where a fresh model's best token
# leads by less than the rounding noise, greedy choices differ although nothing is wrong, so that limit is low.
# With an INT8 cache a number near the middle between two steps goes either way with the order of additions, and then
# differs by a whole step. Measured: error 1e-3 to 2e-2, KL up to 3e-6.
EXACT_INT8_CACHE = Limits(error=0.1, kl=1e-4, greedy_match=0.98)
DEPLOYED = {
    # Weights rounded to 11 bits. Measured: error 2e-3 to 5e-3, KL up to 1e-6, all but 0.3% of choices agree.
    "fp16": Limits(error=0.1, kl=1e-3, greedy_match=0.9),
    # Activations rounded to int8 in blocks; the weights' own bits play no part, the reference has the same. Measured:
    # error 0.03 to 0.13, KL up to 9e-4 (trained, block 128), 95% (97M, fresh) to 99% (trained) of choices agree.
    "int8": Limits(error=1.0, kl=1e-2, greedy_match=0.75),
    "int4": Limits(error=1.0, kl=1e-2, greedy_match=0.75),
    # Multiplied in float32; only the head rounds activations, where it is packed.
    "nf4": Limits(error=1.0, kl=1e-2, greedy_match=0.75),
}
# A whole tensor of inputs rounded to int8 with one scale. Measured, trained, on tokens drawn at random: error 0.5 to
# 1.2, KL up to 5e-3, 93% of choices agree.
DEPLOYED_PER_ROW = Limits(error=4.0, kl=5e-2, greedy_match=0.6)
SEED = 20_260
_PACKED_TYPES = {ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.UINT8}
# ONNX Runtime reads the first in several pieces; the third is real text where there is a tokenizer.
SEQUENCE_LENGTHS = (300, 56, 48)
STEPS = 4  # few, since exact steps are slow: at 8 bits each one unpacks all the weights
TEXTS = (
    "The home side won 3-1 after extra time.",
    "First line\nsecond line:  two spaces, a\ttab and “quotes”.",
    "Zoë ran 57½ metres, très vite! ⚽🏏",
)


@dataclass(frozen=True)
class ParityReport:
    """What the gate found.

    Attributes:
        precision: `fp32`, `fp16`, `int8`, `int4` or `nf4`: the smallest in the graph.
        passes: exact, and deployed where that differs.
        unequal_tables: stored tables that differ from the model's.
        tokenizer_changes: texts that do not survive encoding and decoding (normalising tokenizers do that by
            design, so this is reported only); None without a tokenizer.
    """

    precision: str
    passes: tuple[Pass, ...]
    unequal_tables: tuple[str, ...]
    tokenizer_changes: tuple[str, ...] | None

    def failures(self) -> list[str]:
        """One line for each reason not to publish."""
        lines = [f"table {name!r} differs from the model's" for name in self.unequal_tables]
        return lines + [line for item in self.passes for line in item.failures()]

    @property
    def passed(self) -> bool:
        """Whether the export may be published."""
        return not self.failures()

    def to_dict(self) -> dict[str, Any]:
        """parity.json; the figures at the top are those of the file as it runs."""
        last = self.passes[-1]
        return {
            "max_abs_logit_error": max(c.max_abs_logit_error for c in last.comparisons),
            "kl": max(c.kl for c in last.comparisons),
            "greedy_match": last.greedy_match,
            "passed": self.passed,
            "failures": self.failures(),
            **asdict(self),
            "tokenizer_changes": None if self.tokenizer_changes is None else list(self.tokenizer_changes),
        }


@dataclass(frozen=True)
class GateInputs:
    """What every form of the gate starts from.

    Attributes:
        graph: the exported one.
        config: the model's shape, the same on both sides.
        precision: see `graph_precision`.
        scales: of an INT8 cache.
        sequences: see `make_sequences`.
        tokenizer: the checkpoint's, if it has one.
    """

    graph: ir.Model
    config: ModelConfig
    precision: str
    scales: CacheScales | None
    sequences: list[list[int]]
    tokenizer: TextTokenizer | None

    @staticmethod
    def read(checkpoint: Path, export: Path) -> GateInputs:
        """Read both directories, all but the weights.

        Raises:
            ArtifactError: one of the two is damaged, or they do not belong together.
        """
        config, graph = load_config(export), ir.load(find_files(export).graph)
        if config != load_config(checkpoint):
            raise ArtifactError(
                f"{export / 'config.json'}: is not that of {checkpoint}; compare an export with its source"
            )
        tokenizer = load_tokenizer(checkpoint, config) if (checkpoint / "tokenizer.json").exists() else None
        scales = graph_cache_scales(graph, config)
        return GateInputs(graph, config, graph_precision(graph), scales, make_sequences(config, tokenizer), tokenizer)

    @property
    def exact_limits(self) -> Limits:
        """Of the exact pass."""
        return EXACT if self.scales is None else EXACT_INT8_CACHE

    @property
    def deployed_limits(self) -> Limits:
        """Of the deployed pass."""
        return DEPLOYED_PER_ROW if multiplies_per_row(self.graph) else DEPLOYED[self.precision]

    def tokenizer_changes(self) -> tuple[str, ...] | None:
        """Texts that do not survive encoding and decoding; None without a tokenizer."""
        return None if self.tokenizer is None else _changed_texts(self.tokenizer)


def graph_precision(graph: ir.Model) -> str:
    """`nf4`, `int4`, `int8`, `fp16` or `fp32`: the narrowest numbers that a graph's matrices are stored in."""
    if any(node.op_type == "MatMulBnb4" for node in graph.graph):
        return "nf4"
    bits = {node.attributes["bits"].as_int() for node in graph.graph if "bits" in node.attributes}
    stored = {value.dtype for value in graph.graph.initializers.values()}
    bits |= {dtype.bitwidth for dtype in stored & _PACKED_TYPES}
    if any(node.op_type == "BitShift" for node in graph.graph):
        bits.add(4)  # an embedding's numbers, two of them in a byte
    if bits:
        return f"int{min(bits)}"
    return "fp16" if ir.DataType.FLOAT16 in stored else "fp32"


def multiplies_per_row(graph: ir.Model) -> bool:
    """Whether inputs are rounded as whole tensors somewhere."""
    return any(node.op_type == PER_ROW_PRODUCT for node in graph.graph)


def graph_cache_scales(graph: ir.Model, config: ModelConfig) -> CacheScales | None:
    """The scales of a graph's INT8 cache; None if it keeps float32."""
    found: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    for layer in range(config.num_hidden_layers):
        for part, scales in found.items():
            value = graph.graph.initializers.get(f"model.layers.{layer}.self_attn.{part}_scale")
            if value is None:
                return None
            stored = np.asarray(cast(Any, value.const_value).numpy())
            scales.append(torch.from_numpy(stored.reshape(config.num_key_value_heads, config.head_dim).copy()))
    return CacheScales(torch.stack(found["k"]), torch.stack(found["v"]))


def exact_graph(graph: ir.Model) -> bytes:
    """The graph with all products in float32, serialized; it reads the same data file."""
    for node in list(graph.graph):
        if "accuracy_level" in node.attributes:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
        if node.op_type == PER_ROW_PRODUCT:
            # Not DequantizeLinear, which ONNX Runtime fuses back into a product of whole numbers.
            x, matrix, scale = node.inputs
            dense = ir.node("Cast", [matrix], {"to": ir.DataType.FLOAT.value}, name=f"{node.name}/dense")
            product = ir.node("MatMul", [x, dense.outputs[0]], name=f"{node.name}/unscaled")
            scaled = ir.node("Mul", [product.outputs[0], scale], name=node.name)
            new = [dense, product, scaled]
            ir.convenience.replace_nodes_and_values(graph.graph, node, [node], new, node.outputs, scaled.outputs)
    return cast(bytes, ir.to_proto(graph).SerializeToString())


def make_sequences(config: ModelConfig, tokenizer: TextTokenizer | None) -> list[list[int]]:
    """Three token sequences, of different lengths where the context allows; the same every time."""
    rng, context = np.random.default_rng(SEED), config.max_position_embeddings
    sequences = [rng.integers(0, config.vocab_size, length).tolist() for length in SEQUENCE_LENGTHS]
    if tokenizer is not None:
        sequences[2] = [tokenizer.begin_id, *tokenizer.encode("\n".join(TEXTS))]
    return [sequence[:context] for sequence in sequences]


@torch.no_grad()
def round_matrices(module: nn.Module) -> None:
    """Round matrices to float16, in place."""
    for parameter in module.parameters():
        if parameter.ndim == 2:
            parameter.copy_(parameter.half())


def unequal_tables(graph: ir.Model, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Names of stored tables, rotary and embedding, that differ from the model's.

    Args:
        graph: the exported one.
        config: its shape.
        tensors: the checkpoint's, each read when it is asked for.
    """
    rotary = dict(zip(("cos_cache", "sin_cache"), rope_tables(config, config.max_position_embeddings), strict=True))
    for name in (*rotary, *(name for name in tensors if name.startswith("model.embed_tokens."))):
        found = graph.graph.initializers
        value = found.get(name, found.get(f"{name}{FLAT}"))
        stored = None if value is None else cast(Any, value.const_value).numpy()
        if name in rotary:
            table = rotary[name]
        else:
            tensor = tensors[name]
            table = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        if stored is None or not np.array_equal(stored.ravel(), table.astype(stored.dtype, copy=False).ravel()):
            yield name


def _changed_texts(tokenizer: TextTokenizer) -> tuple[str, ...]:
    return tuple(text for text in TEXTS if tokenizer.decode(tokenizer.encode(text)) != text)


@contextmanager
def threads_of_torch(threads: int | None) -> Iterator[None]:
    """So many threads inside, if given."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
