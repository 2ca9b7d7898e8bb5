"""The verb `plan`: parameters, memory, KV cache and predicted speed of a model, or what a training takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError, did_you_mean
from sportsllm.results import Result
from sportsllm.settings import LIMITS, TRAINING_STEP, parse_settings

if TYPE_CHECKING:
    from benchmarks.devices.schema import Device
    from benchmarks.model_size import ModelFormat
    from sportsllm.models.config import ModelConfig

_training: Any = partial(typer.Option, rich_help_panel="Training")
DEFAULT_LENGTH = 512
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT])", re.IGNORECASE)
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class PlanResult(Result):
    """Computed and predicted figures of a model.

    Attributes:
        model: the model as it was named.
        parameters: total number of parameters.
        parameters_by_component, weight_bytes, kv_cache_bytes_per_token: parameters by part, and bytes by precision;
            None if only a number of parameters was given.
        training_memory_bytes: memory of one training step; None if only a number of parameters was given.
        predicted: with `--target`: `precision`, `depth`, `ttft_ms`, `tpot_ms`, `peak_rss_bytes` and their bands; of an
            export only for its own `stored` format.
        figures: all figures, as `--json` prints them.
    """

    model: str
    parameters: int
    parameters_by_component: dict[str, int] | None = None
    weight_bytes: dict[str, int] | None = None
    kv_cache_bytes_per_token: dict[str, int] | None = None
    training_memory_bytes: int | None = None
    predicted: list[dict[str, Any]] | None = None
    figures: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return self.figures


def plan(
    model: Annotated[
        str,
        typer.Argument(help="A preset; 8b, 70b or 200b; a checkpoint or an export; or a number of parameters: 7B."),
        options.BY_NAME,
    ] = "small",
    *,
    target: options.Target = None,
    limit: options.Limit = None,
    training: Annotated[
        bool, typer.Option("--training", help="Plan a training step: its memory, what fits the target, time.")
    ] = False,
    tokens: Annotated[
        int | None,
        _training(parser=options.count, metavar="N", help="Training tokens, for time and energy.", show_default="none"),
    ] = None,
    batch_size: Annotated[int, _training(min=1, help="Sequences of one training batch.")] = 4,
    sequence: Annotated[
        int | None, _training(min=1, help="Tokens of one training sequence.", show_default="512, or the context")
    ] = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="Also list every tensor of a training step.")] = False,
    settings: options.Settings = None,
) -> PlanResult:
    """Compute parameters, memory and KV cache, and predict speed or training time. Nothing is run."""
    from benchmarks.console_plan import print_plan
    from benchmarks.devices.load import load_target
    from benchmarks.model_size import CACHES, stored_format
    from benchmarks.predict.training import Cost, plan_training
    from sportsllm.console import output
    from sportsllm.formats.manifest import directory_bytes
    from sportsllm.inference.decoder import is_onnx_directory
    from sportsllm.models.memory import tensor_shapes
    from sportsllm.models.presets import PLANNED
    from sportsllm.models.training_memory import TrainingStep

    rare, limits = parse_settings(settings, TRAINING_STEP), parse_settings(limit, LIMITS, option="--limit")
    if limits and target is None:
        raise UsageError(f"--limit {next(iter(limits))}: give --target NAME too, whose limit it replaces")
    group_size, head_bits, kv_cache = rare.get("group_size", 32), rare.get("head_bits", 8), rare.get("kv_cache")
    cached = rare.get("cache_tokens")
    optimizer, precision = rare.get("optimizer", "adamw"), rare.get("precision")
    cost: dict[str, Any] = {} if tokens is None else {"tokens": tokens}
    cost |= {name: rare[name] for name in ("price_per_hour", "utilization", "gpus") if name in rare}
    given = [f"--set {name}" if name in rare else f"--{name}" for name in cost]
    if given and not training:
        raise UsageError(f"{', '.join(given)}: only with --training")
    count = None if (found := _COUNT.fullmatch(model)) is None else round(float(found[1]) * _FACTORS[found[2].upper()])
    if count is not None and model not in PLANNED and not Path(model).is_dir():
        if target or training or shapes or sequence or batch_size != 4 or rare.keys() - {"group_size"}:
            named = f"; {model.lower()!r} is one" if model.lower() in PLANNED else ""
            raise UsageError(
                f"model {model!r}: a number of parameters has weights only; for the rest give a shape{named}"
            )
        figures = _count(model, count, group_size)
        print_plan(output(), figures)
        return PlanResult.of({**figures, "figures": figures})
    config, directory = read_model(model, ", no number of parameters such as 7B or 162M,")
    device = None if target is None else load_target(target, limits)
    stored = stored_format(directory) if directory is not None and is_onnx_directory(directory) else None
    fixed = [f"--set {name}" for name in ("group_size", "head_bits", "kv_cache") if name in rare]
    fixed += [flag for flag, given in (("--training", training), ("--shapes", shapes)) if given]
    if stored is not None and fixed:
        raise UsageError(f"{fixed[0]}: {model} is an export, whose format is fixed; give the checkpoint instead")
    context, precision = config.max_position_embeddings, None if precision == "auto" else precision
    if sequence is not None and sequence > context:
        raise UsageError(f"--sequence {sequence} is longer than the context of {context} tokens")
    length, bits = sequence or min(DEFAULT_LENGTH, context), rare.get("optimizer_bits", 32)
    processor = "cpu" if device is None else device.processor
    step = TrainingStep(batch_size, length, precision or "bf16", optimizer, bits, processor)
    planned = plan_training(config, step, device, Cost(**cost))
    formats = [stored] if stored else _formats(config, group_size, head_bits, kv_cache)
    figures = _sizes(model, config, formats, [stored.cache] if stored else CACHES)
    figures |= {"training_memory_bytes": planned["plain"]["total_bytes"], "training": planned}
    if directory is not None:
        figures["file_bytes"] = directory_bytes(directory)
    if stored is not None:
        figures["stored"] = asdict(stored) | {"name": stored.name}
    if cached is not None:
        figures["memory_in_use"] = _memory_in_use(config, cached, figures)
    if shapes:
        listed = tensor_shapes(config, step.batch, step.length, 4 if precision in (None, "fp32") else 2)
        figures |= {"shapes": [each._asdict() for each in listed], "shapes_precision": precision or "fp32"}
    if device is not None and not training:
        figures |= _predictions(config, device, formats)
    print_plan(output(), figures, training)
    return PlanResult.of({**figures, "figures": figures})


def read_model(model: str, nor: str = "") -> tuple[ModelConfig, Path | None]:
    """The shape of a preset, or of a checkpoint or export directory, which is returned beside it.

    `nor` says in the error what else the model is not.

    Raises:
        UsageError: neither a preset nor a directory.
        ArtifactError: the directory has no valid config.json.
    """
    from sportsllm.formats.huggingface import load_config
    from sportsllm.models.presets import PLANNED, PRESETS

    named = PRESETS | PLANNED
    if model in named:
        return named[model], None
    directory = Path(model)
    if not directory.is_dir():
        raise UsageError(
            f"model {model!r} is no directory{nor} and no shape; "
            + (did_you_mean(model, named) or f"the shapes are {', '.join(named)}")
        )
    return load_config(directory), directory


def _count(model: str, count: int, group_size: int) -> dict[str, Any]:
    """Bytes of weights of which only the number is known, by precision, without and with the scales of blocks."""
    from sportsllm.models import memory as size

    if count < 1:
        raise UsageError(f"model {model!r}: has no parameters; give a number such as 7B")
    return {
        "model": model,
        "parameters": count,
        "weight_bytes": {name: size.count_bytes(count, name, group_size) for name in size.PRECISIONS},
        "weight_bytes_without_scales": {name: size.count_bytes(count, name) for name in size.PRECISIONS},
        "block_size": group_size,
    }


def _sizes(model: str, config: ModelConfig, formats: Sequence[ModelFormat], caches: Sequence[str]) -> dict[str, Any]:
    """Parameters, and bytes by format of the weights and of the cache."""
    from sportsllm.models import memory as size

    by_component = {stored.precision: size.component_bytes(config, stored) for stored in formats}
    a_token, states = size.kv_cache_bytes_per_token(config), size.state_bytes(config)
    found = {
        "model": model,
        "layers": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "parameters": config.parameters,
        "active_parameters": config.active_parameters,
        "parameters_by_component": config.parameters_by_component(),
        "parameters_per_block": size.block_parameters(config),
        "weight_bytes": {name: sum(sizes.values()) for name, sizes in by_component.items()},
        "weight_bytes_by_component": by_component,
        "weight_bytes_per_block": {stored.precision: size.block_bytes(config, stored) for stored in formats},
        "block_size": formats[-1].block_size,
        "head_bits": formats[-1].head_bits,
        "kv_cache_bytes_per_token": {name: a_token[name] for name in caches},
        "state_bytes": {name: states[name] for name in caches},
    }
    if config.dense_layers:  # the first layers of a mixture; per block are those of the others
        part, layers = config.runs()[0]
        found["dense_blocks"] = {
            "layers": layers,
            "parameters": layers * sum(size.block_parameters(part).values()),
            "weight_bytes": {
                stored.precision: layers * sum(size.block_bytes(part, stored).values()) for stored in formats
            },
        }
    return found


def _memory_in_use(config: ModelConfig, tokens: int, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Weights and cache together, by the precision of either."""
    if tokens > config.max_position_embeddings:
        raise UsageError(f"cache_tokens={tokens} is more than the context of {config.max_position_embeddings} tokens")
    a_token, weights = sizes["kv_cache_bytes_per_token"], sizes["weight_bytes"]
    cached = {name: tokens * each + sizes["state_bytes"][name] for name, each in a_token.items()}
    return {
        "tokens": tokens,
        "cache_bytes": cached,
        "total_bytes": {name: {cache: held + each for cache, each in cached.items()} for name, held in weights.items()},
    }


def _formats(config: ModelConfig, group_size: int, head_bits: int, cache: str | None) -> list[ModelFormat]:
    """The formats that a model may be exported in."""
    from benchmarks.model_size import ModelFormat
    from sportsllm.models.memory import PRECISIONS, usual_cache

    # 4-bit blocks have zero points, as `quantize` rounds by default.
    formats = (ModelFormat(name, group_size, head_bits, zero_points=name == "int4") for name in PRECISIONS)
    return [replace(each, cache=cache or usual_cache(config, each.quantized)) for each in formats]


def _predictions(config: ModelConfig, device: Device, formats: Sequence[ModelFormat]) -> dict[str, Any]:
    from benchmarks.devices.verdict import judge, worst
    from benchmarks.predict.latency import predict, predict_figures, reliability

    judged = [(each, judge(device, {}, predict_figures(config, device, each))) for each in formats]
    return {
        "device": device.name,
        "predicted": [row for each in formats for row in predict(config, device, each)],
        "predicted_budget": {
            each.precision: {"target": device.name, "verdict": worst(limits), "limits": list(map(asdict, limits))}
            for each, limits in judged
        },
        "efficiency": reliability(device),
    }
