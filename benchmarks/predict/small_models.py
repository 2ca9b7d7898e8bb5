"""Write a decoder with random weights as an export directory, without torch or onnx, so that it runs on a device.

The graph is that of `export.graph.decoder` with ONNX Runtime's own operators, or calls of this program's kernels
without bodies; times and memory do not depend on the values of the weights.
Shape suffixes: N rows (outputs), K columns (inputs) of a matrix.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.predict.model_size import ModelFormat
from benchmarks.predict.onnx_writer import MS, OnnxGraph
from export.kernels.library import VERSION
from export.metadata import KEEP_LOGITS, KERNELS_DOMAIN
from export.paths import GRAPH_FILE
from sportsllm.formats.huggingface import to_hf
from sportsllm.models.config import ModelConfig
from sportsllm.models.rope import rope_tables


def write_small_model(directory: Path, config: ModelConfig, stored: ModelFormat, kernels: bool = False) -> None:
    """Write graph, weights and config.json of a model with tied embeddings, without biases.

    Args:
        directory: a new directory.
        config: the shape; heads of a multiple of 16, widths of a multiple of the block size.
        stored: float32, INT8 or INT4 blocks, or INT8 rows, with either cache.
        kernels: call this program's kernels, which take blocks alone.
    """
    directory.mkdir(parents=True)
    graph = _SmallModel(directory / GRAPH_FILE, config, stored)
    if kernels:
        graph.add_calls()
    else:
        graph.add_model()
    graph.write()
    (directory / "config.json").write_text(json.dumps(to_hf(config)), encoding="utf-8")


class _SmallModel(OnnxGraph):
    def __init__(self, path: Path, config: ModelConfig, stored: ModelFormat) -> None:
        super().__init__(path)
        self.config, self.stored, self.random = config, stored, np.random.default_rng(0)

    def add_model(self) -> None:
        config, hidden, layers = self.config, self.config.hidden_size, self.config.num_hidden_layers
        tokens = self.input("input_ids", "int64", ("batch", "new"))
        lengths = self._lengths(self.input("attention_mask", "int64", ("batch", "all")))
        keep = self.input(self.constant(KEEP_LOGITS, np.zeros(1, np.int64)), "int64", (1,))
        bits = self.stored.head_bits if self.stored.quantized else 32
        table = self._weights("lm_head", config.vocab_size, hidden, bits)  # of embedding and head
        x, residual = self._embedding(tokens, table, config.vocab_size, hidden, bits), ""
        for layer in range(layers):
            x, residual = self._norm(f"{layer}.norm", x, residual)
            x = self._attention(layer, x, lengths)
            if layer == layers - 1:  # nothing reads what the last layer does with positions that are not kept
                end = self.constant("end", np.array([np.iinfo(np.int64).max], np.int64))
                start = self.node("Neg", [keep], "start")
                x, residual = (
                    self.node("Slice", [value, start, end, "axis_1"], f"{value}.kept") for value in (x, residual)
                )
            x = self._product(f"{layer}.o", x, hidden, config.query_size)
            x, residual = self._norm(f"{layer}.norm2", x, residual)
            x = self._feed_forward(layer, x)
        x, _ = self._norm("norm", x, residual)
        logits = self._multiply("logits", x, table, config.vocab_size, hidden, bits)
        self.output(logits, "float32", ("batch", "new", config.vocab_size))

    def add_calls(self) -> None:
        """The same model, a call for each layer and one for the head."""
        config, hidden, inner, stored = self.config, self.config.hidden_size, self.config.intermediate_size, self.stored
        tokens = self.input("input_ids", "int64", ("batch", "new"))
        last, total, cos, sin = self._lengths(self.input("attention_mask", "int64", ("batch", "all")))
        keep = self.input(self.constant(KEEP_LOGITS, np.zeros(1, np.int64)), "int64", (1,))
        table = self._weights("lm_head", config.vocab_size, hidden, stored.head_bits)
        x, residual = self._embedding(tokens, table, config.vocab_size, hidden, stored.head_bits), ""
        shapes = {
            "qkv": (config.query_size + 2 * config.key_value_size, hidden),
            "output": (hidden, config.query_size),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        sizes = {"num_heads": config.num_attention_heads, "kv_num_heads": config.num_key_value_heads}
        sizes |= {"head_size": config.head_dim, "hidden_size": hidden, "intermediate_size": inner}
        bits = 8 if stored.precision == "int8" else 4
        for name in shapes:
            sizes |= {f"{name}_bits": bits, f"{name}_block_size": stored.block_size}
        ones = self.weight("gamma", np.ones(hidden, np.float32))
        op = "DecoderLayerInt8" if stored.cache == "int8" else "DecoderLayer"
        for layer in range(config.num_hidden_layers):
            matrices = {
                name: [*self._weights(f"{layer}.{'o' if name == 'output' else name}", *shape, bits), "", ""]
                for name, shape in shapes.items()
            }
            past, present, scales = self._cache(layer)
            inputs = [x, residual, last, total, keep if layer == config.num_hidden_layers - 1 else "", *past, cos, sin]
            inputs += [*(scales or ["", ""]), ones, "", "", *matrices["qkv"], *matrices["output"], ones]
            inputs += [*matrices["gate_up"], *matrices["down"][:2]]
            outputs = [f"{layer}.out", f"{layer}.residual", *present]
            self.node(op, inputs, outputs, KERNELS_DOMAIN, **sizes, epsilon=config.rms_norm_eps)
            x, residual = outputs[:2]
        head = {"hidden_size": hidden, "head_bits": stored.head_bits, "head_block_size": stored.block_size}
        logits = self.node(
            "DecoderHead", [x, residual, ones, *table], "logits", KERNELS_DOMAIN, **head, epsilon=config.rms_norm_eps
        )
        self.output(logits, "float32", ("batch", "new", config.vocab_size))
        self.calls_kernels(VERSION)

    def _lengths(self, mask: str) -> list[str]:
        """What GroupQueryAttention needs beside keys and values: lengths and rotary tables."""
        for name, value in (("one", 1), ("scalar", []), ("axis_1", [1]), ("axis_-1", [-1])):
            self.constant(name, np.array(value, np.int64))
        tokens = self.node("ReduceSum", [mask, "axis_1"], "lengths", keepdims=0)
        total = self.node("Reshape", [self.node("Shape", [mask], "width", start=1, end=2), "scalar"], "width_scalar")
        last = self.node("Cast", [self.node("Sub", [tokens, "one"], "last")], "seqlens_k", to=6)
        cos, sin = rope_tables(self.config, self.config.max_position_embeddings)
        return [last, self.node("Cast", [total], "total", to=6), self.weight("cos", cos), self.weight("sin", sin)]

    def _embedding(self, tokens: str, table: list[str], rows: int, columns: int, bits: int) -> str:
        if bits == 32:
            return self.node("Gather", [*table, tokens], "embedded")
        flat = self.view("embedding", table[0], (rows, columns * bits // 8))
        sizes = {"bits": bits, "block_size": self.stored.block_size, "gather_axis": 0, "quantize_axis": 1}
        return self.node("GatherBlockQuantized", [flat, tokens, table[1]], "embedded", MS, **sizes)

    def _norm(self, name: str, x: str, residual: str) -> tuple[str, str]:
        """RMSNorm of x + residual, and the sum; the first one in standard operators, which the runtime fuses."""
        gamma, epsilon = (
            self.weight(f"{name}.gamma", np.ones(self.config.hidden_size, np.float32)),
            self.config.rms_norm_eps,
        )
        if residual:
            outputs = [name, "", "", f"{name}.sum"]
            self.node("SkipSimplifiedLayerNormalization", [x, residual, gamma], outputs, MS, epsilon=epsilon)
            return name, f"{name}.sum"
        squared = self.node("Pow", [x, self.constant("two", np.array(2, np.float32))], f"{name}.squared")
        mean = self.node("ReduceMean", [squared, "axis_-1"], f"{name}.mean", keepdims=1)
        shifted = self.node("Add", [mean, self.constant("epsilon", np.array(epsilon, np.float32))], f"{name}.shifted")
        scaled = self.node("Div", [x, self.node("Sqrt", [shifted], f"{name}.root")], f"{name}.scaled")
        return self.node("Mul", [scaled, gamma], name), x

    def _attention(self, layer: int, x: str, lengths: list[str]) -> str:
        config, heads = self.config, self.config.num_key_value_heads
        query = self._product(f"{layer}.qkv", x, config.query_size + 2 * config.key_value_size, config.hidden_size)
        past, present, scales = self._cache(layer)
        inputs = [query, "", "", *past, *lengths]
        attributes: dict[str, float | str] = {"num_heads": config.num_attention_heads, "kv_num_heads": heads}
        if scales:
            inputs += ["", "", "", *scales]
            attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        outputs = [f"{layer}.attended", *present]
        return self.node("GroupQueryAttention", inputs, outputs, MS, do_rotary=1, **attributes)

    def _cache(self, layer: int) -> tuple[list[str], list[str], list[str]]:
        """A layer's keys and values, past and present, and the scales of an INT8 cache."""
        heads, size, int8 = self.config.num_key_value_heads, self.config.head_dim, self.stored.cache == "int8"
        dtype, states = "int8" if int8 else "float32", ("key", "value")
        past = [
            self.input(f"past_key_values.{layer}.{state}", dtype, ("batch", heads, "past", size)) for state in states
        ]
        present = [self.output(f"present.{layer}.{state}", dtype, ("batch", heads, "all", size)) for state in states]
        scale = np.full((1, heads, 1, size), 0.02, np.float32)
        return past, present, [self.weight(f"{layer}.{part}_scale", scale) for part in "kv"] if int8 else []

    def _feed_forward(self, layer: int, x: str) -> str:
        inner, hidden = self.config.intermediate_size, self.config.hidden_size
        both = self._product(f"{layer}.gate_up", x, 2 * inner, hidden)
        sizes = self.constant(f"{layer}.sizes", np.array([inner, inner], np.int64))
        self.node("Split", [both, sizes], [f"{layer}.gate", f"{layer}.up"], axis=-1)
        silu = self.node("QuickGelu", [f"{layer}.gate"], f"{layer}.silu", MS, alpha=1.0)
        return self._product(f"{layer}.down", self.node("Mul", [silu, f"{layer}.up"], f"{layer}.inner"), hidden, inner)

    def _product(self, name: str, x: str, rows: int, columns: int) -> str:
        if self.stored.per_row:
            matrix_KN = self.weight(f"{name}.rows", self.random.integers(-63, 64, (columns, rows), np.int8))
            scale = self.weight(f"{name}.scale", np.full(rows, columns**-0.5 / 37, np.float32))
            return self.node("DynamicQuantizeMatMul", [x, matrix_KN, scale], f"{name}.product", MS)
        bits = {"int8": 8, "int4": 4}.get(self.stored.precision, 32)
        return self._multiply(f"{name}.product", x, self._weights(name, rows, columns, bits), rows, columns, bits)

    def _multiply(self, y: str, x: str, weights: list[str], rows: int, columns: int, bits: int) -> str:
        """y = x W^T."""
        if bits == 32:
            return self.node("FusedMatMul", [x, *weights], y, MS, transB=1)
        sizes = {"N": rows, "K": columns, "block_size": self.stored.block_size, "bits": bits, "accuracy_level": 4}
        return self.node("MatMulNBits", [x, *weights], y, MS, **sizes)

    def _weights(self, name: str, rows: int, columns: int, bits: int) -> list[str]:
        """A random matrix, of blocks with their scales; products keep the spread of their inputs."""
        spread, groups = np.float32(3.5 * columns**-0.5), columns // self.stored.block_size
        if bits == 32:
            matrix_NK = spread * (self.random.random((rows, columns), np.float32) - np.float32(0.5))
            return [self.weight(f"{name}.weight", matrix_NK)]
        packed = self.random.integers(0, 256, (rows, groups, self.stored.block_size * bits // 8), np.uint8)
        scale = np.full((rows, groups), spread / 2**bits, np.float32)
        return [self.weight(f"{name}.weight", packed), self.weight(f"{name}.scale", scale)]
