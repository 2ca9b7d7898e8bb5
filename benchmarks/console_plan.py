"""What `plan` prints: a model's parts, memory in use, predictions, and what a training takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from benchmarks.labels import LIMITS, band, megabytes, number, reliability_line
from sportsllm.console import table
from sportsllm.models.presets import PLANNED

_LIMIT_TITLES = tuple(limit.title for limit in LIMITS.values())
_PART_WORDS = {
    "weights": "weights, 16-bit copies",
    "master_weights": "master weights, float32",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "activations": "activations",
    "logits": "logits in chunks, loss",
    "work": "gradients on the way",
}
_PEAKS = {"loss": "loss", "backward": "backward pass", "optimizer": "optimizer's step"}


def print_plan(console: Console, result: Mapping[str, Any]) -> None:
    """Parameters and memory; with a device, predictions with what they mean for its budget; or a training."""
    if "parameters_by_component" not in result:
        _print_count(console, result)
    elif "training" in result:
        print_training(console, result)
    else:
        _print_parts(console, result)
        _print_cache(console, result)
        _print_step(console, result["training_memory"])
    if "shapes" in result:
        _print_shapes(console, result)
    if "predicted" in result:
        _print_predictions(console, result)


def _print_count(console: Console, result: Mapping[str, Any]) -> None:
    """Weights of which only the number is known."""
    bare, scaled = result["weight_bytes_without_scales"], result["weight_bytes"]
    rows = [(_words(name), megabytes(bare[name]), megabytes(scaled[name])) for name in scaled]
    headers = ("precision", "MB", f"MB with a scale for {result['block_size']}")
    console.print(table(headers, rows, title=f"{result['model']}: {result['parameters']:,} parameters"))
    if result["model"].lower() in PLANNED:
        console.print(f"`{result['model'].lower()}` is a shape, with parts and cache.", markup=False)


def _words(precision: str) -> str:
    return "fp16, bf16" if precision == "fp16" else precision


def _print_parts(console: Console, result: Mapping[str, Any]) -> None:
    layers, total, sizes = result["layers"], result["parameters"], result["weight_bytes_by_component"]
    block = _alike_together(result["parameters_per_block"])
    block_sizes = {each: _alike_together(parts) for each, parts in result["weight_bytes_per_block"].items()}

    def row(name: str, count: int, parts: Mapping[str, int]) -> tuple[str, ...]:
        return name, f"{count:,}", f"{100 * count / total:.1f}", *(megabytes(size) for size in parts.values())

    rows = [
        row(name, count, {each: sizes[each][name] for each in sizes})
        for name, count in result["parameters_by_component"].items()
    ]
    one = {each: sum(parts.values()) for each, parts in block_sizes.items()}
    rows.append(row("total", total, result["weight_bytes"]))
    blocks = f"all {layers} blocks"
    if "dense_blocks" in result:
        dense = result["dense_blocks"]
        layers -= dense["layers"]
        rows.append(row(f"{dense['layers']} without experts", dense["parameters"], dense["weight_bytes"]))
        blocks = f"{layers} with experts"
    rows += [
        row(blocks, layers * sum(block.values()), {each: layers * size for each, size in one.items()}),
        row("one block", sum(block.values()), one),
    ]
    rows += [
        row(f"  {name}", count, {each: block_sizes[each][name] for each in sizes}) for name, count in block.items()
    ]
    headers = ("part", "parameters", "%", *(f"{_words(each)} MB" for each in sizes))
    active = result["active_parameters"]
    title = f"{result['model']}: {total:,} parameters" + (f", {active:,} active" if active < total else "")
    console.print(table(headers, rows, title=title))


def _alike_together(parts: Mapping[str, int]) -> dict[str, int]:
    """Parts of a block by name, those of all experts added up."""
    found: dict[str, int] = {}
    for name, count in parts.items():
        words = re.sub(r"^experts\.\d+\.", "experts.", name)
        found[words] = found.get(words, 0) + count
    return found


def _print_cache(console: Console, result: Mapping[str, Any]) -> None:
    a_token = result["kv_cache_bytes_per_token"]
    rows = [("bytes a token", *(f"{size:,}" for size in a_token.values()))]
    if any(result["state_bytes"].values()):
        rows.append(("bytes a sequence, at any length", *(f"{size:,}" for size in result["state_bytes"].values())))
    if "memory_in_use" in result:
        used = result["memory_in_use"]
        held = f"{used['tokens']:,} tokens x {used['sequences']}, MB"
        rows.append((held, *(megabytes(size) for size in used["cache_bytes"].values())))
        for name, sizes in used["total_bytes"].items():
            rows.append((f"  and {_words(name)} weights, MB", *(megabytes(size) for size in sizes.values())))
    console.print(table(("", *a_token), rows, title="key/value cache"))


def _print_step(console: Console, training: Mapping[str, Any]) -> None:
    """A training step in a line or two."""
    line = (
        f"\ntraining step on a {training['processor'].upper()}, batch {training['batch']} x {training['length']:,}, "
        f"{training['precision']}, {training['optimizer']}: {megabytes(training['total_bytes'])} MB, with activation "
        f"checkpointing {megabytes(training['total_checkpointed_bytes'])} MB"
    )
    if "fits" in training:
        fits = training["fits"], training["fits_checkpointed"]
        verdict = {(True, True): "fits", (False, True): "fits with checkpointing only"}.get(fits, "does not fit")
        line += f"; {verdict} in {megabytes(training['usable_bytes'])} MB"
    console.print(f"{line}. `--training` shows the parts.", markup=False)


def print_training(console: Console, result: Mapping[str, Any]) -> None:
    """A training step's memory by part, plain and checkpointed, against the device's; then time, energy and price."""
    training = result["training"]
    columns = training["plain"], training["checkpointed"]
    title = (
        f"{result['model']}, {result['parameters']:,} parameters: training step of {training['batch']} x "
        f"{training['length']:,} tokens, {training['precision']}, {training['optimizer']}"
    )
    if training["optimizer_bits"] != 32:
        title += f" with {training['optimizer_bits']}-bit states"
    words = _PART_WORDS if training["precision"] != "fp32" else _PART_WORDS | {"weights": "weights, float32"}
    rows = [
        (word, *(megabytes(column[f"{name}_bytes"]) for column in columns))
        for name, word in words.items()
        if any(column[f"{name}_bytes"] for column in columns)
    ]
    rows.append(("total", *(megabytes(column["total_bytes"]) for column in columns)))
    if training["device"] is not None:
        usable = megabytes(training["usable_bytes"])
        rows.append((f"usable on {training['device']}", usable, usable))
        rows.append(("fits", *("yes" if column["fits"] else "no" for column in columns)))
        rows.append(("largest batch that fits", *(f"{column['largest_batch']:,}" for column in columns)))
    rows.append(("peak in the", *(_PEAKS[column["peak"]] for column in columns)))
    console.print(table(("part", "MB", "MB, checkpointed"), rows, title=title))
    if training["device"] is not None:
        _print_changes(console, training)
    _print_cost(console, training)


def _print_changes(console: Console, training: Mapping[str, Any]) -> None:
    if training["plain"]["fits"]:
        return
    changes = [(change["flags"], megabytes(change["total_bytes"])) for change in training["changes"]]
    if changes:
        console.print(table(("flags of `train`", "MB"), changes, title="with these it fits"))
    else:
        console.print("\nNothing makes it fit; use a shorter --sequence or a smaller model.", markup=False)


def _print_cost(console: Console, training: Mapping[str, Any]) -> None:
    tokens, flops = training["tokens"], training["flops_per_token"]
    work = f"{number(flops / 1e9)} GFLOPs a token"
    if tokens is not None:
        work += f", {training['flops']:.3g} FLOPs for {tokens:,} tokens"
    if training["device"] is None:
        console.print(f"\n{work}.", markup=False)
        return
    columns = training["plain"], training["checkpointed"]
    rows = [
        ("tokens a second", *(number(column["tokens_per_s"]) for column in columns)),
        ("one batch, ms", *(number(column["step_ms"]) for column in columns)),
    ]
    if tokens is not None:
        rows.append(("hours", *(number(column["hours"]) for column in columns)))
        for key, word in (("energy_kwh", "energy of the device, kWh"), ("price", "price")):
            if columns[0][key] is not None:
                rows.append((word, *(number(column[key]) for column in columns)))
    console.print(table(("", "plain", "checkpointed"), rows, title="estimated time"))
    kind = {"fp16_matmul_rate": "16-bit", "fp32_matmul_rate": "float32"}[training["peak_from"]]
    console.print(
        f"\n{work}, at {training['utilization']:.0%} (--set utilization) of the device's "
        f"{number(training['peak_flops_per_s'] / 1e12)} TFLOP/s of {kind} products.",
        markup=False,
    )


def _print_shapes(console: Console, result: Mapping[str, Any]) -> None:
    shapes = [
        (
            shape["name"] if shape["held"] else f"{shape['name']} (never made whole)",
            shape["kind"],
            " x ".join(f"{size:,}" for size in shape["shape"]),
            str(shape["layers"]),
            f"{shape['bytes']:,}",
        )
        for shape in result["shapes"]
    ]
    headers = ("tensor", "kind", "shape", "times", "bytes each")
    console.print(table(headers, shapes, (0, 1, 2), f"tensors along the way, {result['shapes_precision']}"))


def _print_predictions(console: Console, result: Mapping[str, Any]) -> None:
    rows = [
        (
            row["precision"],
            f"{row['depth']:,}",
            band(row["ttft_ms_low"], row["ttft_ms_high"]),
            band(row["tpot_ms_low"], row["tpot_ms_high"]),
            band(1000 / row["tpot_ms_high"], 1000 / row["tpot_ms_low"]),
            band(row["peak_rss_bytes_low"] / 1e6, row["peak_rss_bytes_high"] / 1e6),
        )
        for row in result["predicted"]
    ]
    if rows:  # in a very short context no step is timed
        prompt = result["predicted"][0]["prompt_tokens"]
        headers = ("precision", "depth", f"TTFT({prompt}) ms", "TPOT ms", "tokens/s", "peak MB")
        console.print(table(headers, rows, title=f"predicted on {result['device']} (the model was not run)"))
    budgets = [
        (precision, budget["verdict"], *map(_judged, budget["limits"]))
        for precision, budget in result["predicted_budget"].items()
    ]
    titles = ("precision", "predicted", *_LIMIT_TITLES)
    console.print(table(titles, budgets, (0, 1), "predicted against the budget ([limit]; ! fails, ? uncertain)"))
    console.print(f"\n{reliability_line(result['efficiency'])}", markup=False)


def _judged(limit: Mapping[str, Any]) -> str:
    value = "?" if limit["value"] is None else f"{limit['value']:,.4g}"
    if limit["source"] == "predicted":
        value = band(limit["low"], limit["high"])
    mark = {"fail": "!", "uncertain": "?"}.get(limit["verdict"], "")
    return f"{mark if limit['value'] is not None else ''}{value} [{limit['limit']:,g}]"
