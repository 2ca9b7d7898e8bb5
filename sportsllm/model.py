"""A model opened for use from Python: `sportsllm.load("runs/small-onnx")`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sportsllm.inference.decoder import Decoder, Logits
    from sportsllm.inference.scoring import TextScore
    from sportsllm.models.config import ModelConfig
    from sportsllm.text.tokenizer import TextTokenizer


class LoadedModel:
    """A checkpoint (PyTorch) or an export (ONNX Runtime) with its tokenizer.

    One sequence at a time: a call of `generate` forgets what the one before had read.

    Attributes:
        config: dimensions and special tokens.
        tokenizer: text to token ids and back.
        decoder: `prefill`, `step` and `score` on token ids; see `sportsllm.inference.decoder.Decoder`.
    """

    def __init__(self, decoder: Decoder, tokenizer: TextTokenizer) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer

    def __repr__(self) -> str:
        from sportsllm.models.kinds import described_shape

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
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """Stream the text that continues a prompt, piece by piece, up to a `stop` text. Temperature 0 is greedy.

        Raises:
            UsageError: a setting out of its range, or a prompt that fills the context.
        """
        from sportsllm.inference.decoder import Sampling, generate, until

        sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
        begin = [self.tokenizer.begin_id, *self.tokenizer.encode(prompt)]
        tokens = generate(self.decoder, begin, max_new_tokens, sampling, self.config.stop_token_ids)
        return until(self.tokenizer.decode_stream(begin, tokens), [stop] if isinstance(stop, str) else stop)

    def score(self, text: str | Sequence[str]) -> TextScore:
        """Perplexity and bits per byte of a document, or of several.

        Raises:
            ArtifactError: the text is empty.
        """
        from sportsllm.inference.scoring import score_documents

        return score_documents(self.decoder, self.tokenizer, [text] if isinstance(text, str) else list(text))

    def logits(self, ids: Sequence[int]) -> Logits:
        """Logits after the last of some token ids, float32 (V,). The first id should be the begin token."""
        rows: Logits = self.decoder.prefill([list(ids)])
        return rows.reshape(-1)


def load(
    directory: str | Path, *, threads: int | None = None, kernels: str = "auto", provider: str = "cpu"
) -> LoadedModel:
    """Open a checkpoint or an export; an export needs no torch.

    Args:
        directory: a directory, a GGUF file, or a name in the model hub.
        threads: CPU threads; by default the library chooses.
        kernels: for an export: native (this program's), portable (ONNX Runtime's), or auto.
        provider: for an export: an execution provider of ONNX Runtime.

    Raises:
        ArtifactError: no such directory, or its files are damaged.
        UsageError: kernels or a provider that the model cannot have.
    """
    from sportsllm.commands import find_model
    from sportsllm.inference.decoder import open_decoder
    from sportsllm.text.tokenizer import load_tokenizer

    path = find_model(directory)
    decoder = open_decoder(path, threads, kernels, provider)
    return LoadedModel(decoder, load_tokenizer(path, decoder.config))
