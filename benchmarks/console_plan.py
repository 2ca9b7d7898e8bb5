"""What `plan` prints: a model's parts, memory in use, predictions, and what a training takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.labels import LIMITS, Table, band, megabytes, number, reliability_line

if TYPE_CHECKING:
    from rich.console import Console

_PARTS = {
    "weights": "weights, 16-bit copies",
    "master_weights": "master weights, float32",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "gathered": "gathered weights and gradients",
    "activations": "activations",
    "logits": "logits in chunks, loss",
    "work": "gradients of activations",
}
_LAYOUTS = {"plain": "plain", "checkpointed": "checkpointed", "sharded": "sharded", "sharded_checkpointed": "both"}
_PEAKS = {"loss": "loss", "backward": "backward pass", "optimizer": "optimizer's step"}
_COST = {
    "tokens_per_s": "tokens per second",
    "step_ms": "one batch, ms",
    "hours": "hours",
    "energy_kwh": "energy of the device, kWh",
    "price": "price",
}
_PRECISIONS = {"fp16": "fp16, bf16"}


def print_plan(console: Console, result: Mapping[str, Any], training: bool = False) -> None:
    """Parameters and memory; with a device, predictions with what they mean for its budget; or the `training`."""
    for table in _tables(result, training):
        table.print(console)


def _tables(result: Mapping[str, Any], training: bool) -> Iterator[Table]:
    if "parameters_by_component" not in result:
        yield _bare_count(result)
    elif training:
        yield from _training(result, result["training"])
    else:
        yield _parts(result)
        yield _cache(result)
    if "shapes" in result:
        rows = [
            (
                shape["name"] + ("" if shape["held"] else " (never held whole)"),
                shape["kind"],
                " x ".join(f"{size:,}" for size in shape["shape"]),
                str(shape["layers"]),
                f"{shape['bytes']:,}",
            )
            for shape in result["shapes"]
        ]
        title = f"tensors along the way, {result['shapes_precision']}"
        yield Table(title, ("tensor", "kind", "shape", "times", "bytes each"), rows, (0, 1, 2))
    if "predicted" in result:
        yield from _predictions(result)


def _bare_count(result: Mapping[str, Any]) -> Table:
    """Weights of which only the number is known."""
    from sportsllm.models.presets import PLANNED

    bare, scaled = result["weight_bytes_without_scales"], result["weight_bytes"]
    rows = [(_PRECISIONS.get(name, name), megabytes(bare[name]), megabytes(scaled[name])) for name in scaled]
    headers = ("precision", "MB", f"MB with a scale per {result['block_size']}")
    name = result["model"].lower()
    caption = f"`{name}` is a shape, with parts and cache." if name in PLANNED else ""
    return Table(f"{result['model']}: {result['parameters']:,} parameters", headers, rows, (0,), caption)


def _parts(result: Mapping[str, Any]) -> Table:
    layers, total, sizes = result["layers"], result["parameters"], result["weight_bytes_by_component"]
    block = _alike_together(result["parameters_per_block"])
    block_sizes = {each: _alike_together(parts) for each, parts in result["weight_bytes_per_block"].items()}
    one = [sum(parts.values()) for parts in block_sizes.values()]

    def row(name: str, count: int, bytes_by_precision: Sequence[int]) -> tuple[str, ...]:
        return name, f"{count:,}", f"{100 * count / total:.1f}", *map(megabytes, bytes_by_precision)

    rows = [
        row(name, count, [parts[name] for parts in sizes.values()])
        for name, count in result["parameters_by_component"].items()
    ]
    rows.append(row("total", total, list(result["weight_bytes"].values())))
    if stored := result.get("stored"):
        rows.append(("its files", "", "", megabytes(result["file_bytes"])))
    blocks = f"all {layers} blocks"
    if dense := result.get("dense_blocks"):
        layers -= dense["layers"]
        rows.append(
            row(f"{dense['layers']} without experts", dense["parameters"], list(dense["weight_bytes"].values()))
        )
        blocks = f"{layers} with experts"
    rows.append(row(blocks, layers * sum(block.values()), [layers * size for size in one]))
    rows.append(row("one block", sum(block.values()), one))
    rows += [row(f"  {name}", count, [parts[name] for parts in block_sizes.values()]) for name, count in block.items()]
    headers = ("part", "parameters", "%", *(f"{_PRECISIONS.get(each, each)} MB" for each in sizes))
    active = result["active_parameters"]
    title = f"{result['model']}: {total:,} parameters" + (f", {active:,} active" if active < total else "")
    note = "Matrices of other bits are counted like most matrices. The files also hold the graph and its tables."
    return Table(f"{title}, {stored['name']}" if stored else title, headers, rows, (0,), note if stored else "")


def _alike_together(parts: Mapping[str, int]) -> dict[str, int]:
    """Parts of a block by name, those of all experts added up."""
    found = Counter[str]()
    for name, count in parts.items():
        found[re.sub(r"^experts\.\d+\.", "experts.", name)] += count
    return found


def _cache(result: Mapping[str, Any]) -> Table:
    """The cache alone and with weights, and a training step in a line."""
    a_token, states = result["kv_cache_bytes_per_token"], result["state_bytes"].values()
    rows = [("bytes per token", *(f"{size:,}" for size in a_token.values()))]
    if any(states):
        rows.append(("bytes a sequence, at any length", *(f"{size:,}" for size in states)))
    if used := result.get("memory_in_use"):
        held = f"{used['tokens']:,} tokens, MB"
        rows.append((held, *map(megabytes, used["cache_bytes"].values())))
        for name, sizes in used["total_bytes"].items():
            rows.append((f"  and {_PRECISIONS.get(name, name)} weights, MB", *map(megabytes, sizes.values())))
    if "stored" in result:
        return Table("key/value cache", ("", *a_token), rows)
    step = result["training"]
    plain, checkpointed = step["plain"], step["checkpointed"]
    line = (
        f"\ntraining step on a {step['processor'].upper()}, batch {step['batch']} x {step['length']:,}, "
        f"{step['precision']}, {step['optimizer']}: {megabytes(plain['total_bytes'])} MB, with activation "
        f"checkpointing {megabytes(checkpointed['total_bytes'])} MB"
    )
    if "fits" in plain:
        alone = "fits with checkpointing only" if checkpointed["fits"] else "does not fit"
        line += f"; {'fits' if plain['fits'] else alone} in {megabytes(step['usable_bytes'])} MB"
    return Table("key/value cache", ("", *a_token), rows, (0,), f"{line}. `--training` shows the parts.")


def _training(result: Mapping[str, Any], training: Mapping[str, Any]) -> Iterator[Table]:
    """A training step's memory by part, plain and checkpointed, against the device's; then time, energy and price."""
    names = [name for name in _LAYOUTS if name in training]
    columns, device = [training[name] for name in names], training["device"]
    headers = [_LAYOUTS[name] for name in names]
    title = (
        f"{result['model']}, {result['parameters']:,} parameters: training step of {training['batch']} x "
        f"{training['length']:,} tokens, {training['precision']}, {training['optimizer']}"
    )
    if training["optimizer_bits"] != 32:
        title += f" with {training['optimizer_bits']}-bit states"
    if training["gpus"] > 1:
        title += f" on each of {training['gpus']:,} GPUs"
    words = _PARTS if training["precision"] != "fp32" else _PARTS | {"weights": "weights, float32"}
    parts = {word: [column[f"{name}_bytes"] for column in columns] for name, word in words.items()}
    rows = [(word, *map(megabytes, sizes)) for word, sizes in parts.items() if any(sizes)]
    rows.append(("total", *(megabytes(column["total_bytes"]) for column in columns)))
    tokens, work = training["tokens"], f"{number(training['flops_per_token'], 1e9)} GFLOPs a token"
    if tokens is not None:
        work += f", {training['flops']:.3g} FLOPs for {tokens:,} tokens"
    if device is not None:
        rows.append((f"usable on {device}", *[megabytes(training["usable_bytes"])] * len(names)))
        rows.append(("fits", *("yes" if column["fits"] else "no" for column in columns)))
        rows.append(("largest batch that fits", *(f"{column['largest_batch']:,}" for column in columns)))
    rows.append(("peak in the", *(_PEAKS[column["peak"]] for column in columns)))
    in_mb = ["MB", *(f"MB, {header}" for header in headers[1:])]
    yield Table(title, ("part", *in_mb), rows, (0,), "" if device is not None else f"\n{work}.")
    if device is None:
        return
    if not training["plain"]["fits"]:
        changes = [(change["flags"], megabytes(change["total_bytes"])) for change in training["changes"]]
        none = "" if changes else "\nNothing makes it fit; use a shorter --sequence or a smaller model."
        yield Table("to make it fit" if changes else "", ("options of `train`", "MB"), changes, (0,), none)
    if layouts := training.get("layouts"):
        yield _divided(layouts, training)
    known = {word: [column.get(key) for column in columns] for key, word in _COST.items()}
    rows = [(word, *map(number, values)) for word, values in known.items() if values[0] is not None]
    kind = {"fp16_matmul_rate": "16-bit", "fp32_matmul_rate": "float32"}[training["peak_from"]]
    caption = (
        f"\n{work}, at {training['utilization']:.0%} (--set utilization) of the device's "
        f"{number(training['peak_flops_per_s'], 1e12)} TFLOP/s of {kind} products."
    )
    yield Table("estimated time", ("", *headers), rows, (0,), caption)


def _divided(layouts: Sequence[Mapping[str, Any]], training: Mapping[str, Any]) -> Table:
    """Memory of each GPU by part, time and price of every way to divide a model."""
    columns = {"weights": ("weights", "master_weights"), "gradients": ("gradients",), "states": ("optimizer_states",)}
    columns |= {"gathered": ("gathered",), "activations": ("activations", "work", "logits")}
    costs = [name for name in ("hours", "price") if layouts[0].get(name) is not None] or ["tokens_per_s"]
    rows = []
    for each in layouts:
        words = re.sub("--set |=true", "", each["flags"]).replace("checkpoint_activations", "checkpointed")
        parts = [megabytes(sum(each[f"{name}_bytes"] for name in names)) for names in columns.values()]
        total = megabytes(each["total_bytes"]), "yes" if each["fits"] else "no", f"{each['largest_batch']:,}"
        rows.append((words, *parts, *total, *(number(each[name]) for name in costs)))
    headers = ("layout", *columns, "total", "fits", "batch", *(name.replace("_per_", "/") for name in costs))
    return Table(f"layouts on {training['gpus']:,} GPUs, MB of each", headers, rows, (0,))


def _predictions(result: Mapping[str, Any]) -> Iterator[Table]:
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
        headers = ("precision", "depth", f"TTFT({result['predicted'][0]['prompt_tokens']}) ms", "TPOT ms", "tokens/s")
        yield Table(f"predicted on {result['device']} (the model was not run)", (*headers, "peak MB"), rows)
    budgets = result["predicted_budget"]
    judged = zip(*(budget["limits"] for budget in budgets.values()), strict=True)
    limits = [[LIMITS[each[0]["name"]].title, f"{each[0]['limit']:,g}", *map(_judged, each)] for each in judged]
    limits.append(["predicted", "", *(budget["verdict"] for budget in budgets.values())])
    title = "predicted against the budget (! fails, ? uncertain)"
    yield Table(title, ("", "limit", *budgets), limits, (0,), f"\n{reliability_line(result['efficiency'])}")


def _judged(limit: Mapping[str, Any]) -> str:
    if limit["value"] is None:
        return "?"
    return {"fail": "!", "uncertain": "?"}.get(limit["verdict"], "") + band(limit["low"], limit["high"])
