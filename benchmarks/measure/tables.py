"""What `bench` prints for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.console_tables import reliability_line
from benchmarks.labels import LIMIT_LABELS, MISSING, RATIOS, number, short_depth
from benchmarks.measure.process import QUIET_CORES
from benchmarks.measure.summary import decides
from benchmarks.spread import CONFIDENCE, coverage, rank

OUTCOMES = {True: "passed", False: "missed", None: "not measured"}


def print_bench(console: Console, result: Mapping[str, Any]) -> None:
    """Figures with their noise, the decode table, what was asked for besides, what is absent, and the budget."""
    console.print(
        f"{result['directory']}: {result['parameters']:,} parameters, {number(result['file_bytes'] / 1e6)} MB, "
        f"{result['runtime']}, {threads_line(result)}, {result['rounds']} fresh processes",
        markup=False,
    )
    columns = ("figure", "median", "unit", interval_label(result["rounds"]))
    console.print(table(columns, _figures(result), (0, 2)))
    if result["tpot_ms"]:
        headers = ("after tokens", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "tokens/s", "memory floor ms")
        console.print(table(headers, _depths(result), ()))
    else:
        console.print(f"No decoding depth fits the context of {result['context_length']} tokens.")
    _print_batches(console, result["batches"])
    _print_sustained(console, result.get("sustained"))
    _print_against(console, result)
    for name, reason in result["absent"].items():
        console.print(f"not measured: {name} ({reason})", markup=False, style="dim")
    if not result["clean"]:
        console.print(unclean_line(result), markup=False, style="bold yellow")
    print_budget(console, result["budget"])


def threads_line(result: Mapping[str, Any]) -> str:
    """How many threads, and which processors they are kept on."""
    cpus = result["cpus"]
    where = "not pinned" if cpus is None else f"pinned to {', '.join(map(str, cpus))}"
    return f"{result['threads']} threads ({where})"


def interval_label(rounds: int) -> str:
    """Heading of the interval's column: what it holds and how surely (see `benchmarks.spread.spread`)."""
    sure = 100 * coverage(rounds, rank(rounds)) if rounds > 1 else 0
    return f"interval of {rounds} rounds, {sure:.0f}% sure" if sure > 0 else "one round, no interval"


def unclean_line(result: Mapping[str, Any]) -> str:
    """Why a run does not count, in one loud line."""
    reasons = []
    unsteady = [name for name in result["noisy"] if decides(name)]
    if unsteady:
        reasons.append(f"the rounds differ by more than 5% in {', '.join(unsteady)}")
    peers = [name for name, one in result.get("against", {}).items() if one.get("steady") is False]
    if peers:
        reasons.append(f"the turns of {', '.join(peers)} do not agree or are too few")
    if result["other_cpu_cores"] > QUIET_CORES:
        reasons.append(f"other programs used up to {result['other_cpu_cores']:.1f} cores")
    if coverage(result["rounds"], rank(result["rounds"])) < CONFIDENCE:
        reasons.append(f"{result['rounds']} rounds are too few to tell")
    return f"NOISY, not a clean result: {'; '.join(reasons) or 'nothing was steady'}; repeat it on a quiet machine"


