"""The command `verify`. Heavy imports are inside."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from sportsllm.cli import flags
from sportsllm.errors import ArtifactError, GateError, UsageError
from sportsllm.files import require_directory


def verify(
    directory: flags.Directory, provider: flags.Provider = "cpu", threads: flags.Threads = None
) -> dict[str, Any]:
    """Check a finished directory against its manifest: sizes, digests, missing and added files.

    With --provider, also run an export there and compare its logits with the CPU's.
    """
    from sportsllm.console import output
    from sportsllm.formats.artifact import verify_directory
    from sportsllm.formats.huggingface.config import load_config
    from sportsllm.inference.decoder import is_onnx_directory

    require_directory(directory, "a finished checkpoint or export")
    exported = is_onnx_directory(directory)
    if provider != "cpu" and not exported:
        raise UsageError(f"--provider {provider}: {directory} is a checkpoint, which PyTorch runs; export it first")
    files, problems = verify_directory(directory)
    if (directory / "config.json").exists():
        try:
            load_config(directory)
        except ArtifactError as error:
            problems.append(str(error))
    kernels = _kernels_of_export(directory) if exported else None
    if kernels is not None:
        output().print(kernels[1], markup=False)
    for problem in problems:
        output().print(problem, markup=False)
    output().print(f"{directory}: {files} files checked, {len(problems)} problems")
    result: dict[str, Any] = {"ok": not problems, "files": files, "problems": problems}
    result["kernels"] = None if kernels is None else kernels[0]
    if problems:
        result["complaint"] = f"{directory}: {len(problems)} problems; copy or make the directory again"
        result["exit_code"] = ArtifactError.exit_code
        return result
    return result if provider == "cpu" else result | _run_on(directory, provider, threads)


def _kernels_of_export(directory: Path) -> tuple[str, str]:
    """What would run an export on the CPU here, `native` or `portable`, and a line about it."""
    chosen = importlib.import_module("export.runtime.kernels").kernels_of_directory(directory)
    return chosen.name, str(chosen)


def _run_on(directory: Path, provider: str, threads: int | None) -> dict[str, Any]:
    """Keys of the result that say where an export's nodes run, and whether it computes there what it should."""
    from sportsllm.console import output

    placement, found = importlib.import_module("export.parity.provider").check_provider(directory, provider, threads)
    if placement is not None:
        output().print(str(placement), markup=False)
    failures = found.failures()
    parity = {
        "max_abs_logit_error": max(each.max_abs_logit_error for each in found.comparisons),
        "kl": max(each.kl for each in found.comparisons),
        "greedy_match": found.greedy_match,
        "passed": not failures,
        "failures": failures,
    }
    output().print(
        f"{provider} beside the CPU provider: KL {parity['kl']:.1e}, greedy choices agree in "
        f"{found.greedy_match:.1%}, largest logit error {parity['max_abs_logit_error']:.1e}"
    )
    result: dict[str, Any] = {"provider": provider, "parity": parity, "ok": not failures}
    result["placement"] = None if placement is None else placement.to_dict()
    if failures:
        result["complaint"] = (
            f"{directory}: --provider {provider} computes something else ({failures[0]}); do not use it"
        )
        result["exit_code"] = GateError.exit_code
    return result
