"""The table of commands, and flags that mean the same in every command. Imports typer only."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from sportsllm.cli.flag_groups import FlagGroup
from sportsllm.errors import ResourceError

if TYPE_CHECKING:
    from sportsllm.training.loop import TrainConfig
    from sportsllm.training.lora import Adapters

# command -> module that holds it, as a function of the command's name
COMMANDS = {
    "simulate": "sportsllm.cli.commands",
    "train": "sportsllm.cli.commands",
    "distill": "compress.cli.distill",
    "prune": "compress.cli.prune",
    "prune-vocabulary": "compress.cli.prune_vocabulary",
    "sample": "compress.cli.sample",
    "quantize": "compress.cli.quantize",
    "export": "export.commands",
    "bench": "benchmarks.commands",
    "fit": "benchmarks.commands",
    "eval": "sportsllm.cli.commands",
    "generate": "sportsllm.cli.commands",
    "plan": "benchmarks.commands",
    "run": "sportsllm.cli.commands",
    "verify": "sportsllm.cli.commands",
    "report": "benchmarks.commands",
    "compare": "benchmarks.commands",
    "devices": "benchmarks.commands",
    "calibrate": "benchmarks.commands",
}

Command = Callable[..., dict[str, Any]]


def load_command(name: str) -> Command:
    """The function behind a command.

    Raises:
        ResourceError: its package is missing, or another package of that name hides it.
    """
    module = COMMANDS[name]
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    here = Path(__file__).resolve().parents[2]
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent.parent != here:
        raise ResourceError(
            f"package {package!r} does not lie beside 'sportsllm' in {here}; another package may hide it: "
            "install sportsllm-compress into an environment of its own"
        )
    function = getattr(importlib.import_module(module), name.replace("eval", "evaluate").replace("-", "_"))
    return cast(Command, function)


Out = Annotated[Path, typer.Option("--out", help="New directory to write.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; all cores if not given.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Corpus = Annotated[
    list[Path],
    typer.Option("--corpus", help="Training text: .txt, .md, .jsonl, .parquet, .gz files or folders."),
]
Calibration = Annotated[
    list[Path],
    typer.Option("--calibration", help="Text that statistics are taken from; never held-out text."),
]
CalibrationText = Annotated[
    list[Path] | None,
    typer.Option("--calibration", help="Text that statistics are taken from; the checkpoint's own if not given."),
]
Directory = Annotated[Path, typer.Argument(help="A checkpoint or an export.", show_default=False)]
Valid = Annotated[
    list[Path] | None,
    typer.Option("--valid", help="Held-out text; where not given, 2% of the documents are held out by hash."),
]
Tokens = Annotated[int | None, typer.Option("--tokens", min=1, help="Train on this many tokens (instead of --steps).")]
Steps = Annotated[int | None, typer.Option("--steps", min=0, help="Optimizer steps.")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="Sequences in memory at once.")]
Accumulation = Annotated[int | None, typer.Option("--accumulation", min=1, help="Batches of one optimizer step.")]
Sequence = Annotated[int | None, typer.Option("--sequence", min=2, help="Tokens of one training sequence.")]
LearningRate = Annotated[float | None, typer.Option("--learning-rate", help="Peak learning rate of AdamW.")]
Optimizer = Annotated[str | None, typer.Option("--optimizer", help="adamw, or muon (Muon and AdamW).")]
ScheduleKind = Annotated[str | None, typer.Option("--schedule", help="cosine, or wsd (warm-up, stable, decay).")]
Precision = Annotated[str | None, typer.Option("--precision", help="auto, fp32, bf16 or fp16.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from an interrupted run.")]
LoraRank = Annotated[
    int | None,
    typer.Option("--lora-rank", min=1, help="Train adapters of this rank, not all weights; they are merged."),
]
LoraTargets = Annotated[
    str | None,
    typer.Option("--lora-targets", help="Matrices with adapters, for example q_proj,v_proj; all seven if not given."),
]
LoraAlpha = Annotated[
    float | None, typer.Option("--lora-alpha", help="Adapters count alpha / rank times; 32 if not given.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value: any other training setting, for example warmup=100."),
]


@dataclass(frozen=True)
class TextFlags(FlagGroup):
    """What is trained on, and what is held out."""

    corpus: Corpus | None = None
    valid: Valid = None


@dataclass(frozen=True)
class LengthFlags(FlagGroup):
    """How long to train."""

    steps: Steps = None
    tokens: Tokens = None


@dataclass(frozen=True)
class TrainingFlags(FlagGroup):
    """Settings of the training loop."""

    batch_size: BatchSize = None
    accumulation: Accumulation = None
    sequence: Sequence = None
    learning_rate: LearningRate = None
    optimizer: Optimizer = None
    schedule: ScheduleKind = None
    precision: Precision = None
    set: Set = None
    resume: Resume = False

    def config(
        self, defaults: TrainConfig, tokens: int | None = None, steps: int | None = None, parallel: bool = False
    ) -> TrainConfig:
        """The command's defaults with the flags that were given; see `sportsllm.training.setup.train_config`."""
        from sportsllm.training.setup import train_config

        flags = {name: value for name, value in self.given().items() if name not in ("set", "resume")}
        return train_config(defaults, tokens, {**flags, "steps": steps}, self.set or [], parallel)


@dataclass(frozen=True)
class LoraFlags(FlagGroup):
    """Adapters that are trained instead of all weights."""

    lora_rank: LoraRank = None
    lora_targets: LoraTargets = None
    lora_alpha: LoraAlpha = None

    def adapters(self, optimizer: str) -> Adapters | None:
        """The adapters; None without --lora-rank."""
        from sportsllm.training.lora import adapter_settings

        return adapter_settings(self.lora_rank, self.lora_targets, self.lora_alpha, optimizer)