def _print_batches(console: Console, batches: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [
        (
            size,
            ", ".join(map(str, one["prompt_tokens"])),
            number(one["decode_tokens_per_s"]),
            number(one["step_ms"]["p50"]),
            number(one["step_ms"]["p95"]),
            number(one["peak_rss_bytes"] / 1e6),
        )
        for size, one in batches.items()
    ]
    if rows:
        headers = ("rows together", "prompt tokens", "tokens/s of all rows", "step p50 ms", "step p95 ms", "peak MB")
        console.print(table(headers, rows, ()))


def _print_sustained(console: Console, sustained: Mapping[str, Any] | None) -> None:
    """The first, the middle and the last window, and what was lost between them."""
    if sustained is None:
        return
    windows = sustained["windows"]
    rows = []
    for window in [windows[index] for index in sorted({0, len(windows) // 2, len(windows) - 1})]:
        sensors = (window["clock_mhz"], window["temperature_c"], window["joules_per_token"])
        cells = [MISSING if value is None else number(value) for value in sensors]
        rows.append((f"{window['start_s']:.0f}", number(window["tokens_per_s"]), *cells))
    headers = (f"{sustained['minutes']:g} minutes: from s", "tokens/s", "clock MHz", "degrees C", "J/token")
    console.print(table(headers, rows, ()))
    if sustained["throttling_percent"] is not None:
        word = "THROTTLED" if sustained["throttled"] else "sustained"
        lost = f"{sustained['throttling_percent']:.1f}%"
        console.print(f"{word}: the last of {len(windows)} windows is {lost} below the first")


def _print_against(console: Console, result: Mapping[str, Any]) -> None:
    """Each runtime's figures or why there are none, and ours against the best."""
    against = result.get("against", {})
    measured = {name: one for name, one in against.items() if one["status"] == "measured"}
    depths = list(next(iter(measured.values()))["ttft_ms"]) if measured else []
    rows = []
    for name, one in measured.items():
        rates = [number(one["decode_tokens_per_s"][depth]) for depth in depths]
        firsts = number(one["ttft_ms"][depths[-1]])
        label = name if one["steady"] else f"{name} (noisy)"
        rows.append((label, one["version"] or MISSING, *rates, firsts, number(one["peak_rss_bytes"] / 1e6)))
    if rows:
        speeds = [f"tokens/s after {depth}" for depth in depths]
        names = ("runtime", "version", *speeds, f"first token of {depths[-1]}, ms", "peak MB")
        console.print(table(names, rows, (0, 1)))
    for key, whose in RATIOS.items():
        for name, ratio in result.get(key, {}).items():
            console.print(
                f"ours / {whose}, {name}: {number(ratio['ratio'])} ({number(ratio['low'])} to {number(ratio['high'])}; "
                f"{ratio['peer']}; {ratio['better']} is better)",
                markup=False,
            )
    for name, one in against.items():
        if one["status"] != "measured":
            advice = f": {one['install']}" if "install" in one else ""
            console.print(f"{name}: {one['status']}{advice}", markup=False, style="yellow")


def print_budget(console: Console, budget: Mapping[str, Any]) -> None:
    """Each limit with the figure that decides it, what was measured here, and the verdict in one line."""
    rows = []
    for limit in budget["limits"]:
        here = budget["measured_here"][limit["name"]]
        rows.append(
            (
                LIMIT_LABELS[limit["name"]],
                _value(limit["value"], limit["unit"]),
                _value(limit["limit"], limit["unit"]),
                OUTCOMES[limit["passed"]],
                limit["source"] or MISSING,
                _value(here, limit["unit"]),
            )
        )
    headers = ("budget", "value", "allowed", "outcome", "from", "measured here")
    console.print(table(headers, rows, (0, 3, 4)))
    console.print(verdict_line(budget), markup=False, style="bold")
    if budget["decided_by"] == "prediction":
        console.print(reliability_line(budget["efficiency"]), markup=False)


def verdict_line(budget: Mapping[str, Any]) -> str:
    """The verdict in one line: which device, what was missed, what is not known."""
    missed = [_words(limit) for limit in budget["limits"] if limit["passed"] is False]
    unknown = [LIMIT_LABELS[limit["name"]].lower() for limit in budget["limits"] if limit["passed"] is None]
    text = f"{budget['device']}: " + (f"misses the budget: {', '.join(missed)}" if missed else "no limit missed")
    if unknown:
        text += f"; not measured: {', '.join(unknown)}"
    if depth := short_depth(budget):
        text += f"; time per token after {depth} tokens, all that the context has room for"
    if budget["decided_by"] == "prediction":
        text += " (speed and memory are predicted: this machine is not the device)"
    return text


def _words(limit: Mapping[str, Any]) -> str:
    label = LIMIT_LABELS[limit["name"]].lower()
    return f"{label} {number(limit['value'])} of {number(limit['limit'])} {limit['unit']}"


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    shown = [("load", "load_s", "s", 1.0)]
    shown += [(f"first token, prompt of {prompt}", f"ttft_ms.{prompt}", "ms", 1.0) for prompt in result["ttft_ms"]]
    shown.append((f"peak memory, {result['peak_rss_context_tokens']:,} tokens", "peak_rss_bytes", "MB", 1e6))
    if result["joules_per_token"] is not None:
        shown.append((f"energy of a token after {result['energy']['depth']}", "joules_per_token", "J", 1.0))
    rows = []
    for label, name, unit, scale in shown:
        key, _, part = name.partition(".")
        value = result[key][part] if part else result[key]
        interval = result["noise"][name]
        between = f"{number(interval['low'] / scale)} to {number(interval['high'] / scale)}"
        rows.append((label, number(value / scale), unit, between + (" (noisy)" if interval["noisy"] else "")))
    split = result["memory_split"]
    if split is not None:
        names = {"anonymous": "anonymous_bytes", "files": "file_bytes", "PSS": "pss_bytes", "USS": "uss_bytes"}
        rows.append(
            (
                "at the most seen: " + " / ".join(names),
                " / ".join(number(split[key] / 1e6) for key in names.values()),
                "MB",
                f"{split['samples']} samples",
            )
        )
    if result["cold_load_s"] is not None:
        rows.append(("load from a cold cache", number(result["cold_load_s"]), "s", ""))
    if result["prefill_tokens_per_s"] is not None:
        rows.append(("prefill", number(result["prefill_tokens_per_s"]), "tokens/s", ""))
    return rows


def _depths(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for depth, times in result["tpot_ms"].items():
        mark = " (noisy)" if f"tpot_ms.{depth}.p50" in result["noisy"] else ""
        cells = [number(times[name]) for name in ("p90", "p95", "p99")]
        floor = result["memory_floor"]["by_depth_ms"][depth]
        speed = number(result["decode_tokens_per_s"][depth])
        rows.append((depth, number(times["p50"]) + mark, *cells, speed, number(floor)))
    return rows


def _value(value: float | None, unit: str) -> str:
    return MISSING if value is None else f"{number(value)} {unit}"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int]) -> Table:
    """A plain table; the columns in `texts` are text, the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index in texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
