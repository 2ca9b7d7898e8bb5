"""`export --gguf`: a checkpoint as a GGUF file, published only if it reads back as the same model."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from export.gguf.write import architecture_of, write_gguf
from export.parity.comparison import Comparison, ParityReport, Pass, compare, merge
from export.parity.inputs import threads_of_torch
from export.parity.limits import DEPLOYED
from export.parity.readings import TEXTS, make_sequences
from sportsllm.errors import GateError, UsageError
from sportsllm.files import require_directory
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.changed_config import checkpoint_with
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.gguf.config import read_config
from sportsllm.formats.gguf.file import open_gguf
from sportsllm.formats.gguf.tokenizer import write_tokenizer
from sportsllm.formats.gguf.weights import read_weights
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.json_files import write_json
from sportsllm.formats.safetensors_files import quantization_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.rope import with_rope_scaling
from sportsllm.text.tokenizer import load_tokenizer

GGUF_FILE, MODELFILE = "model.gguf", "Modelfile"


def export_gguf(
    checkpoint: Path, out: Path, dtype: str | None = None, threads: int | None = None, rope_scaling: str | None = None
) -> dict[str, Any]:
    """Write model.gguf, and a Modelfile for Ollama.

    Args:
        checkpoint: packed in blocks, number for number but for scales in float16; or dense.
        out: the directory to make.
        dtype: of a dense checkpoint's matrices: float16 for `fp16` and `fp16-weights`, else float32.
        threads: CPU threads of the check.
        rope_scaling: lengthens the context, see `sportsllm.models.rope.with_rope_scaling`.

    Returns:
        `architecture`, `parameters`, `formats` (bytes of tensors by format), `seconds`, and the figures of parity.json.

    Raises:
        UsageError: an architecture or blocks that GGUF has not, or `dtype` for a packed checkpoint.
        ArtifactError: the checkpoint is damaged, or has a tokenizer that GGUF cannot say.
        GateError: the file reads back as another model, or splits text in another way; nothing is left behind.
        ConflictError: `out` holds something else.
    """
    require_directory(checkpoint, "a checkpoint directory")
    if dtype is not None and quantization_config(checkpoint) is not None:
        raise UsageError(f"--dtype {dtype}: {checkpoint} is packed already and is written as it is; leave --dtype out")
    half = dtype in ("fp16", "fp16-weights")
    config = load_config(checkpoint)
    if rope_scaling is not None:
        config = with_rope_scaling(config, rope_scaling)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        with checkpoint_with(checkpoint, config) as source:
            formats = write_gguf(source, directory / GGUF_FILE, half)
            report = _read_back(source, config, directory / GGUF_FILE, threads)
        if failures := report.failures():
            raise GateError(
                f"{checkpoint}: the GGUF file is not the model ({'; '.join(failures[:3])}); please report it"
            )
        parity = report.to_dict()
        write_json(directory / "parity.json", parity)
        (directory / MODELFILE).write_text(
            f"FROM ./{GGUF_FILE}\nPARAMETER num_ctx {config.max_position_embeddings}\n", encoding="utf-8"
        )
        return {
            "architecture": architecture_of(config),
            "parameters": config.parameters,
            "formats": formats,
            "seconds": round(time.perf_counter() - started, 3),
            "parity": {key: parity[key] for key in ("max_abs_logit_error", "kl", "greedy_match", "passed")},
        }

    settings: dict[str, Any] = {"gguf": True, "dtype": "fp16" if half else None}
    if rope_scaling is not None:
        settings["rope_scaling"] = rope_scaling
    return run_stage(out, Stage("export", settings, [checkpoint]), make)


def _read_back(checkpoint: Path, config: ModelConfig, path: Path, threads: int | None) -> ParityReport:
    """The file, through the package `gguf`, beside the checkpoint: logits, and how texts are split."""
    file = open_gguf(path)
    found = SportsLLM(read_config(file))
    found.load_state_dict(read_weights(file, config))
    words = load_tokenizer(checkpoint, config)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(file, Path(folder))
        again = load_tokenizer(Path(folder), found.config)
    for text in TEXTS:
        if again.encode(text) != words.encode(text):
            raise GateError(f"{checkpoint}: in a GGUF file its tokenizer would split {text!r} in another way")
    model = load_checkpoint(checkpoint)
    with threads_of_torch(threads):
        compared = [_compare(model, found, sequence) for sequence in make_sequences(config, words)]
    limits = DEPLOYED["fp16"]
    return ParityReport("gguf", (Pass("read back", limits, (merge("prefill", compared),)),), (), None)


@torch.inference_mode()
def _compare(model: SportsLLM, found: SportsLLM, sequence: list[int]) -> Comparison:
    tokens = torch.tensor([sequence])
    return compare(model(tokens)[0].numpy(), found(tokens)[0].numpy())
