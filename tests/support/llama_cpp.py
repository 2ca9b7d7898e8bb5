"""llama.cpp itself as the judge of GGUF files: the prebuilt engine of the package `xllamacpp`, by its C interface.

Its header is `include/llama.h` of https://github.com/ggml-org/llama.cpp. Structures of settings grow from release to
release and are passed by value, so they are kept as bytes of more than their size, as the engine fills them.
"""

import ctypes as c
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from sportsllm.models.language_model import SportsLLM

TOKENS = [5, 60, 7, 130, 9, 33, 200, 41, 88, 12, 77, 340, 3, 150, 270, 19, 64, 35, 222, 111]
_INT32, _POINTER = c.c_int32, c.c_void_p


class _Settings(c.Structure):
    _fields_ = [("bytes", c.c_uint64 * 64)]


class _Batch(c.Structure):
    _fields_ = [
        ("count", _INT32),
        ("token", c.POINTER(_INT32)),
        ("embedding", _POINTER),
        ("position", c.POINTER(_INT32)),
        ("sequences", c.POINTER(_INT32)),
        ("sequence", c.POINTER(c.POINTER(_INT32))),
        ("wanted", c.POINTER(c.c_int8)),
    ]


_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, _POINTER)
_quiet = _LOG(lambda _level, _text, _data: None)


@cache
def engine() -> Any:
    """llama.cpp's functions, or the test is skipped."""
    package = pytest.importorskip("xllamacpp", reason="needs llama.cpp's engine: pip install xllamacpp")
    library = c.CDLL(package.xllamacpp.__file__)
    for name, result, arguments in (
        ("llama_log_set", None, [_LOG, _POINTER]),
        ("llama_model_default_params", _Settings, []),
        ("llama_context_default_params", _Settings, []),
        ("llama_model_load_from_file", _POINTER, [c.c_char_p, _Settings]),
        ("llama_init_from_model", _POINTER, [_POINTER, _Settings]),
        ("llama_batch_init", _Batch, [_INT32] * 3),
        ("llama_decode", _INT32, [_POINTER, _Batch]),
        ("llama_get_logits", c.POINTER(c.c_float), [_POINTER]),
        ("llama_batch_free", None, [_Batch]),
        ("llama_free", None, [_POINTER]),
        ("llama_model_free", None, [_POINTER]),
        ("ggml_quantize_chunk", c.c_size_t, [c.c_int, _POINTER, _POINTER, *[c.c_int64] * 3, _POINTER]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_quiet, None)
    library.llama_backend_init()
    return library


def logits(path: Path, tokens: list[int], vocabulary: int) -> npt.NDArray[np.float32]:
    """What llama.cpp computes for up to 512 tokens, (T, vocabulary)."""
    library = engine()
    model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
    assert model, f"{path}: llama.cpp does not load it"
    context = library.llama_init_from_model(model, library.llama_context_default_params())
    batch = library.llama_batch_init(len(tokens), 0, 1)
    batch.count = len(tokens)
    for place, token in enumerate(tokens):
        batch.token[place], batch.position[place], batch.sequences[place] = token, place, 1
        batch.sequence[place][0], batch.wanted[place] = 0, 1
    assert library.llama_decode(context, batch) == 0
    found = np.ctypeslib.as_array(library.llama_get_logits(context), (len(tokens), vocabulary)).copy()
    library.llama_batch_free(batch)
    library.llama_free(context)
    library.llama_model_free(model)
    return found


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
    theirs = torch.from_numpy(logits(path, TOKENS, model.config.vocab_size)).log_softmax(dim=-1)
    with torch.inference_mode():
        ours = model(torch.tensor([TOKENS]))[0].log_softmax(dim=-1)
    spread = float(ours.std())
    error = float((theirs - ours).square().mean().sqrt()) / spread
    assert error <= rounding, f"{path}: log-probabilities differ by {error:.4f} of their spread"
    lost = ours.amax(dim=-1) - ours.gather(1, theirs.argmax(dim=-1, keepdim=True))[:, 0]
    assert float(lost.max()) <= 8 * rounding * spread, f"{path}: llama.cpp chooses other tokens"
