"""A model opened for use from Python: `sportsllm.load("runs/small-onnx")`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import index
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from sportsllm.inference.decoder import Decoder, Logits
    from sportsllm.inference.sampling import Sampling
    from sportsllm.inference.scoring import TextScore
    from sportsllm.models.config import ModelConfig
    from sportsllm.text.tokenizer import TextTokenizer


class LoadedModel:
    """A checkpoint (PyTorch) or an export (ONNX Runtime) with its tokenizer.

    It holds one text at a time: `generate`, `chat` and `logits` end a stream that is not read to its end. Threads may
    share it, for one text at a time too. A copy by pickle opens the directory again.

    Attributes:
        config: dimensions and special tokens.
        tokenizer: text to token ids and back.
        decoder: `prefill`, `step` and `score` on token ids; see `sportsllm.inference.decoder.Decoder`.
    """

    def __init__(self, decoder: Decoder, tokenizer: TextTokenizer, again: Callable[[], LoadedModel]) -> None:
        """`again` opens the same model."""
        self.decoder = decoder
        self.tokenizer = tokenizer
        self._again = again
        self._lock, self._text = Lock(), object()  # the text that the cache holds

    def __reduce__(self) -> tuple[object, ...]:
        return self._again, ()

    def __repr__(self) -> str:
        from sportsllm.models.description import described_shape

        return f"<LoadedModel: {described_shape(self.config)}>"

    @property
    def config(self) -> ModelConfig:
        """Dimensions and special tokens."""
        return self.decoder.config

    def generate(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 100,
        temperature: float = 0.7,
        top_k: int = 50,
        top_p: float = 0.9,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """Stream the text that continues a prompt, piece by piece, up to a `stop` text. Temperature 0 is greedy.

        A line on standard error says if it ends because the context is full.

        Raises:
            UsageError: a setting out of its range, a prompt that fills the context, or, while the text is read, another
                text that was begun.
        """
        from sportsllm.inference.sampling import Sampling

        if not isinstance(prompt, str):
            raise UsageError(f"the prompt is of type {type(prompt).__name__}; give a string, and call once per prompt")
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
        begin = [self.tokenizer.begin_id, *self.tokenizer.encode(prompt)]
        return self._stream(begin, max_new_tokens, sampling, stop, self.config.stop_token_ids)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int = 100,
        temperature: float = 0.7,
        top_k: int = 50,
        top_p: float = 0.9,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """Stream the reply to a message, or to a conversation, by the model's chat template.

        Args:
            messages: a text, or records with `role` (system, user or assistant) and `content`, the newest last.
            max_new_tokens, temperature, top_k, top_p, repetition_penalty, stop, seed: as for `generate`.

        Raises:
            UsageError: as for `generate`, or messages of another form.
            ArtifactError: the model has no chat template, or it refuses the messages.
        """
        from sportsllm.inference.sampling import Sampling

        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        strings = (isinstance(each.get(key), str) for each in said for key in ("role", "content"))
        if not said or not all(isinstance(each, Mapping) for each in said) or not all(strings):
            raise UsageError("messages: give a string, or dictionaries whose role and content are strings")
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
        with self._lock:
            begin = self.tokenizer.encode(self.tokenizer.render_chat(said), special=True)
        ends = [*self.config.stop_token_ids, *self.tokenizer.turn_ends]
        return self._stream(begin, max_new_tokens, sampling, stop, ends)

    def _stream(
        self, begin: list[int], most: int, sampling: Sampling, stop: str | Sequence[str] | None, ends: Sequence[int]
    ) -> Iterator[str]:
        from sportsllm.console import log
        from sportsllm.inference.sampling import full_context, generate, until

        stops = [stop] if isinstance(stop, str) else stop or ()
        if "" in stops:
            raise UsageError("stop is empty; give the text that ends generation")
        if most < 1:
            raise UsageError(f"max_new_tokens is {most}; it must be at least 1")

        def tokens() -> Iterator[int]:
            stop_tokens = [*ends, *self.tokenizer.special_ids(stops)]
            text, count, made = object(), 0, generate(self.decoder, begin, most, sampling, stop_tokens)
            with self._lock:
                self._text = text
            while True:
                with self._lock:
                    if self._text is not text:
                        raise UsageError(
                            "this model is generating another text; read that to its end, or load the model twice"
                        )
                    token = next(made, None)
                if token is None:
                    if full := full_context(self.config.max_position_embeddings, len(begin), count, most):
                        log(full)
                    return
                count += 1
                yield token

        return until(self.tokenizer.decode_stream(begin, tokens()), stops)

    def score(self, text: str | Sequence[str]) -> TextScore:
        """Perplexity and bits per byte of a document, or of several.

        Raises:
            UsageError: something else than texts.
            ArtifactError: the text is empty.
        """
        from sportsllm.inference.scoring import score_documents

        documents = list(text) if isinstance(text, Iterable) and not isinstance(text, str) else [text]
        if not all(isinstance(each, str) for each in documents):
            raise UsageError("give a text to score, or several")
        return score_documents(self.decoder, self.tokenizer, documents)

    def logits(self, ids: Sequence[int]) -> Logits:
        """Logits after the last of some token ids, float32 (V,). The first id should be the begin token.

        Raises:
            UsageError: no id, more than the context holds, or one outside the vocabulary.
        """
        try:
            row, size = [index(each) for each in ids], self.config.vocab_size
        except TypeError:
            raise UsageError("give token ids, which are whole numbers, as `tokenizer.encode` makes them") from None
        if outside := [each for each in row if not 0 <= each < size]:
            raise UsageError(f"token id {outside[0]} lies outside the vocabulary of {size}")
        with self._lock:
            self._text = object()
            rows: Logits = self.decoder.prefill([row])
        return rows.reshape(-1)


def load(
    directory: str | Path, *, threads: int | None = None, kernels: str = "auto", provider: str = "cpu"
) -> LoadedModel:
    """Open a checkpoint or an export; an export needs no torch.

    Args:
        directory: a directory, a GGUF file, or a name in the model hub.
        threads: CPU threads; by default the library chooses.
        kernels: for an export: native (this program's), portable (ONNX Runtime's), or auto.
        provider: for an export: an execution provider of ONNX Runtime; for a checkpoint: cpu, cuda, cuda:1 or auto.

    Raises:
        ArtifactError: no such directory, or its files are damaged.
        UsageError, ResourceError: kernels or a provider that the model cannot have, or a hub that cannot be reached.
    """
    from sportsllm.commands import find_model
    from sportsllm.inference.decoder import open_decoder
    from sportsllm.text.tokenizer import load_tokenizer

    path = find_model(directory)
    decoder = open_decoder(path, threads, kernels, provider)
    again = partial(load, path, threads=threads, kernels=kernels, provider=provider)
    return LoadedModel(decoder, load_tokenizer(path, decoder.config), again)
