"""llama.cpp by the C interface of the package `xllamacpp`, whose one library holds all of it, and ik_llama.cpp.

The header of llama.cpp is `include/llama.h` of https://github.com/ggml-org/llama.cpp. Structures of settings grow from
release to release and are passed by value, so they are kept as bytes of more than their size, as the engine fills them;
those of a context begin with its length in tokens. Imports only numpy beside the standard library, as `worker.py` does.
"""

from __future__ import annotations

import ctypes as c
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_INT32, _POINTER = c.c_int32, c.c_void_p


class _Settings(c.Structure):
    _fields_ = [("bytes", c.c_uint32 * 128)]


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
def library() -> Any:
    """llama.cpp's functions.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    import xllamacpp

    found = c.CDLL(xllamacpp.xllamacpp.__file__)
    for name, result, arguments in (
        ("llama_log_set", None, [_LOG, _POINTER]),
        ("llama_model_default_params", _Settings, []),
        ("llama_context_default_params", _Settings, []),
        ("llama_model_load_from_file", _POINTER, [c.c_char_p, _Settings]),
        ("llama_init_from_model", _POINTER, [_POINTER, _Settings]),
        ("llama_set_n_threads", None, [_POINTER, _INT32, _INT32]),
        ("llama_model_get_vocab", _POINTER, [_POINTER]),
        ("llama_vocab_n_tokens", _INT32, [_POINTER]),
        ("llama_model_n_embd", _INT32, [_POINTER]),
        ("llama_model_n_layer", _INT32, [_POINTER]),
        ("llama_batch_init", _Batch, [_INT32] * 3),
        ("llama_decode", _INT32, [_POINTER, _Batch]),
        ("llama_get_logits", c.POINTER(c.c_float), [_POINTER]),
        ("llama_get_memory", _POINTER, [_POINTER]),
        ("llama_memory_clear", None, [_POINTER, c.c_bool]),
        ("llama_batch_free", None, [_Batch]),
        ("llama_free", None, [_POINTER]),
        ("llama_model_free", None, [_POINTER]),
        ("ggml_quantize_chunk", c.c_size_t, [c.c_int, _POINTER, _POINTER, *[c.c_int64] * 3, _POINTER]),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.llama_log_set(_quiet, None)
    found.llama_backend_init()
    return found


class Engine(ABC):
    """A GGUF file in an engine that reads at most `at_once` tokens at a time.

    Attributes:
        shape: `vocab_size`, `hidden_size` and, if the engine tells it, `num_hidden_layers`.
    """

    at_once: int
    shape: dict[str, int]

    @abstractmethod
    def read(self, tokens: Sequence[int], start: int = 0, every: bool = False) -> npt.NDArray[np.float32]:
        """Logits of the last token or of every one, (T, V), overwritten by the next call.

        `start` is the position of the first token, 0 for a new text.
        """

    def read_all(self, tokens: Sequence[int], every: bool = False) -> Iterator[npt.NDArray[np.float32]]:
        """`read` of a whole text, `at_once` tokens at a time."""
        for start in range(0, len(tokens), self.at_once):
            yield self.read(tokens[start : start + self.at_once], start, every)


class LlamaCpp(Engine):
    """llama.cpp."""

    at_once = 128  # as many as our own decoders give the logits of

    def __init__(self, path: Path, context: int, threads: int) -> None:
        self._library, self._model, self._context = library(), None, None
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        settings = self._library.llama_context_default_params()
        settings.bytes[0] = context
        self._context = self._model and self._library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ValueError(f"{path}: llama.cpp does not load it, for a context of {context:,} tokens")
        self._library.llama_set_n_threads(self._context, threads, threads)
        self._batch = self._library.llama_batch_init(self.at_once, 0, 1)
        self.shape = {
            "vocab_size": self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model)),
            "hidden_size": self._library.llama_model_n_embd(self._model),
            "num_hidden_layers": self._library.llama_model_n_layer(self._model),
        }

    def read(self, tokens: Sequence[int], start: int = 0, every: bool = False) -> npt.NDArray[np.float32]:
        """See `Engine.read`."""
        if start == 0:
            self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        batch, count = self._batch, len(tokens)
        batch.count = count
        for place, token in enumerate(tokens):
            batch.token[place], batch.position[place], batch.sequences[place] = token, start + place, 1
            batch.sequence[place][0], batch.wanted[place] = 0, every or place == count - 1
        if failed := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        shape = (count if every else 1, self.shape["vocab_size"])
        return np.ctypeslib.as_array(self._library.llama_get_logits(self._context), shape)

    def __del__(self) -> None:
        if self._context:
            self._library.llama_batch_free(self._batch)
            self._library.llama_free(self._context)
        if self._model:
            self._library.llama_model_free(self._model)


class IkLlamaCpp(Engine):
    """ik_llama.cpp by inner classes of ik-llama-cpp-python, whose own loop samples value by value in Python."""

    def __init__(self, path: Path, context: int, threads: int, **options: Any) -> None:
        from ik_llama_cpp import IkLlama
        from ik_llama_cpp import _ctypes_api as library
        from ik_llama_cpp._internals import make_batch_range

        self._library, self._batch_of = library, make_batch_range
        self._llama = IkLlama(str(path), n_ctx=context, n_threads=threads, verbose=False, **options)
        model, self.at_once = self._llama._model, self._llama._context._n_ubatch
        self.shape = {"vocab_size": model.n_vocab, "hidden_size": library.llama_model_n_embd(model.model)}

    def read(self, tokens: Sequence[int], start: int = 0, every: bool = False) -> npt.NDArray[np.float32]:
        """See `Engine.read`."""
        context = self._llama._context
        if start == 0:
            context.kv_cache_clear()
        batch = self._batch_of(tokens, pos_start=start)
        for place in range(len(tokens)) if every else ():
            batch.logits[place] = 1
        failed = context.decode(batch)
        self._library.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        first = context.get_logits(0) if every else context.get_logits()  # rows follow each other
        return np.ctypeslib.as_array(first, (len(tokens) if every else 1, self.shape["vocab_size"]))
