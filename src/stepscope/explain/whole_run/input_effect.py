"""Steps that vary because their inputs do: time against the elements of the batch.

The first line goes through the medians of steps with about as many elements, so that stalls do not
bend it. Then steps far off the line are left out, and the line is drawn again through the rest.
Where a curve fits clearly better, as for attention over long sequences, steps are expected to
follow the curve.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.whole_run.block_medians import spread, staying_power
from stepscope.records.whole_run import InputEffect

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

_FEWEST = 24  # steps with known elements
_FEWEST_OFF = 5  # of them with another number of elements than the commonest
_LEAST_EXPLAINED = 0.3  # of the variance that steps have
_SURE = 4.0  # standard errors
_FAR = 4.0  # standard deviations off the line: a stall
_ROUNDS = 3
_GROUPS = 32
_MOST_STEPS = 20_000  # that the line is drawn through
_BENDS = 0.9  # a curve leaves at most this share of the line's variance


class _Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Times as a polynomial of elements over `unit`, the lowest power first."""

    unit: float
    line: Floats
    curve: Floats | None
    explained: float
    error: float  # of the line's slope


def find_input_effect(step_ns: Floats, elements: Floats) -> InputEffect | None:
    """None where the elements explain little. `elements` is 0 where it is not known."""
    return explain_by_inputs(step_ns, elements)[0]


def expected_by_inputs(step_ns: Floats, elements: Floats) -> Floats:
    """What a step with such a batch takes; the median where elements explain nothing or are not
    known. Steps that are long because their batch is long are no stalls."""
    return explain_by_inputs(step_ns, elements)[1]


def explain_by_inputs(step_ns: Floats, elements: Floats) -> tuple[InputEffect | None, Floats]:
    """Both at once: the line is drawn once."""
    fit = _fit(step_ns, elements)
    expected = np.full(len(step_ns), float(np.median(step_ns)) if len(step_ns) else 0.0)
    if fit is None:
        return None, expected
    return _describe(fit, elements), _follow(fit, elements, expected)


def _describe(fit: _Fit, elements: Floats) -> InputEffect:
    known = elements[elements > 0]
    slope, half = float(fit.line[1]), 1.96 * fit.error
    return InputEffect(
        explained=fit.explained,
        fixed_ms=float(fit.line[0]) / 1e6,
        per_element_ms=slope / fit.unit / 1e6,
        fewest=int(known.min()),
        most=int(known.max()),
        low_ms=(slope - half) / fit.unit / 1e6,
        high_ms=(slope + half) / fit.unit / 1e6,
    )


def _follow(fit: _Fit, elements: Floats, median: Floats) -> Floats:
    known = elements > 0
    powers = fit.line if fit.curve is None else fit.curve
    expected = median.copy()
    expected[known] = _polynomial(powers, elements[known] / fit.unit)
    # A line may cross zero before the shortest batch.
    clipped: Floats = np.maximum(expected, 0.01 * median)
    return clipped


def _fit(step_ns: Floats, elements: Floats) -> _Fit | None:
    places = _sample(np.flatnonzero(elements > 0))
    times, counts = step_ns[places], elements[places]
    if not _vary(counts):
        return None
    unit = float(counts.max())
    x = counts / unit
    line = _through_medians(x, times)
    near = np.ones(len(x), np.bool_)
    for _ in range(_ROUNDS):
        off = times - _polynomial(line, x)
        near = np.abs(off) <= max(_FAR * spread(off), 1e-3 * float(np.median(times)))
        if not _vary(counts[near]):
            return None
        line = _least_squares(x[near], times[near], 1)
    return _judge(x[near], times[near], line, unit)


def _judge(x: Floats, times: Floats, line: Floats, unit: float) -> _Fit | None:
    off = times - _polynomial(line, x)
    left, before = float(off.var()), float(times.var())
    explained = 1 - left / before if before else 0.0
    together = staying_power(off, 10 * spread(off) or 1.0)
    centred = x - x.mean()
    # Long steps vary more than short ones, so each counts with its own deviation (White 1980).
    error = math.sqrt(together * float((centred**2 * off**2).sum())) / float((centred**2).sum())
    if explained < _LEAST_EXPLAINED or line[1] <= _SURE * error:
        return None
    return _Fit(
        unit=unit, line=line, curve=_curve(x, times, left), explained=explained, error=error
    )


def _curve(x: Floats, times: Floats, left: float) -> Floats | None:
    """A parabola, if it fits clearly better and rises over all of the steps."""
    if len(np.unique(x)) < 4:
        return None
    curve = _least_squares(x, times, 2)
    rises = min(curve[1] + 2 * curve[2] * x.min(), curve[1] + 2 * curve[2] * x.max()) >= 0
    better = float((times - _polynomial(curve, x)).var()) < _BENDS * left
    return curve if rises and better else None


def _sample(places: NDArray[np.intp]) -> NDArray[np.intp]:
    """At random, as every n-th step may be one that stalls, but the same at every call."""
    if len(places) <= _MOST_STEPS:
        return places
    chosen = np.random.default_rng(0).choice(len(places), _MOST_STEPS, replace=False)
    return places[np.sort(chosen)]


def _vary(counts: Floats) -> bool:
    if len(counts) < _FEWEST:
        return False
    return int((counts != np.median(counts)).sum()) >= _FEWEST_OFF


def _through_medians(x: Floats, times: Floats) -> Floats:
    """A line through the median of each group of steps with about as many elements. Groups of
    equal elements stay together."""
    order = np.argsort(x, kind="stable")
    sorted_x, sorted_times = x[order], times[order]
    edges = np.unique(
        np.searchsorted(sorted_x, np.quantile(sorted_x, np.arange(_GROUPS) / _GROUPS))
    )
    groups = list(zip(edges.tolist(), [*edges[1:].tolist(), len(x)], strict=True))
    middle = np.array([sorted_x[start:end].mean() for start, end in groups])
    median = np.array([np.median(sorted_times[start:end]) for start, end in groups])
    weight = np.array([end - start for start, end in groups], np.float64)
    if len(groups) < 2:
        return _least_squares(x, times, 1)
    return _least_squares(middle, median, 1, weight)


def _least_squares(x: Floats, times: Floats, degree: int, weight: Floats | None = None) -> Floats:
    root = np.sqrt(weight) if weight is not None else np.ones(len(x))
    powers = np.vander(x, degree + 1, increasing=True) * root[:, None]
    return np.asarray(np.linalg.lstsq(powers, times * root, rcond=None)[0], np.float64)


def _polynomial(powers: Floats, x: Floats) -> Floats:
    return np.asarray(np.polynomial.polynomial.polyval(x, powers), np.float64)
