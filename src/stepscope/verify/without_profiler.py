"""Traces compared by the step that `explain` gives: without the profiler's overhead."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from stepscope.verify.change import Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.comparison import Side
    from stepscope.records.explanation import Explanation

_SMALLEST_OVER_REACH = (1.959964 + 0.841621) / 1.959964  # as in change.py: found 4 times of 5


class _LogStep(NamedTuple):
    """The logarithm of a side's step in ms, and the reach of its 95% interval."""

    value: float
    reach: float


def correct_sides(
    sides: tuple[Side, Side], explanations: Sequence[Sequence[Explanation]], profiled: Estimate
) -> tuple[tuple[Side, Side], Estimate] | None:
    """Both sides without the profiler's overhead, and the logarithm of B / A.

    None unless every trace shows that overhead: an estimate is compared with no measurement. The
    interval holds the doubt about each side's correction, and how much the profiled steps vary.
    """
    steps = [_side_step(runs) for runs in explanations]
    a, b = steps
    if a is None or b is None:
        return None
    value = b.value - a.value
    low = math.hypot(a.reach, b.reach, profiled.value - profiled.low)
    high = math.hypot(a.reach, b.reach, profiled.high - profiled.value)
    ratio = Estimate(
        value=value,
        low=value - low,
        high=value + high,
        smallest=math.hypot(_SMALLEST_OVER_REACH * math.hypot(a.reach, b.reach), profiled.smallest),
    )
    return (_with_step(sides[0], a), _with_step(sides[1], b)), ratio


def _side_step(runs: Sequence[Explanation]) -> _LogStep | None:
    """The geometric mean of the runs' steps."""
    found = [_step(run) for run in runs]
    steps = [step for step in found if step is not None]
    if len(steps) < len(found):
        return None
    return _LogStep(
        sum(step.value for step in steps) / len(steps),
        math.hypot(*(step.reach for step in steps)) / len(steps),
    )


def _step(explanation: Explanation) -> _LogStep | None:
    """As in `explain`: the step of the slowest rank."""
    slowest = max(explanation.ranks, key=lambda rank: rank.budget.step_ms)
    step, value = slowest.step_ms, explanation.budget.step_ms
    if explanation.budget.basis != "corrected" or not value or not step.low or not step.high:
        return None
    return _LogStep(math.log(value), max(0.0, math.log(step.high / step.low) / 2))


def _with_step(side: Side, step: _LogStep) -> Side:
    low, high = math.exp(step.value - step.reach), math.exp(step.value + step.reach)
    return replace(side, ms=math.exp(step.value), low_ms=low, high_ms=high)
