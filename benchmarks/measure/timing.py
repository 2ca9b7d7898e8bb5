"""How a decoder is timed, in ms: prompts until their times agree, single steps after a prompt, minutes of decoding."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure.energy import EnergyMeter, read_sensors
from sportsllm.inference.decoder import Decoder

STABLE_WITHIN = 0.10  # warm-up ends when the last three times agree this well
WARM_UP_CALLS = 8
WARM_UP_S = 1.5
LONGEST_S = 4.0  # a slow model gets fewer repeats rather than more time than this for one figure
LEAST_STEPS = 16
MOST_SWEEPS = 4
ENERGY_S = 2.0  # counters move in steps of milliseconds, so a figure needs a while
METER_EVERY_STEPS = 8  # a power sensor is integrated over time and needs many readings
WINDOWS = 30
LEAST_WINDOW_S, MOST_WINDOW_S = 1.0, 30.0
StepSweeps = list[list[float]]
THROTTLED = 0.05  # a last window slower than the first by more than this share is called throttled


def draw_tokens(decoder: Decoder, seed: int) -> list[int]:
    """A context full of token ids from a seeded generator."""
    config = decoder.config
    return list(map(int, np.random.default_rng(seed).integers(0, config.vocab_size, config.max_position_embeddings)))


def milliseconds(work: Callable[[], Any]) -> float:
    """How long one call of `work` takes."""
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e6


def time_prompt(decoder: Decoder, tokens: Sequence[int], prompt: int, specification: Mapping[str, Any]) -> list[float]:
    """Times to read the first `prompt` tokens, `repeats` or more until `seconds_per_figure` are over, warmed up."""
    room = min(prompt + specification["steps"], len(tokens))
    read_prompt = functools.partial(decoder.prefill, [tokens[:prompt]], max_length=room)
    warm: list[float] = []
    started = time.perf_counter()
    while len(warm) < WARM_UP_CALLS and not (warm and time.perf_counter() - started > WARM_UP_S):
        warm.append(milliseconds(read_prompt))
        if len(warm) >= 3 and max(warm[-3:]) <= (1 + STABLE_WITHIN) * min(warm[-3:]):
            break
    samples: list[float] = []
    repeats, seconds, started = specification["repeats"], specification["seconds_per_figure"], time.perf_counter()
    while len(samples) < repeats or time.perf_counter() - started < seconds:
        samples.append(milliseconds(read_prompt))
        if len(samples) > 1 and time.perf_counter() - started > LONGEST_S:
            break
    return samples


class Window(NamedTuple):
    """Steps around a depth: a prompt, steps to warm up, and timed steps whose mean position is the depth."""

    prompt: int
    warm_up: int
    steps: int


def window_around(depth: int, warm_up: int, steps: int) -> Window:
    """At most `steps` timed steps centred on `depth` tokens after at most `warm_up` untimed ones.

    At a depth of 32 these are 32 steps, at positions 16 to 47, so that the figure is that of its depth.
    """
    steps = max(1, min(steps, depth))
    first = depth - steps // 2
    warm_up = min(warm_up, first // 2)
    return Window(max(1, first - warm_up), warm_up, steps)


def time_depth(decoder: Decoder, tokens: Sequence[int], depth: int, specification: Mapping[str, Any]) -> StepSweeps:
    """Times of single steps at `depth` tokens, in ms; see `window_around`."""
    window = window_around(depth, specification["warm_up_steps"], specification["steps"])
    own = {"warm_up_steps": window.warm_up, "steps": window.steps}
    return time_steps(decoder, tokens, [window.prompt], {**specification, **own})


def time_steps(
    decoder: Decoder, tokens: Sequence[int], lengths: Sequence[int], specification: Mapping[str, Any]
) -> StepSweeps:
    """Times of single steps after a prompt of `lengths` tokens for each row, by sweep.

    Prompts are the beginnings of `tokens`, the steps read what follows the longest; the first ones only warm up.
    """
    warm_up, steps, seconds = (specification[key] for key in ("warm_up_steps", "steps", "seconds_per_figure"))
    longest, rows = max(lengths), [tokens[:length] for length in lengths]
    room = longest + warm_up + steps
    sweeps: StepSweeps = []
    started = time.perf_counter()
    most = MOST_SWEEPS * max(1, 128 // max(1, steps))  # short windows are swept more often
    while not sweeps or (len(sweeps) < most and time.perf_counter() - started < seconds):
        decoder.prefill(rows, max_length=room)
        for token in tokens[longest : longest + warm_up]:
            decoder.step([token] * len(rows))
        sweeps.append([])
        sweep_started = time.perf_counter()
        for token in tokens[longest + warm_up : room]:
            sweeps[-1].append(milliseconds(functools.partial(decoder.step, [token] * len(rows))))
            if len(sweeps[-1]) >= LEAST_STEPS and time.perf_counter() - sweep_started > LONGEST_S:
                break
    return sweeps


def decode_for(
    decoder: Decoder, tokens: Sequence[int], depth: int, room: int, least_s: float, meter: EnergyMeter
) -> tuple[int, float, float | None]:
    """Decode from `depth` to `room` tokens again and again, once at least and for `least_s` seconds of decoding.

    Returns tokens, seconds and joules (None where the meter reads nothing) of the steps, the prompts left out.
    """
    count, seconds = 0, 0.0
    joules: float | None = 0.0
    while not count or seconds < least_s:
        decoder.prefill([tokens[:depth]], max_length=room)
        before, started = _joules(meter), time.perf_counter()
        for index, token in enumerate(tokens[depth:room]):
            decoder.step([token])
            if index % METER_EVERY_STEPS == 0:
                _joules(meter)
        seconds += time.perf_counter() - started
        count += room - depth
        after = _joules(meter)
        joules = None if joules is None or before is None or after is None else joules + after - before
    return count, seconds, joules


def _joules(meter: EnergyMeter) -> float | None:
    """The meter's sum; None without one. A meter that fails keeps its reason and is not asked again."""
    if meter.source is None:
        return None
    try:
        return meter.joules()
    except OSError as error:
        meter.source, meter.reason = None, str(error)
        return None


