"""Options that mean the same in every command. Imports typer only."""

from __future__ import annotations

from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


class Mark(Enum):
    """What a path is, beside the typer option in `Annotated`."""

    BY_NAME = "a model, which may be named in the hub or be a GGUF file, see `sportsllm.commands.find_model`"
    TRAINABLE = "with BY_NAME: a checkpoint, not an export"
    READS_TEXT = "files of documents, which must be there"


BY_NAME, TRAINABLE, READS_TEXT = Mark
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def count(text: str, least: int = 1) -> int:
    """A whole number of `least` or more, such as 100000, 100_000, 100k, 2.5M or 1B."""
    given = str(text).strip().lower().replace("_", "")
    unit = _UNITS.get(given[-1:], 1)
    try:
        value = float(given[:-1] if unit > 1 else given) * unit
        if value != int(value) or value < least:
            raise ValueError
    except (ValueError, OverflowError):
        message = f"{text!r} is not a whole number of {least} or more, such as 100000, 100k or 2.5M"
        raise typer.BadParameter(message) from None
    return int(value)


def path(text: str | Path) -> Path:
    """A path. An empty one, as `--text "$TEXT"` gives if the variable is not set, would be the current folder."""
    if not str(text):
        raise typer.BadParameter("the path is empty; give one")
    return Path(text)


_training: Any = partial(typer.Option, rich_help_panel="Training")
_runtime: Any = partial(typer.Option, rich_help_panel="Runtime")

# Paths and models
Out = Annotated[Path, typer.Option("--out", help="New directory to write.")]
Checkpoint = Annotated[
    Path,
    typer.Argument(help="A checkpoint directory, a GGUF file, or ORG/NAME in the model hub.", show_default=False),
    BY_NAME,
    TRAINABLE,
]
_DIRECTORY = "A checkpoint or export directory, a GGUF file, or ORG/NAME in the model hub."
Directory = Annotated[Path, typer.Argument(help=_DIRECTORY, show_default=False), BY_NAME]

# Text
CORPUS_HELP = "Training text: .txt, .md, .jsonl (also .gz) or .parquet files, or folders."
Corpus = Annotated[
    list[Path] | None,
    typer.Option("--corpus", help=CORPUS_HELP, show_default="the training text of the teacher or checkpoint"),
    READS_TEXT,
]
Valid = Annotated[
    list[Path] | None,
    typer.Option("--valid", help="Held-out text.", show_default="the checkpoint's; with --corpus 2% of it, by hash"),
    READS_TEXT,
]
Text = Annotated[
    list[Path] | None, typer.Option("--text", help="Held-out text to score.", show_default="none"), READS_TEXT
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--tasks",
        metavar="NAME|FILE.yaml",
        help="Task of lm-evaluation-harness, or a YAML file that defines one; may be repeated.",
        show_default="none",
    ),
]
Calibration = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        help="Calibration text; never held-out text.",
        show_default="the checkpoint's training text",
        rich_help_panel="Calibration",
    ),
    READS_TEXT,
]

# Training
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens", parser=count, metavar="N", help="Tokens to train on: 100000, 100k, 2.5M.", show_default="by --steps"
    ),
]
Steps = Annotated[
    int | None, _training("--steps", min=0, help="Optimizer steps, instead of --tokens.", show_default="5000")
]
BatchSize = Annotated[
    int | None, _training("--batch-size", min=1, help="Sequences in memory at once.", show_default="up to 4")
]
Sequence = Annotated[
    int | None, _training("--sequence", min=2, help="Tokens of one training sequence.", show_default="up to 512")
]
_RATE = "from initial weights and model size, or from short trial runs; printed"
LearningRate = Annotated[
    float | None, _training("--learning-rate", help="Peak learning rate of AdamW.", show_default=_RATE)
]
_LORA = "Train LoRA adapters of this rank and merge them."
LoraRank = Annotated[int | None, _training("--lora-rank", min=1, help=_LORA, show_default="all weights are trained")]
_SET = "Rare setting (docs/reference/settings.md); may be repeated."
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=_SET, show_default="none")]
Resume = Annotated[bool, _training("--resume", help="Continue an interrupted run, or start if there is none.")]
RopeScaling = Annotated[
    str | None,
    typer.Option(
        "--rope-scaling",
        metavar="TYPE:FACTOR",
        help="Lengthen the context by a factor: yarn, or longrope for a model trained with it; for example yarn:4.",
        show_default="unchanged",
        rich_help_panel="Shape",
    ),
]

# Devices and runtimes
Target = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="NAME|FILE", help="Device budget, for example raspberry-pi-5.", show_default="none"
    ),
]
_LIMIT = "Replace a limit of the target, for example file_mb=60; may be repeated."
Limit = Annotated[
    list[str] | None, typer.Option("--limit", metavar="NAME=VALUE", help=_LIMIT, show_default="the target's")
]
_HERE = "This machine is the target: judge measurements, not predictions."
OnDevice = Annotated[bool, typer.Option("--on-device", help=_HERE)]
Device = Annotated[str, _runtime("--device", help="Processor: cpu, cuda, cuda:1, or auto.")]
_KERNELS = "Kernels for exports: native (this program's), portable (ONNX Runtime's), or auto."
Kernels = Annotated[str, _runtime("--kernels", help=_KERNELS)]
Provider = Annotated[
    str, _runtime("--provider", help="Where it runs: cpu, cuda or cuda:1; exports take any provider of ONNX Runtime.")
]
_DRAFT = "Smaller export with the same tokenizer that proposes tokens; the text stays the same."
Draft = Annotated[Path | None, _runtime("--draft", metavar="EXPORT", help=_DRAFT, show_default="none")]
Threads = Annotated[int | None, _runtime("--threads", min=1, help="CPU threads.", show_default="all cores")]
Seed = Annotated[int, _runtime("--seed", min=0, help="Random seed.")]
