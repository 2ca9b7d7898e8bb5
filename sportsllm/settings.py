"""Rare settings, given as `--set name=value`, from Python as `settings={"name": value}`, in recipes as `set = {...}`.

Each group below is a table of names, types and meanings; a verb says which groups it takes. `python -m
sportsllm.settings` makes `docs/reference/settings.md` of these tables. Imports no torch.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sportsllm.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Setting:
    """A setting: its type (bool, int, float or str), its meaning, its default.

    `least` and `most` bound numbers; `choices` lists the values of a text.
    """

    kind: type
    help: str
    default: str
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()


Group = Mapping[str, Setting]
OPTIMIZERS, OPTIMIZER_BITS = ("adamw", "muon"), (32, 8)

TRAINING: Group = {
    "precision": Setting(
        str,
        "Compute dtype; auto is bf16 if the processor supports it",
        "auto",
        choices=("auto", "fp32", "bf16", "fp16"),
    ),
    "accumulation": Setting(int, "Batches per optimizer step", "leaves 200 steps or more; 4 with --steps", 1),
    "optimizer": Setting(str, "Optimizer; muon is Muon and AdamW", "muon where it pays", choices=OPTIMIZERS),
    "optimizer_bits": Setting(int, "Bits of optimizer states: 32, or 8 (AdamW only)", "32"),
    "schedule": Setting(str, "Learning-rate schedule", "cosine", choices=("cosine", "wsd")),
    "warmup": Setting(int, "Warm-up steps", "a twentieth of the steps, at most 50", 0),
    "min_lr_ratio": Setting(float, "Final learning rate divided by the peak", "0.1", 0, 1),
    "decay_fraction": Setting(float, "Fraction of a wsd run in which the learning rate decays", "0.2", 0, 1),
    "weight_decay": Setting(float, "Weight decay", "0.1; 0 for pruned and quantized weights", 0),
    "clip_norm": Setting(float, "Gradient norm above which gradients are clipped", "1", 0),
    "muon_learning_rate": Setting(float, "Peak learning rate of Muon", "from the initial weights and from trials", 0),
    "muon_momentum": Setting(float, "Momentum of Muon", "0.95; 0.9 for new, 0.93 for pruned weights", 0, 0.999),
    "muon_nesterov": Setting(bool, "Nesterov momentum in Muon", "true"),
    "checkpoint_activations": Setting(bool, "Recompute activations in the backward pass to save memory", "false"),
    "shard": Setting(bool, "Shard weights, gradients and optimizer states over several processes", "false"),
    "tensor_parallel": Setting(int, "With shard: processes that split each matrix between them", "1", 1),
    "pipeline": Setting(int, "Pipeline stages: processes that each hold consecutive layers", "1", 1),
    "validate_every": Setting(int, "Steps between validations; 0: only at the end", "2 or 4 validations per run", 0),
    "try_rates": Setting(bool, "Choose the learning rate by short trial runs", "true, except for random weights"),
    "log_every": Setting(int, "Steps between two lines of metrics.jsonl", "10", 1),
    "documented": Setting(
        bool, "Fixed defaults: 5,000 steps of 4 x 4 x 512 tokens, AdamW 3e-4, dropout 0.1 in new models", "false"
    ),
}
STEPS: Group = {
    "learning_rate": Setting(float, "Peak learning rate of AdamW", "from start and model size, or from trials", 0),
    "batch_size": Setting(int, "Sequences in memory at once", "up to 4", 1),
    "sequence": Setting(int, "Tokens of one training sequence", "up to 512", 2),
}
DISTILLATION: Group = {
    "kl_weight": Setting(
        float,
        "Weight of the KL divergence in the loss; the rest is cross-entropy",
        "0.9 for random weights; 1 on text of `data sample`; else 0.5, or 0.9 for students trained on fewer than 5 "
        "tokens per parameter",
        0,
        1,
    ),
    "hidden_weight": Setting(
        float,
        "Weight of hidden-state matching in the loss",
        "3 for pruned weights; 0 with signals, or at under 0.001 tokens per parameter, or under 2 of the teacher",
        0,
    ),
    "teacher_precision": Setting(
        str, "Precision of the teacher's weights", "auto", choices=("auto", "fp32", "bf16", "int8", "nf4")
    ),
}
PRUNING: Group = {
    "samples": Setting(int, "Calibration samples", "up to 256, fewer above 20M parameters and before a recovery", 1),
    "scores": Setting(str, "importance.safetensors of an earlier run, or its directory", "measured"),
    "finalists": Setting(int, "Shapes that --search recovers", "3", 1),
}
SIGNALS: Group = {
    "signals": Setting(str, "Directory of the teacher's cached predictions; created if missing", "the teacher runs"),
}
SHAPE: Group = {
    "layers": Setting(int, "Layers", "the model's", 1),
    "hidden": Setting(int, "hidden_size", "the model's", 1),
    "intermediate": Setting(int, "intermediate_size of the feed-forward", "the model's", 1),
    "heads": Setting(int, "Query heads", "the model's", 1),
    "kv_heads": Setting(int, "Key/value heads", "the model's ratio to query heads", 1),
    "head_dim": Setting(int, "Channels of a head", "hidden / heads", 2),
    "dropout": Setting(float, "Dropout in training", "the model's; presets 0", 0, 1),
    "tied": Setting(bool, "One matrix as embedding and head", "the model's"),
}
EXPORT: Group = {
    "inline": Setting(bool, "Write a graph without ONNX functions, which the kernels cannot run", "false"),
    "samples": Setting(int, "Calibration samples", "64 for GGUF's block types, 16 for an INT8 cache", 1),
}
BENCH: Group = {
    "rounds": Setting(int, "Fresh processes per figure", "5", 1),
    "prompt_lengths": Setting(str, "Further prompt lengths for the time to first token, such as 64,256", "128,512"),
    "timeout": Setting(float, "Seconds until a measuring process counts as hung", "900", 1),
    "most_rounds": Setting(int, "Maximum rounds; three are added at a time while the intervals are too wide", "8", 1),
}
TASKS: Group = {
    "task_documents": Setting(int, "Documents per task", "all", 1),
    "task_chat": Setting(bool, "Apply the model's chat template to the tasks' requests", "false"),
}
LIMITS: Group = {
    "file_mb": Setting(float, "Largest size of the files, MB", "the target's", 0.01),
    "peak_memory_mb": Setting(float, "Largest peak memory of the process, MB", "the target's", 1),
    "ttft_ms": Setting(float, "Longest time to the first token, ms", "the target's", 1),
    "tpot_p50_ms": Setting(float, "Longest median time per token, ms", "the target's", 0.01),
    "tpot_p95_ms": Setting(float, "Longest 95th-percentile time per token, ms", "the target's", 0.01),
    "quality_loss_percent": Setting(float, "Largest rise in bits per byte, %", "the target's", 0.001, 100),
    "accuracy_loss_points": Setting(
        float, "Largest accuracy loss in tasks, percentage points", "the target's", 0.001, 100
    ),
    "kl_nats": Setting(float, "Largest mean KL divergence from the teacher, nats per token", "the target's", 1e-6, 100),
    "top1_changed_percent": Setting(float, "Largest share of changed top-1 tokens, %", "the target's", 0.001, 100),
}
TRAINING_STEP: Group = {
    "optimizer_bits": TRAINING["optimizer_bits"],
    "utilization": Setting(float, "Training speed as a share of the device's peak FLOPs", "0.3", 0, 1),
    "cache_tokens": Setting(
        int, "Also show the size of weights and cache with this many cached tokens", "not shown", 1
    ),
    "head_bits": Setting(int, "Bits of embedding and head at int8 and int4", "8"),
    "group_size": Setting(int, "Weights per scale at int8 and int4", "32"),
    "kv_cache": Setting(
        str, "Format of the KV cache in predictions", "as in exports", choices=("fp32", "fp16", "int8")
    ),
    "optimizer": Setting(str, "Optimizer; muon is Muon and AdamW", "adamw", choices=OPTIMIZERS),
    "precision": Setting(
        str, "Compute dtype of training", "bf16; fp32 with --shapes", choices=("auto", "fp32", "bf16", "fp16")
    ),
    "gpus": Setting(int, "GPUs that train together, each with one batch", "1", 1),
    "price_per_hour": Setting(float, "Price per hour of the target, or of each GPU", "none", 0),
}
QUANTIZATION: Group = {
    "samples": Setting(int, "Calibration samples", "64; 16 for balance; 4 for a size with rtn or mse", 1),
    "head_bits": Setting(int, "Bits of embedding and head: 4, 8, or 32 for float32", "8"),
    "symmetric": Setting(bool, "No zero point in 4-bit blocks", "false at 4 bits"),
    "bits_per_weight": Setting(
        float, "Average bits per weight in the layers; mixes 4 and 8 bits by sensitivity", "5% more bytes than INT4", 0
    ),
    "uniform": Setting(bool, "Give every matrix of the layers exactly --bits", "false: 5% more bytes at 4 bits"),
}
FIT: Group = {
    "finalists": Setting(int, "Candidates that get a longer recovery after the brief one", "3", 1),
    "search_tokens": Setting(int, "Tokens of a candidate's brief recovery", "a tenth of --tokens", 1),
    "accumulation": TRAINING["accumulation"],
    **STEPS,
}
TEXT: Group = {
    "text_field": Setting(
        str, "Field of .jsonl records, and column of .parquet files, that holds the text", "the model's, or text"
    ),
    "parse_special": Setting(bool, "Parse special tokens in plain text", "the model's, or false"),
    "loss_on": Setting(
        str,
        "Tokens of conversations to train on and score",
        "the model's, or assistant",
        choices=("assistant", "all"),
    ),
}
TOKENIZER: Group = {
    "digits": Setting(
        str, "Digits in a new tokenizer: grouped, or one token each", "grouped", choices=("grouped", "single")
    ),
}


def parse_settings(
    given: Sequence[str] | Mapping[str, object] | None, *groups: Group, option: str = "--set"
) -> dict[str, Any]:
    """The settings that were given, in their types.

    Args:
        given: `name=value` texts, or a mapping of names to values.
        groups: the tables that the verb takes.

    Raises:
        UsageError: an unknown name (with the nearest one), or a value of the wrong type or out of bounds.
    """
    known = {name: setting for group in groups for name, setting in group.items()}
    pairs = [(name, _spelled(value)) for name, value in given.items()] if isinstance(given, Mapping) else []
    for text in () if given is None or isinstance(given, Mapping) else given:
        name, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"{option} {text}: write {text}=VALUE")
        pairs.append((name.strip(), value.strip()))
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name not in known:
            owners = [commands for commands, group in GROUPS.values() if name in group]
            advice = did_you_mean(name, known) or (owners and f"it is for {owners[0]}")
            advice = advice or f"choose one of {', '.join(known)}"
            raise UsageError(f"{option} {name}={value}: there is no {name!r}; {advice}")
        found[name] = _parse(f"{option} {name}={value}", value, known[name])
    return found


def pick(found: Mapping[str, Any], group: Container[str]) -> dict[str, Any]:
    """The parsed settings that belong to a group."""
    return {name: value for name, value in found.items() if name in group}


def _parse(where: str, text: str, setting: Setting) -> object:
    if setting.kind is bool:
        if text not in ("true", "false"):
            raise UsageError(f"{where}: write true or false")
        return text == "true"
    try:
        value = setting.kind(text)
    except ValueError:
        kind = {int: "whole number", float: "number"}.get(setting.kind, setting.kind.__name__)
        raise UsageError(f"{where}: is not a {kind}") from None
    check_value(where, value, setting)
    return value


def check_value(where: str, value: object, setting: Setting) -> None:
    """Raise UsageError, which begins with `where`, for a value out of bounds or none of the choices."""
    if setting.choices and value not in setting.choices:
        near = did_you_mean(str(value), setting.choices)
        raise UsageError(f"{where}: use one of {', '.join(setting.choices)}" + (f"; {near}" if near else ""))
    finite = not isinstance(value, int | float) or abs(value) <= sys.float_info.max
    if isinstance(value, int | float) and not (finite and setting.least <= value <= setting.most):
        bounds = f"at least {setting.least:g}" if math.isinf(setting.most) else f"{setting.least:g} to {setting.most:g}"
        raise UsageError(f"{where}: must be {'' if finite else 'finite and '}{bounds}")


def check_optimizer_bits(optimizer: str, bits: int) -> None:
    """Refuse states that an optimizer cannot have.

    Raises:
        UsageError: another number of bits, or 8 with Muon.
    """
    if bits not in OPTIMIZER_BITS:
        raise UsageError(f"--set optimizer_bits={bits}: use {' or '.join(map(str, OPTIMIZER_BITS))}")
    if bits == 8 and optimizer == "muon":
        raise UsageError("--set optimizer_bits=8: is for adamw, since bitsandbytes has no Muon; use 32, or adamw")


def _spelled(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


GROUPS: Mapping[str, tuple[str, Group]] = {
    "Training": ("train, distill, prune --recover, quantize --qad", TRAINING),
    "Text": ("train, distill, prune, quantize, export, eval, bench, fit, data tokens", TEXT),
    "Shape of a new model": ("train --model", SHAPE),
    "Tokenizer of a new model": ("train --model", TOKENIZER),
    "Steps": ("prune --recover, quantize --qad", STEPS),
    "Distillation": ("distill, prune --recover, quantize --qad", DISTILLATION),
    "Pruning": ("prune", PRUNING),
    "Quantization": ("quantize", QUANTIZATION),
    "Measuring": ("bench", BENCH),
    "Tasks": ("eval, bench --tasks", TASKS),
    "Limits of a target": ("bench, fit, plan --limit", LIMITS),
    "Plan": ("plan", TRAINING_STEP),
    "Teacher signals": ("prune --recover, quantize --qad", SIGNALS),
    "Export": ("export", EXPORT),
    "Search": ("fit", FIT),
}
"""Title, commands and settings of each group."""


def settings_of(command: str) -> Group:
    """The settings of a command, limits included."""
    groups = (group for owners, group in GROUPS.values() if command in re.split(" --[a-z]+|, ", owners))
    return {name: setting for group in groups for name, setting in group.items()}


def settings_page() -> str:
    """`docs/reference/settings.md`."""
    lines = [
        "# Settings",
        "",
        "Give a rare setting as `--set name=value`, as often as needed. In a recipe write `set = { name = value }`, in",
        'Python `settings={"name": value}`. Give a limit as `--limit name=value`.',
    ]
    for title, (commands, group) in GROUPS.items():
        lines += ["", f"## {title}", "", f"| setting of `{commands}` | meaning | default |", "|---|---|---|"]
        for name, setting in group.items():
            choices = f" ({', '.join(setting.choices)})" if setting.choices else ""
            lines.append(f"| `{name}` | {setting.help}{choices} | {setting.default} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(settings_page(), end="")