def measure_energy(decoder: Decoder, tokens: Sequence[int], depth: int, steps: int) -> dict[str, Any]:
    """Joules of one token at `depth`, the machine's idle share included; or under `absent` why not."""
    meter = EnergyMeter()
    source = meter.source
    if source is None:
        return {"absent": meter.reason}
    if not depth:
        return {"absent": "no decoding depth fits the context"}
    count, seconds, joules = decode_for(decoder, tokens, depth, depth + steps, ENERGY_S, meter)
    if joules is None:
        return {"absent": meter.reason}
    figures = {"joules_per_token": joules / count, "watts": joules / seconds}
    return {**figures, "depth": depth, "tokens": count, "source": source}


def window_seconds(minutes: float) -> float:
    """Length of one window: a thirtieth of the run, but 1 to 30 s."""
    return min(MOST_WINDOW_S, max(LEAST_WINDOW_S, 60 * minutes / WINDOWS))


def measure_sustained(decoder: Decoder, tokens: Sequence[int], specification: Mapping[str, Any]) -> dict[str, Any]:
    """Decode after a prompt of `depth`, again and again for `minutes`: speed and sensors by window.

    A window has at least `window_seconds` of decoding, and none begins less than half of that before the end.
    """
    depth, minutes = specification["depth"], specification["minutes"]
    room = depth + specification["warm_up_steps"] + specification["steps"]
    length, meter = window_seconds(minutes), EnergyMeter()
    windows, source = list[dict[str, Any]](), meter.source
    decode_for(decoder, tokens, depth, room, 0.0, meter)  # warm-up
    started = time.perf_counter()
    while not windows or time.perf_counter() - started + length / 2 < 60 * minutes:
        begin = time.perf_counter() - started
        count, busy, joules = decode_for(decoder, tokens, depth, room, length, meter)
        now = read_sensors(specification.get("cpus"))
        windows.append(
            {
                "start_s": begin,
                "tokens_per_s": count / busy,
                "tokens": count,
                "clock_mhz": now["clock_mhz"],
                "temperature_c": now["temperature_c"],
                "joules_per_token": None if joules is None else joules / count,
            }
        )
    return {"windows": windows, "depth": depth, "energy_source": source}


def summarise_sustained(payload: Mapping[str, Any], minutes: float) -> dict[str, Any]:
    """The run's windows, and its last against its first; `throttling` is None where there is one window only."""
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
