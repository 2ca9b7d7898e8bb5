"""llama.cpp itself as the judge of GGUF files: the prebuilt engine of the package `xllamacpp`."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.runtimes.llama_engine import LlamaCpp, library
from sportsllm.models.language_model import SportsLLM

TOKENS = [5, 60, 7, 130, 9, 33, 200, 41, 88, 12, 77, 340, 3, 150, 270, 19, 64, 35, 222, 111]


def engine() -> Any:
    """llama.cpp's functions, or the test is skipped."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp's engine: pip install xllamacpp")
    return library()


def logits(path: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """What llama.cpp computes for up to 128 tokens, (T, V)."""
    engine()
    model = LlamaCpp(path, 512, 2)  # whose memory holds the logits
    return model.read(tokens, every=True).copy()


def quantized(
    values: npt.NDArray[np.float32], kind: str, importance: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.uint8]:
    """A matrix in llama.cpp's blocks by its own quantizer, (N, bytes of a row)."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    rows, columns = values.shape
    found = np.zeros((rows, columns // block * size), np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    weights_at = None if weights is None else weights.ctypes.data
    arrays = (values.ctypes.data, found.ctypes.data, 0, rows, columns, weights_at)
    assert engine().ggml_quantize_chunk(int(number), *arrays) == found.nbytes
    return found


def assert_same(path: Path, model: SportsLLM, rounding: float) -> None:
    """llama.cpp computes the model's log-probabilities: root mean square of the difference over their spread.

    Its cache is in float16, and it rounds the inputs of quantized matrices to 8 bits. So it may choose another token
    only if that is nearly as likely.
    """
    theirs = torch.from_numpy(logits(path, TOKENS)).log_softmax(dim=-1)
    with torch.inference_mode():
        ours = model(torch.tensor([TOKENS]))[0].log_softmax(dim=-1)
    spread = float(ours.std())
    error = float((theirs - ours).square().mean().sqrt()) / spread
    assert error <= rounding, f"{path}: log-probabilities differ by {error:.4f} of their spread"
    lost = ours.amax(dim=-1) - ours.gather(1, theirs.argmax(dim=-1, keepdim=True))[:, 0]
    assert float(lost.max()) <= 8 * rounding * spread, f"{path}: llama.cpp chooses other tokens"
