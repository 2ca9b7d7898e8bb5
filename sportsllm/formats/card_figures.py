"""The figures of a model card: quality on named text, speed and memory on a named machine. None is computed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sportsllm.errors import UsageError
from sportsllm.formats.lineage import Ancestor
from sportsllm.formats.words import markdown_table, of_text

_DEPTHS = ("32", "512")
_PROMPTS = ("128", "512")
Row = tuple[str, ...]


def is_bench(result: Mapping[str, Any]) -> bool:
    """Whether a result is one of `bench`."""
    return isinstance(result.get("tpot_ms"), Mapping)


def check_results(directory: Path, chain: Sequence[Ancestor], results: Mapping[Path, Mapping[str, Any]]) -> None:
    """Refuse results that say nothing about a directory or the models it was made from, by their files' names.

    Raises:
        UsageError: there is one.
    """
    known = {one.directory.resolve() for one in chain} | {directory.resolve()}
    for path, result in results.items():
        measured = result.get("directory")
        if not measured or not (is_bench(result) or "bits_per_byte" in result or "question_files" in result):
            raise UsageError(f"{path}: is no result of eval --json or bench --out; leave it out")
        if Path(measured).resolve() not in known:
            raise UsageError(f"{path}: measured {measured}, which is neither {directory} nor a model it was made from")
        if is_bench(result) and Path(measured).resolve() != directory.resolve():
            raise UsageError(f"{path}: is the speed of {measured}, not of {directory}; leave it out")


def quality(chain: Sequence[Ancestor], results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The section on quality; nothing where nothing was measured on named text."""
    measured = list(dict.fromkeys(row for result in results for row in _measured(result)))
    known = {row[0] for row in measured}
    measured = [row for row in _measured_by_training(chain) if row[0] not in known] + measured
    answered = [row for result in results for row in _answered(result)]
    parity = chain[-1].manifest.get("results", {}).get("parity")
    if not (measured or answered or parity):
        return
    yield "## Quality"
    if measured:
        yield "Bits per byte of held-out text; lower is better, and comparable between tokenizers."
        yield markdown_table(("model", "bits per byte", "text"), measured, (0, 2))
    if answered:
        yield markdown_table(("model", "right answers", "questions", "file"), answered, (0, 3))
    if parity:
        yield (
            f"Beside the checkpoint it was exported from: KL divergence {parity['kl']:.2g} nats a token, the same most "
            f"likely token in {parity['greedy_match']:.1%} of positions."
        )


def _measured_by_training(chain: Sequence[Ancestor]) -> list[Row]:
    """The models of the chain that were scored on the text that the nearest one was scored on."""
    scored = [(one, one.manifest.get("results", {}).get("valid_bits_per_byte")) for one in chain if one.manifest]
    found = [(one, value, _held_out(one.manifest)) for one, value in scored if value is not None]
    texts = [text for *_, text in found if text]
    return [(_name(one.directory), f"{value:.4f}", text) for one, value, text in found if text and text == texts[-1]]


def _held_out(manifest: Mapping[str, Any]) -> str | None:
    """The name of the text that a training scored a part of; None where the manifest names none."""
    settings = manifest.get("settings", {})
    if settings.get("valid"):
        return f"a part of {of_text(settings['valid'])}"
    return f"a part of {of_text(settings['corpus'])}, held out" if settings.get("corpus") else None


def _measured(result: Mapping[str, Any]) -> Iterator[Row]:
    """What a result of `eval` or `bench` says of a model, and of its teacher, on text that it names."""
    if not result.get("text"):
        return
    text = of_text(result["text"])
    for directory, key in (("teacher", "teacher_bits_per_byte"), ("directory", "bits_per_byte")):
        if result.get(key) is not None and result.get(directory):
            yield _name(Path(result[directory])), f"{result[key]:.4f}", text


def _answered(result: Mapping[str, Any]) -> Iterator[Row]:
    for path, asked in result.get("question_files", {}).items():
        yield _name(Path(result["directory"])), f"{asked['accuracy']:.1%}", f"{asked['questions']:,}", of_text(path)


def _name(directory: Path) -> str:
    return f"`{directory.name}`"


def speed(directory: Path, results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The section on speed and memory; nothing without a result of `bench`."""
    benches = [result for result in results if is_bench(result)]
    if not benches:
        return
    yield "## Speed and memory"
    headers = ["machine", *(f"first token of {n}, ms" for n in _PROMPTS)]
    headers += [*(f"per token after {n}, ms" for n in _DEPTHS), "peak memory, MB"]
    yield markdown_table(headers, [_speed_row(bench) for bench in benches], (0,))
    yield from (f"Measured with {_circumstances(bench)}." for bench in benches)
    yield from (line for bench in benches for line in _budget(bench))


def _speed_row(bench: Mapping[str, Any]) -> Row:
    peak = bench.get("peak_rss_bytes")
    steps = [bench["tpot_ms"].get(depth, {}).get("p50") for depth in _DEPTHS]
    times = [*(bench.get("ttft_ms", {}).get(prompt) for prompt in _PROMPTS), *steps]
    machine = bench.get("machine", {}).get("processor") or "not named"
    return (machine, *("" if time is None else f"{time:.3g}" for time in times), f"{peak / 1e6:,.0f}" if peak else "")


def _circumstances(bench: Mapping[str, Any]) -> str:
    parts = [f"{bench['threads']} threads"] if bench.get("threads") else []
    parts += [str(bench["runtime"])] if isinstance(bench.get("runtime"), str) else []
    parts += [str(bench["machine"]["measured_at"])] if bench.get("machine", {}).get("measured_at") else []
    return ", ".join(parts) + ("" if bench.get("clean", True) else "; other programs disturbed it")


def _budget(bench: Mapping[str, Any]) -> Iterator[str]:
    budget = bench.get("budget")
    if not budget:
        return
    missed = [limit["name"] for limit in budget["limits"] if limit["passed"] is False]
    outcome = f"misses {', '.join(missed)} of" if missed else "keeps every limit that is known of"
    how = ", by prediction" if budget.get("decided_by") == "prediction" else ""
    yield f"It {outcome} the budget of {budget['device']}{how}."
