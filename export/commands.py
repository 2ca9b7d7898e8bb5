"""The command `export`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.cli import flags


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint directory, quantized or not.", show_default=False), flags.BY_NAME
    ],
    out: flags.Out,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="fp32; fp16: computed and cached in float16, for GPUs; fp16-weights: an unquantized checkpoint stored "
            "in float16 and computed in float32.",
            show_default="fp32",
        ),
    ] = None,
    kv_cache: Annotated[
        str,
        typer.Option(
            "--kv-cache",
            help="fp32; fp16: half the memory, the default with --dtype fp16; int8: a quarter, scales come from "
            "calibration text.",
        ),
    ] = "fp32",
    calibration: flags.CalibrationText = None,
    profile: Annotated[
        str, typer.Option(help="memory, or latency: a second graph with INT8 weights reads prompts faster.")
    ] = "memory",
    standard_ops: Annotated[
        bool,
        typer.Option(
            "--standard-ops", help="Standard ONNX operators only, for runtimes without ONNX Runtime's own; slower."
        ),
    ] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Write the files that transformers.js looks for in a browser.")
    ] = False,
    inline: Annotated[
        bool,
        typer.Option("--inline", help="Write no functions for this program's kernels, for readers that know none."),
    ] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write a GGUF file for llama.cpp and Ollama instead of an ONNX graph.")
    ] = False,
    rope_scaling: flags.RopeScaling = None,
    max_ram: Annotated[
        int | None,
        typer.Option("--max-ram", min=1, help="Upper bound on memory (MB); the graph is then checked layer by layer."),
    ] = None,
    provider: flags.Provider = "cpu",
    threads: flags.Threads = None,
) -> dict[str, Any]:
    """Write an ONNX graph with KV-cache inputs, checked against the PyTorch model before it is published."""
    from export.export import ExportOptions, export_checkpoint

    if gguf:
        others: dict[str, Any] = {
            "--kv-cache": kv_cache != "fp32",
            "--calibration": calibration,
            "--profile": profile != "memory",
        }
        others |= {"--standard-ops": standard_ops, "--web": web, "--inline": inline, "--max-ram": max_ram}
        others["--provider"] = provider != "cpu"
        return _export_gguf(
            checkpoint, out, dtype, [flag for flag, given in others.items() if given], rope_scaling, threads
        )
    how = standard_ops, web, inline, max_ram, rope_scaling, provider
    options = ExportOptions(dtype, threads, kv_cache, calibration or [], profile, *how)
    result = export_checkpoint(checkpoint, out, options)
    _print_export(out, result, max_ram)
    return result


def _print_export(out: Path, result: dict[str, Any], max_ram: int | None) -> None:
    from sportsllm.console import output

    parity = result["parity"]
    output().print(
        f"{out}: {result['precision']}, {result['kv_cache']} cache, {result['parameters']:,} parameters, "
        f"{result['size_bytes'] / 1e6:.1f} MB in {result['seconds']:.1f} s; parity passed: KL {parity['kl']:.1e}, "
        f"greedy choices agree in {parity['greedy_match']:.1%}, "
        f"largest logit error {parity['max_abs_logit_error']:.1e}"
    )
    for kernels, cost in parity.get("input_rounding", {}).items():  # an export of an earlier version has none
        output().print(
            f"8-bit inputs cost, {kernels} kernels: KL {cost['kl']:.1e} nats a token, {cost['greedy_match']:.1%} of "
            f"greedy choices as in PyTorch ({cost['positions']} positions)"
        )
    if max_ram is not None and not result["cached"]:
        output().print(f"at most {result['peak_rss_bytes'] / 1e6:,.0f} MB of memory, {max_ram:,} allowed")


def _export_gguf(
    checkpoint: Path, out: Path, dtype: str | None, others: list[str], rope_scaling: str | None, threads: int | None
) -> dict[str, Any]:
    from export.export import DTYPES
    from export.gguf_export import export_gguf
    from sportsllm.console import output
    from sportsllm.errors import UsageError

    if others:
        raise UsageError(f"{others[0]} is about the ONNX graph; leave it out, or --gguf")
    if dtype not in (None, *DTYPES):
        raise UsageError(f"--dtype {dtype!r}: choose {' or '.join(DTYPES)}")
    result = export_gguf(checkpoint, out, dtype, threads, rope_scaling)
    parity, formats = result["parity"], ", ".join(result["formats"])
    output().print(
        f"{out}: GGUF, {result['architecture']}, {formats}, {result['parameters']:,} parameters, "
        f"{result['size_bytes'] / 1e6:.1f} MB in {result['seconds']:.1f} s; read back: KL {parity['kl']:.1e}, greedy "
        f"choices agree in {parity['greedy_match']:.1%}"
    )
    return result
