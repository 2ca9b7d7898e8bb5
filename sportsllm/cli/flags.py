"""The table of commands, and flags that mean the same in every command. Imports typer only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sportsllm.cli.flag_groups import FlagGroup
from sportsllm.errors import UsageError
from sportsllm.options import BY_NAME

if TYPE_CHECKING:
    from sportsllm.training.settings import Adapters, Run, TrainConfig

Out = Annotated[Path, typer.Option("--out", help="New directory to write.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.", show_default="all cores")]
Kernels = Annotated[
    str,
    typer.Option(help="What runs an export: native (this program's kernels), portable (ONNX Runtime's), or auto."),
]
RopeScaling = Annotated[
    str | None,
    typer.Option(
        "--rope-scaling",
        metavar="TYPE:FACTOR",
        help="Lengthen the context by a factor: yarn, llama3 or linear, for example yarn:4.",
        show_default="as the model is",
    ),
]
Provider = Annotated[
    str,
    typer.Option(
        "--provider",
        help="What an export runs on: cpu, or another installed execution provider of ONNX Runtime, such as cuda.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Calibration = Annotated[
    list[Path], typer.Option("--calibration", help="Text that statistics are taken from; never held-out text.")
]
CalibrationText = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        help="Text that statistics are taken from; never held-out text.",
        show_default="the checkpoint's training text",
    ),
]
Directory = Annotated[Path, typer.Argument(help="A checkpoint or an export.", show_default=False), BY_NAME]
Corpus = Annotated[
    list[Path] | None,
    typer.Option(
        "--corpus",
        help="Training text: .txt, .md, .jsonl, .parquet, .gz files or folders.",
        show_default="what the teacher or checkpoint was trained on; for a new model simulated matches",
    ),
]
Valid = Annotated[
    list[Path] | None,
    typer.Option("--valid", help="Held-out text.", show_default="2% of the documents, chosen by hash"),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Sequences in memory at once.", show_default="up to 4")
]
Accumulation = Annotated[
    int | None,
    typer.Option(
        "--accumulation",
        min=1,
        help="Batches of one optimizer step.",
        show_default="for 200 steps or more of --tokens; 4 with --steps",
    ),
]
Sequence = Annotated[
    int | None, typer.Option("--sequence", min=2, help="Tokens of one training sequence.", show_default="up to 512")
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--learning-rate",
        help="Peak learning rate of AdamW.",
        show_default="by the start and the model's size, and by trial where the start is good; printed",
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer", help="adamw, or muon (Muon and AdamW).", show_default="muon, where its steps are cheap"
    ),
]
OptimizerBits = Annotated[
    int | None,
    typer.Option(
        "--optimizer-bits",
        metavar="32|16|8",
        help="Of the optimizer's states: 32, 16 (gradients too) or 8 (AdamW's, by bitsandbytes).",
        show_default="32",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", help="Type that is computed in: auto, fp32, bf16 or fp16.", show_default="auto"),
]


@dataclass(frozen=True)
class TextFlags(FlagGroup):
    """What is trained on, and what is held out."""

    corpus: Corpus = None
    valid: Valid = None


@dataclass(frozen=True)
class LengthFlags(FlagGroup):
    """How long to train."""

    steps: Annotated[int | None, typer.Option(min=0, help="Optimizer steps.", show_default="5000")] = None
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Train on this many tokens, instead of --steps.", show_default="by --steps"),
    ] = None


@dataclass(frozen=True)
class TrainingFlags(FlagGroup):
    """Settings of the training loop."""

    batch_size: BatchSize = None
    accumulation: Accumulation = None
    sequence: Sequence = None
    learning_rate: LearningRate = None
    optimizer: Optimizer = None
    optimizer_bits: OptimizerBits = None
    schedule: Annotated[
        str | None, typer.Option(help="cosine, or wsd (warm-up, stable, decay).", show_default="cosine")
    ] = None
    min_lr_ratio: Annotated[
        float | None, typer.Option(help="Last learning rate as a share of the peak.", show_default="0.1")
    ] = None
    decay_fraction: Annotated[
        float | None, typer.Option(help="Part of a wsd run in which the rate falls.", show_default="0.2")
    ] = None
    muon_learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate of Muon.", show_default="by the start, and by trial")
    ] = None
    muon_momentum: Annotated[float | None, typer.Option(help="Momentum of Muon.", show_default="0.95")] = None
    muon_nesterov: Annotated[
        bool | None,
        typer.Option(
            "--muon-nesterov/--no-muon-nesterov", help="Nesterov's form of Muon's momentum.", show_default="on"
        ),
    ] = None
    muon_steps: Annotated[int | None, typer.Option(min=1, help="Newton-Schulz steps of Muon.", show_default="5")] = None
    muon_coefficients: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C", help="Coefficients of Muon's Newton-Schulz step.", show_default="3.4445,-4.775,2.0315"
        ),
    ] = None
    precision: Precision = None
    settings: Annotated[
        str,
        typer.Option(
            help="What is not given: derived (from the run's length, model and start), or documented (5,000 steps of "
            "4 x 4 x 512 tokens, AdamW 3e-4, warm-up 50; dropout 0.1 for a new model)."
        ),
    ] = "derived"
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Any other training setting, for example warmup=100.", show_default="none"
        ),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False

    def config(
        self, run: Run, tokens: int | None = None, steps: int | None = None, *, seed: int = 0, parallel: bool = False
    ) -> TrainConfig:
        """The flags that were given, and what follows from the run; see `sportsllm.training.settings.train_config`."""
        from sportsllm.settings import TRAINING, parse_settings
        from sportsllm.training.settings import train_config

        flags = {name: value for name, value in self.given().items() if name not in ("set", "resume", "settings")}
        if self.muon_coefficients is not None:
            flags |= parse_settings([f"muon_coefficients={self.muon_coefficients}"], TRAINING)
        flags |= parse_settings(self.set, TRAINING) | {"steps": steps, "documented": self.documented}
        return train_config(run, tokens, flags, seed=seed, parallel=parallel)

    @property
    def documented(self) -> bool:
        """Whether settings are the documented ones.

        Raises:
            UsageError: --settings is neither of the two.
        """
        if self.settings not in ("derived", "documented"):
            raise UsageError(f"--settings {self.settings!r} is not known; use derived or documented")
        return self.settings == "documented"


@dataclass(frozen=True)
class LoraFlags(FlagGroup):
    """Adapters that are trained instead of all weights."""

    lora_rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train adapters of this rank, and merge them at the end.",
            show_default="all weights are trained",
        ),
    ] = None
    lora_targets: Annotated[
        str | None,
        typer.Option(
            help="Matrices of a layer with adapters, for example q_proj,v_proj.", show_default="all of a layer"
        ),
    ] = None
    lora_alpha: Annotated[
        float | None, typer.Option(help="Adapters are scaled by alpha / rank.", show_default="32")
    ] = None

    def adapters(self, optimizer: str) -> Adapters | None:
        """The adapters; None without --lora-rank."""
        from sportsllm.training.settings import adapter_settings

        return adapter_settings(self.lora_rank, self.lora_targets, self.lora_alpha, optimizer)
