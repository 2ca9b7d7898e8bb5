"""Calibration text: given, known from training, or written by the model itself."""

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
    """Files of calibration text, and the number of samples.

    Held-out text of the checkpoint's manifest and of `valid` is never read. Without files the checkpoint's training
    text is read; if that is not known, text that the checkpoint writes itself. By default the method chooses the
    number of samples.
    """

    files: tuple[Path, ...] = ()
    samples: int | None = None
    valid: tuple[Path, ...] = ()

    def found(self, checkpoint: Path) -> CalibrationText:
        """The same with the checkpoint's training text, if no files are given and all of it exists."""
        if self.files:
            return self
        made_from = tuple(Path(name) for name in manifest_setting(checkpoint, "corpus") or ())
        missing = [path for path in made_from if not path.exists()]
        if missing:
            log(f"{missing[0]}: training text that {checkpoint} names, not found")
            return self
        return replace(self, files=made_from)

    def read(self, checkpoint: Path, model: ModelConfig, most: int, least: int = 0) -> list[Tensor]:
        """Token ids of samples of at most 512 tokens, each (1, T); by default about `most` of that length.

        If the files have fewer than `least` tokens, the model writes more, unless a number of samples is given.

        Raises:
            ArtifactError: there is no text, or less than asked for.
        """
        if not self.files:
            count = self.samples or min(most, max(LEAST_SAMPLES, round(_SAMPLES_TIMES_PARAMETERS / model.parameters)))
            log(f"no calibration text: using {count} texts that the model writes itself")
            return self_generated_text(checkpoint, model, count, min(SAMPLE_TOKENS, model.max_position_embeddings))
        tokenizer, valid = load_tokenizer(checkpoint, model), [*held_out_files(checkpoint), *self.valid]
        found = calibration_samples(self.files, valid, tokenizer, model, self.samples, SAMPLE_TOKENS, most)
        tokens = sum(sample.numel() for sample in found)
        if tokens >= least or self.samples is not None:
            return found
        log(
            f"{tokens:,} tokens of calibration text are too few to round by: {LEAST_SAMPLES} texts that the model "
            "writes itself are read too"
        )
        length = min(SAMPLE_TOKENS, model.max_position_embeddings)
        return [*found, *self_generated_text(checkpoint, model, LEAST_SAMPLES, length)]
