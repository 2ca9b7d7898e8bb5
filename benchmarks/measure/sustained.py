"""A run of minutes: does the speed of the first seconds last, or does heat or a power limit take it back?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure.energy import EnergyMeter, surroundings
from sportsllm.inference.decoder import Decoder

WINDOWS = 30
LEAST_WINDOW_S, MOST_WINDOW_S = 1.0, 30.0
READ_STEPS = 16
THROTTLED = 0.05
"""A last window slower than the first by more than this share is called throttled."""


@dataclass(frozen=True)
class Window:
    """A stretch of the run: from when (s), decoded tokens a second, clock, temperature, joules a token.

    Reading prompts in between is left out of the rate, not out of the time. None is what cannot be read.
    """

    start_s: float
    tokens_per_s: float
    tokens: int
    clock_mhz: float | None
    temperature_c: float | None
    joules_per_token: float | None


def window_seconds(minutes: float) -> float:
    """Length of one window: a thirtieth of the run, but 1 to 30 s."""
    return min(MOST_WINDOW_S, max(LEAST_WINDOW_S, 60 * minutes / WINDOWS))


def measure_sustained(decoder: Decoder, tokens: Sequence[int], specification: Mapping[str, Any]) -> dict[str, Any]:
    """Decode `steps` tokens after a prompt of `depth`, again and again for `minutes`.

    Args:
        decoder: what is run.
        tokens: prompt and steps are taken from it.
        specification: `minutes`, `depth`, `steps`, `warm_up_steps`, `cpus`.

    Returns:
        `windows` (see `Window`), `depth` and `energy_source`. A window has at least `window_seconds` of decoding, and
        none begins less than half of that before the end.
    """
    depth, seconds = int(specification["depth"]), 60 * float(specification["minutes"])
    room = depth + int(specification["warm_up_steps"]) + int(specification["steps"])
    length = window_seconds(float(specification["minutes"]))
    meter, windows = EnergyMeter(), list[Window]()
    decoder.prefill([tokens[:depth]], max_length=room)
    for token in tokens[depth:room]:
        decoder.step([token])
    started = time.perf_counter()
    while not windows or time.perf_counter() - started + length / 2 < seconds:
        windows.append(_window(decoder, tokens, (depth, room), (started, length), meter, specification.get("cpus")))
    return {"windows": [asdict(window) for window in windows], "depth": depth, "energy_source": meter.source}


def _window(
    decoder: Decoder,
    tokens: Sequence[int],
    span: tuple[int, int],
    clock: tuple[float, float],
    meter: EnergyMeter,
    cpus: Sequence[int] | None,
) -> Window:
    """One window; `span` is (depth, room) in tokens, `clock` is (start of the run, least decoding in a window) in s."""
    (depth, room), (run_started, length) = span, clock
    begin = time.perf_counter()
    busy, count = 0.0, 0
    joules: float | None = 0.0 if meter.source else None
    while busy < length:
        decoder.prefill([tokens[:depth]], max_length=room)
        before = _joules(meter)
        started = time.perf_counter()
        for index, token in enumerate(tokens[depth:room]):
            decoder.step([token])
            if joules is not None and index % READ_STEPS == 0:
                _joules(meter)  # where power is added up, it needs many readings
        count += room - depth
        busy += time.perf_counter() - started
        after = _joules(meter)
        joules = None if joules is None or before is None or after is None else joules + after - before
    now = surroundings(cpus)
    return Window(
        start_s=begin - run_started,
        tokens_per_s=count / busy,
        tokens=count,
        clock_mhz=now["clock_mhz"],
        temperature_c=now["temperature_c"],
        joules_per_token=None if joules is None else joules / count,
    )


def _joules(meter: EnergyMeter) -> float | None:
    try:
        return meter.joules() if meter.source else None
    except OSError:
        return None


def summarise_sustained(payload: Mapping[str, Any], minutes: float) -> dict[str, Any]:
    """The run's windows with its first against its last.

    Returns:
        `windows`, `depth`, `minutes`, `first_tokens_per_s`, `last_tokens_per_s`, `throttling_percent` = 100 *
        (1 - last / first), which noise makes a little negative at times, and `throttled`; the last two are None where
        there is one window only.
    """
    windows = payload["windows"]
    first, last = windows[0]["tokens_per_s"], windows[-1]["tokens_per_s"]
    several = len(windows) > 1
    return {
        "minutes": minutes,
        "depth": payload["depth"],
        "first_tokens_per_s": first,
        "last_tokens_per_s": last,
        "throttling_percent": 100 * (1 - last / first) if several else None,
        "throttled": 1 - last / first > THROTTLED if several else None,
        "windows": windows,
    }
