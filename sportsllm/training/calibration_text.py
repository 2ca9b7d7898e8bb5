"""The text that statistics are taken from: given, known from training, or written by the model itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from sportsllm.console import log
from sportsllm.inference.batch_sampling import self_generated_text
from sportsllm.models.config import ModelConfig
from sportsllm.text.calibration import calibration_samples
from sportsllm.text.provenance import held_out_files, manifest_setting
from sportsllm.text.tokenizer import load_tokenizer

SAMPLE_TOKENS, LEAST_SAMPLES = 512, 16
_SAMPLES_TIMES_PARAMETERS = 4e9  # about a minute of sampling on two cores


@dataclass(frozen=True)
class CalibrationText:
    """Files that statistics are taken from, and how many pieces of them are read.

    What the checkpoint's manifest or `valid` names as held-out text is never read. Without files those that the
    checkpoint was made from are read; where those are not known, texts that the checkpoint writes itself. Without a
    number as many pieces are read as the method asks for.
    """

    files: tuple[Path, ...] = ()
    samples: int | None = None
    valid: tuple[Path, ...] = ()

    def found(self, checkpoint: Path) -> CalibrationText:
        """The same with the files that the checkpoint was made from, if none are given and all of those are there."""
        if self.files:
            return self
        made_from = tuple(Path(name) for name in manifest_setting(checkpoint, "corpus") or ())
        missing = [path for path in made_from if not path.exists()]
        if missing:
            log(f"{missing[0]}: training text that {checkpoint} names, not found")
            return self
        return replace(self, files=made_from)

    def read(self, checkpoint: Path, model: ModelConfig, most: int, least: int = 0) -> list[Tensor]:
        """Token ids of pieces of at most 512 tokens, each (1, T); about `most` of that length without a number.

        Files of fewer than `least` tokens are joined by texts that the model writes, unless a number was asked for.

        Raises:
            ArtifactError: there is no text, or less than asked for.
        """
        if not self.files:
            count = self.samples or min(most, max(LEAST_SAMPLES, round(_SAMPLES_TIMES_PARAMETERS / model.parameters)))
            log(f"no calibration text is at hand: it is {count} texts that the model writes itself")
            return self_generated_text(checkpoint, model, count, min(SAMPLE_TOKENS, model.max_position_embeddings))
        words, valid = load_tokenizer(checkpoint, model), [*held_out_files(checkpoint), *self.valid]
        found = calibration_samples(self.files, valid, words, model, self.samples, SAMPLE_TOKENS, most)
        tokens = sum(piece.numel() for piece in found)
        if tokens >= least or self.samples is not None:
            return found
        log(
            f"{tokens:,} tokens of calibration text are too few to round by: {LEAST_SAMPLES} texts that the model "
            "writes itself are read too"
        )
        length = min(SAMPLE_TOKENS, model.max_position_embeddings)
        return [*found, *self_generated_text(checkpoint, model, LEAST_SAMPLES, length)]
