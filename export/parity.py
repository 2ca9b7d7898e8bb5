"""The gate: an export is published only if it computes what the PyTorch model computes.

Shape suffixes: T tokens, V vocabulary.

Each prompt is read whole (prefill), and again in part with the rest token by token through the cache (decode);
one batch has prompts of unequal length. The reference reads every prompt in one piece and has no cache.

- The exact pass multiplies in float32 throughout (the same graph and data, MatMulNBits at accuracy_level 0, also
  where ONNX Runtime makes it out of standard operators; for float16 storage the reference's matrices are rounded
  too). Only the order of additions differs from PyTorch, so a single wrong weight or cache entry stands out.
- In the latency profile, the exact pass of prompts reads a prompt with the graph for prompts and the rest with the
  other, beside a PyTorch model whose matrices are rounded to rows for the prompt.
- The deployed pass runs the file as it is. It bounds what int8 activations or float16 storage cost.
- Prompts visit few rows of the embedding and of the rotary table, so both are compared whole, for equality.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch

from export.comparison import Comparison, Limits, Pass, compare, merge
from export.kv_cache import CacheScales, RoundedCache
from export.layout import find_files, prompt_files
from export.matrices import ROWS_PRODUCT
from export.prompt_parity import compare_prompts
from export.runtime import OnnxDecoder
from sportsllm.checkpoint import load_checkpoint
from sportsllm.config import ModelConfig
from sportsllm.decoder import Decoder, Logits
from sportsllm.errors import ArtifactError
from sportsllm.model import SportsLLM
from sportsllm.tokenizer import TextTokenizer, load_tokenizer

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
DEPLOYED_ROWS = Limits(error=4.0, kl=5e-2, greedy_match=0.6)
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
        }


def check_parity(checkpoint: Path, export: Path, threads: int | None = None) -> ParityReport:
    """Compare an export with the checkpoint it was made from. Neither directory is changed.

    Args:
        checkpoint: the PyTorch side.
        export: holds a graph, its data and config.json.
        threads: CPU threads of both sides; all cores where not given.

    Raises:
        ArtifactError: one of the two is damaged.
    """
    deployed = OnnxDecoder(export, threads)
    graph = ir.load(find_files(export).graph)
    precision, scales = graph_precision(graph), graph_cache_scales(graph, deployed.config)
    prompts = prompt_files(export).graph
    limits = EXACT if scales is None else EXACT_INT8_CACHE
    model = load_checkpoint(checkpoint)
    tokenizer = load_tokenizer(checkpoint, model.config) if (checkpoint / "tokenizer.json").exists() else None
    if deployed.config != model.config:
        raise ArtifactError(f"{export / 'config.json'}: is not that of {checkpoint}; compare an export with its source")
    sequences = make_sequences(model.config, tokenizer)
    with _torch_threads(threads):
        expected = [_read_whole(model, sequence, scales) for sequence in sequences]
        if precision == "fp32":
            passes = [run_pass("exact", deployed, sequences, expected, limits)]
        else:
            rows = multiplies_rows(graph) or prompts.exists()
            deployed_limits = DEPLOYED_ROWS if rows else DEPLOYED[precision]
            last = run_pass("deployed", deployed, sequences, expected, deployed_limits)
            del deployed
            if precision == "fp16":
                _round_matrices(model)
                expected = [_read_whole(model, sequence, scales) for sequence in sequences]
            prompt_graph = exact_graph(ir.load(prompts)) if prompts.exists() else None
            exact = OnnxDecoder(export, threads, exact_graph(graph), prompt_graph)
            exact.use_prompt_graph = False
            passes = [run_pass("exact", exact, sequences, expected, limits), last]
            if prompt_graph is not None:
                exact.use_prompt_graph = True
                found = compare_prompts(model, exact, sequences[0], STEPS, scales)
                passes.insert(1, Pass("exact prompts", limits, (found,)))
    return ParityReport(
        precision=precision,
        passes=tuple(passes),
        unequal_tables=tuple(_unequal_tables(graph, model)),
        tokenizer_changes=None if tokenizer is None else _changed_texts(tokenizer),
    )


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


def multiplies_rows(graph: ir.Model) -> bool:
    """Whether inputs are rounded as whole tensors somewhere."""
    return any(node.op_type == ROWS_PRODUCT for node in graph.graph)


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
        if node.op_type == ROWS_PRODUCT:
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


def run_pass(
    name: str,
    decoder: OnnxDecoder,
    sequences: Sequence[Sequence[int]],
    expected: Sequence[Logits],
    limits: Limits,
) -> Pass:
    """Read the sequences in every way and compare with the expected logits.

    Args:
        name: of the pass.
        decoder: the export.
        sequences: three, of `make_sequences`. What comes before a token does not change with what follows,
            so their beginnings serve as shorter prompts.
        expected: (T, V) logits of each sequence.
        limits: of the pass.
    """
    whole = [compare(want, decoder.logits(row)) for row, want in zip(sequences, expected, strict=True)]
    # A long prompt, which is read in pieces; one that starts from a single token; a single token and no more.
    cases = [(0, len(sequences[0])), (1, STEPS + 1), (1, 1)]
    stepped = [_compare_decoding(decoder, [sequences[i][:cut]], [expected[i][:cut]]) for i, cut in cases]
    # Prompts of 3, 17 and 40 tokens at most, decoded together.
    cuts = [length + STEPS for length in (3, 17, 40)]
    rows = [row[:cut] for row, cut in zip(sequences, cuts, strict=True)]
    together = _compare_decoding(decoder, rows, [want[:cut] for want, cut in zip(expected, cuts, strict=True)])
    kinds = {"prefill": whole, "decode": stepped, "ragged batch": [together]}
    return Pass(name, limits, tuple(merge(kind, parts) for kind, parts in kinds.items()))


def _compare_decoding(decoder: Decoder, rows: Sequence[Sequence[int]], expected: Sequence[Logits]) -> Comparison:
    steps = min(STEPS, min(map(len, rows)) - 1)
    found_SBV = decode(decoder, rows, steps)
    parts = [compare(want[-steps - 1 :], found_SBV[:, row]) for row, want in enumerate(expected)]
    return merge("", parts)


def decode(decoder: Decoder, rows: Sequence[Sequence[int]], steps: int) -> Logits:
    """Read all but the last `steps` tokens of each row as prompts, then those one by one: (steps + 1, B, V)."""
    found = [decoder.prefill([row[: len(row) - steps] for row in rows], max_length=max(map(len, rows)))]
    for left in range(steps, 0, -1):
        found.append(decoder.step([row[len(row) - left] for row in rows]))
    return np.stack(found)


@torch.inference_mode()
def _read_whole(model: SportsLLM, tokens: Sequence[int], scales: CacheScales | None) -> Logits:
    cache = None if scales is None else RoundedCache(model.config, len(tokens), scales)
    return cast(Logits, model(torch.tensor([list(tokens)]), cache)[0].numpy())


@torch.no_grad()
def _round_matrices(model: SportsLLM) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.copy_(parameter.half())


def _unequal_tables(graph: ir.Model, model: SportsLLM) -> Iterator[str]:
    tables = {"cos_cache": model.rope_cos, "sin_cache": model.rope_sin}
    embedding = model.model.embed_tokens.state_dict()
    tables |= {f"model.embed_tokens.{name}": tensor for name, tensor in embedding.items()}
    for name, tensor in tables.items():
        value = graph.graph.initializers.get(name)
        stored = None if value is None else value.const_value.numpy()
        if stored is None or not np.array_equal(stored, tensor.numpy().astype(stored.dtype)):
            yield name


def _changed_texts(tokenizer: TextTokenizer) -> tuple[str, ...]:
    return tuple(text for text in TEXTS if tokenizer.decode(tokenizer.encode(text)) != text)


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
