"""The verb `verify`: compare a finished directory with its manifest, or an export on another processor with the CPU."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from sportsllm import options
from sportsllm.errors import ArtifactError, GateError, UsageError
from sportsllm.results import Result


@dataclass(frozen=True, kw_only=True)
class ProviderParity:
    """An export on another execution provider against the CPU's."""

    max_abs_logit_error: float
    kl: float
    greedy_match: float
    passed: bool
    failures: list[str]


@dataclass(frozen=True, kw_only=True)
class VerifyResult(Result):
    """A checked directory.

    Attributes:
        ok: whether no problem was found.
        files: number of files in the manifest.
        problems: one line for each problem.
        kernels: kernels that run an export on this CPU, `native` or `portable`; None if it is damaged or a checkpoint.
        provider, parity, placement: with `--provider`: the execution provider, its difference from the CPU, and the
            operators that it runs.
    """

    ok: bool
    files: int
    problems: list[str] = field(default_factory=list)
    kernels: str | None = None
    provider: str | None = None
    parity: ProviderParity | None = None
    placement: dict[str, object] | None = None


def verify(
    directory: Annotated[Path, typer.Argument(help="A finished checkpoint or export.", show_default=False)],
    provider: options.Provider = "cpu",
    threads: options.Threads = None,
) -> VerifyResult:
    """Check a finished directory against its manifest: sizes, digests, missing and added files.

    With --provider, also run an export there and compare its logits with the CPU's.
    """
    from sportsllm.console import output
    from sportsllm.files import require_directory
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.manifest import MANIFEST, verify_directory
    from sportsllm.inference.decoder import is_onnx_directory

    require_directory(directory, "a finished checkpoint or export")
    if not (exported := is_onnx_directory(directory)) and provider != "cpu":
        raise UsageError(f"--provider {provider}: {directory} is a checkpoint, which PyTorch runs; export it first")
    if not (directory / MANIFEST).exists():
        raise ArtifactError(f"{directory}: has no {MANIFEST} to check it against; only finished output has one")
    files, problems = verify_directory(directory)
    if (directory / "config.json").exists():
        try:
            load_config(directory)
        except ArtifactError as error:
            problems.append(str(error))
    kernels = None
    if exported and not problems:
        # By name: export is a package above this one.
        chosen = importlib.import_module("export.runtime.session").kernels_of_directory(directory)
        kernels = str(chosen.name)
        output().print(str(chosen))
    for problem in problems:
        output().print(problem)
    number = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
    output().print(f"{directory}: {files} files checked, {number}")
    result = VerifyResult(ok=not problems, files=files, problems=problems, kernels=kernels)
    if problems:
        complaint = f"{directory}: {number}; copy or make it again"
        return replace(result, exit_code=ArtifactError.exit_code, complaint=complaint)
    if provider == "cpu":
        return result

    placement, found = importlib.import_module("export.parity.comparison").check_provider(directory, provider, threads)
    if placement is not None:
        output().print(str(placement))
    failures = found.failures()
    parity = ProviderParity(**found.figures(), passed=not failures, failures=failures)
    output().print(
        f"{provider} against the CPU: KL {parity.kl:.1e}, greedy choices agree in {parity.greedy_match:.1%}, "
        f"largest logit error {parity.max_abs_logit_error:.1e}"
    )
    return replace(
        result,
        ok=not failures,
        provider=provider,
        parity=parity,
        placement=None if placement is None else placement.to_dict(),
        exit_code=GateError.exit_code if failures else 0,
        complaint=f"{directory}: --provider {provider} computes something else ({failures[0]})" if failures else None,
    )
