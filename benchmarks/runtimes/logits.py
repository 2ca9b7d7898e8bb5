"""Other runtimes as sources of logits, each in this process with its own settings, for `compare_documents`.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.runtimes.llama_engine import Engine, IkLlamaCpp, LlamaCpp
from sportsllm.inference.decoder import Logits, logits_at_once
from sportsllm.models.config import ModelConfig

Read = Callable[[list[int]], Logits]
"""The logits after every token of a text, (T, V)."""


class RuntimeLogits:
    """A model in another runtime; see `LogitSource`."""

    def __init__(self, runtime: str, path: Path, config: ModelConfig, threads: int) -> None:
        self.config = config
        self._read = READERS[runtime](path, config.max_position_embeddings, threads)

    def stream_logits(self, row: Sequence[int]) -> Iterator[Logits]:
        """See `Decoder.stream_logits`."""
        logits_TV, step = self._read(list(row)), logits_at_once(self.config.vocab_size)
        if logits_TV.shape != (len(row), self.config.vocab_size):
            raise ValueError(f"logits of shape {logits_TV.shape} for {len(row)} of {self.config.vocab_size} tokens")
        yield from (logits_TV[start : start + step] for start in range(0, len(row), step))


def _engine(engine: Callable[[Path, int, int], Engine], path: Path, context: int, threads: int) -> Read:
    model = engine(path, context, threads)
    return lambda tokens: np.concatenate([part_TV.copy() for part_TV in model.read_all(tokens, every=True)])


def _genai(path: Path, context: int, threads: int) -> Read:
    import onnxruntime_genai as og

    model = og.Model(og.Config(str(path)))

    def read(tokens: list[int]) -> Logits:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=len(tokens) + 1)
        generator = og.Generator(model, parameters)
        generator.append_tokens(tokens)
        logits_TV: Logits = generator.get_output("logits")[0]
        return logits_TV

    return read


def _openvino(path: Path, context: int, threads: int) -> Read:
    import openvino

    model = openvino.Core().compile_model(path / "openvino_model.xml", "CPU", {"INFERENCE_NUM_THREADS": threads})
    request = model.create_infer_request()

    def read(tokens: list[int]) -> Logits:
        request.reset_state()
        ids = {"input_ids": [tokens], "attention_mask": [[1] * len(tokens)], "position_ids": [[*range(len(tokens))]]}
        inputs = {name: np.array(rows) for name, rows in ids.items()} | {"beam_idx": np.zeros(1, np.int32)}
        logits_TV: Logits = request.infer(inputs)["logits"][0]
        return logits_TV

    return read


READERS: dict[str, Callable[[Path, int, int], Read]] = {
    "llama.cpp": partial(_engine, LlamaCpp),
    "ik_llama.cpp": partial(_engine, IkLlamaCpp),
    "genai": _genai,
    "openvino": _openvino,
}
"""By the name in `--against`: opens a model, given its context and threads."""
