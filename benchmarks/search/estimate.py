"""What a cut will cost, learnt from the cuts of this teacher that were recovered so far.

    loss(shape, tokens) = s * (tokens / all tokens)^-g * sum over dimensions of w_d * (-ln kept share_d)^e

in percent of the teacher's bits per byte. The usual weights w_d, and how far s, g, e and each w_d of another teacher
lie from them, are a prior; every recovery, however brief, is an observation. The most probable parameters are found by
Gauss-Newton, and their covariance at that point (Laplace's approximation) gives every estimate its error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from compress.pruning.shapes import Shape

Vector = npt.NDArray[np.float64]

# Percent at e = 1.5. Fitted to a teacher of 1M parameters cut and recovered on 5% of its tokens (docs/log.md): FFN
# 352 -> 192 +2.59%, 6 -> 4 layers +2.07%, both a little (256, 5) +1.36%, half +5.50%. Heads from one brief run; half
# of 8 experts +1.2%; hidden size and merged key/value heads are estimates.
_WEIGHTS = {"intermediate": 5.5, "layers": 8.0, "heads": 4.9, "hidden": 12.7, "kv_heads": 1.7, "experts": 2.1}
_NAMES = tuple(_WEIGHTS)
# Means and standard deviations of ln s, e, g and ln w_d / usual w_d. A teacher that was trained a thousand times longer
# loses ten times as much, and more evenly.
_MEANS = np.array([0.0, 1.5, 0.3, *[0.0] * len(_NAMES)])
_SPREADS = np.array([1.5, 0.5, 0.15, *[0.7] * len(_NAMES)])
_RUN_SPREAD, _SCORE_NOISE_PERCENT = 0.15, 0.2  # of one recovery beside another, and of scoring a short text
_LEAST_PERCENT = 0.05
_ITERATIONS = 40
_SURE_90_PERCENT = 1.645


@dataclass(frozen=True)
class Recovered:
    """A cut that was recovered: the rise of bits per byte over the teacher, in percent, before any rounding."""

    shape: Shape
    tokens: int
    loss_percent: float


class ShapeLosses:
    """Estimated losses of shapes, after a recovery on `tokens`."""

    def __init__(self, full: Shape, tokens: int, seen: Sequence[Recovered] = ()) -> None:
        """Learn from what was seen.

        Args:
            full: the teacher's shape.
            tokens: of the recovery that estimates are for.
            seen: other recoveries of the same teacher; the teacher itself says nothing and is left out.
        """
        self._full, self._tokens = full, tokens
        self._known: dict[Shape, float] = {}
        self._parameters, self._covariance = _MEANS, np.diag(_SPREADS**2)
        cuts = [one for one in seen if one.shape != full]
        if cuts:
            losses = np.array([max(one.loss_percent, _LEAST_PERCENT) for one in cuts])
            noise = np.hypot(_RUN_SPREAD, _SCORE_NOISE_PERCENT / losses)
            self._learn([(one.shape, one.tokens) for one in cuts], np.log(losses), noise)

    def percent(self, shape: Shape) -> float:
        """Expected rise of bits per byte over the teacher; 0 for the teacher's own shape."""
        if shape == self._full:
            return 0.0
        if shape not in self._known:
            self._known[shape] = math.exp(self._log_loss(self._parameters, shape, self._tokens)[0])
        return self._known[shape]

    def factor(self, shape: Shape) -> float:
        """How far off an estimate may be, either way, with 90% probability; 1 for the teacher's own shape."""
        if shape == self._full:
            return 1.0
        slope = self._log_loss(self._parameters, shape, self._tokens)[1]
        variance = float(slope @ self._covariance @ slope) + _RUN_SPREAD**2
        return math.exp(_SURE_90_PERCENT * math.sqrt(variance))

    def grown(self, tokens: int) -> float:
        """What is left of a loss after `tokens` when recovery goes on to the end, as a share."""
        return min(1.0, math.pow(self._tokens / tokens, -max(0.0, float(self._parameters[2]))))

    def _learn(self, cuts: Sequence[tuple[Shape, int]], wanted: Vector, noise: Vector) -> None:
        """Gauss-Newton with halved steps on the sum of squared residuals, the prior's included."""

        def objective(parameters: Vector) -> float:
            found = np.array([self._log_loss(parameters, *cut)[0] for cut in cuts])
            off = np.concatenate([(found - wanted) / noise, (parameters - _MEANS) / _SPREADS])
            return float(off @ off)

        best, least = self._parameters, objective(self._parameters)
        for _ in range(_ITERATIONS):
            rows = [self._log_loss(best, *cut) for cut in cuts]
            slopes = np.array([slope for _, slope in rows]) / noise[:, None]
            left = (wanted - np.array([value for value, _ in rows])) / noise
            precision = slopes.T @ slopes + np.diag(_SPREADS**-2)
            step = np.linalg.solve(precision, slopes.T @ left - (best - _MEANS) / _SPREADS**2)
            self._covariance = np.linalg.inv(precision)
            while np.abs(step).max() > 1e-6 and (value := objective(best + step)) > least:
                step = step / 2
            if np.abs(step).max() <= 1e-6:
                break
            best, least = best + step, value
        self._parameters = best

    def _log_loss(self, parameters: Vector, shape: Shape, tokens: int) -> tuple[float, Vector]:
        """ln of the loss, and its derivatives by the parameters."""
        log_scale, power, decay = parameters[:3]
        kept = _kept_shares(self._full, shape)
        cut = {name: -math.log(share) for name, share in kept.items() if share < 1}
        parts = np.zeros(len(_NAMES))
        logs = np.zeros(len(_NAMES))
        for name, amount in cut.items():
            place = _NAMES.index(name)
            logs[place] = math.log(amount)
            parts[place] = _WEIGHTS[name] * math.exp(parameters[3 + place]) * amount**power
        total, run = parts.sum(), math.log(tokens / self._tokens)
        slope = np.array([1.0, parts @ logs / total, -run, *(parts / total)])
        return float(log_scale + math.log(total) - decay * run), slope


def _kept_shares(full: Shape, shape: Shape) -> dict[str, float]:
    """Of each dimension. Query heads that are cut take their key/value heads along; merged ones count on their own."""
    kept, whole = asdict(shape), asdict(full)
    shares = {name: kept[name] / whole[name] if whole[name] else 1.0 for name in _NAMES}
    shares["kv_heads"] = min(1.0, shares["kv_heads"] / shares["heads"])
    return shares


def cut_dimensions(full: Shape, shape: Shape) -> set[str]:
    """The dimensions that a shape has less of."""
    return {name for name, share in _kept_shares(full, shape).items() if share < 1}


def probe_shapes(full: Shape, shapes: Sequence[Shape]) -> list[Shape]:
    """Cuts of one dimension each, to two thirds or as near as there is one: what recovering them costs is the most
    that a few short trainings can tell about all others.

    Args:
        full: the teacher's shape.
        shapes: those to choose from.
    """
    nearest: dict[str, tuple[float, Shape]] = {}
    for shape in shapes:
        cut = cut_dimensions(full, shape)
        if len(cut) == 1 and cut != {"kv_heads"}:
            (name,) = cut
            off = abs(math.log(1.5 * _kept_shares(full, shape)[name]))
            if name not in nearest or off < nearest[name][0]:
                nearest[name] = off, shape
    return [shape for _, shape in nearest.values()]
