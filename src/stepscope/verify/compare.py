"""Compare B with A: read both sides, drop the warm-up, and put the change, its interval, and
what to know about it into one record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.errors import NotCapturedError, UsageError
from stepscope.records.comparison import (
    Comparison,
    MedianStep,
    PhaseChange,
    RunSteps,
    Side,
    SlowSteps,
    StepsAre,
    Verdict,
)
from stepscope.records.explanation import Explanation
from stepscope.records.normal import NORMAL_95_PRECISE, median
from stepscope.records.prediction import StepBasis
from stepscope.text.figures import milliseconds, unsigned_percent
from stepscope.text.words import counted
from stepscope.trace.files import Progress
from stepscope.verify.change import (
    CONFIDENCE,
    FEW,
    POWER,
    Estimate,
    mean_difference,
    mean_ratio,
    mean_spread,
    mean_step,
    median_difference,
    median_ratio,
    quantile_ratio,
    typical_step,
    widen_for_starts,
)
from stepscope.verify.differences import (
    compare_traits,
    kernel_changes,
    operator_changes,
    part_changes,
)
from stepscope.verify.runs import (
    ComparedRun,
    SteadySteps,
    find_runs,
    find_steady_steps,
    profiled_run,
)
from stepscope.verify.spread import Floats, normal_quantile, quantile_spread
from stepscope.verify.steady import drift
from stepscope.verify.traits import SHAPES, describe_workload, differences

Explain = Callable[[str], Explanation]

_SURER = 1.31  # a 99% interval's reach over that of a 95% one
_PERCENTS = np.arange(101) / 100
_SLOW = 0.95  # quantile of the slow steps
_MOST_POINTS = 160  # of a run's steps, as drawn
_ENOUGH_FOR_SLOW = 100  # steps per run: five of them are slow
# Standard deviation of the median step from one start of a command to the next, assumed if each
# side is one run. docs/records/comparison.md says where it comes from.
BETWEEN_STARTS = 0.005
_OTHER_SHAPES = (
    "operators have other shapes in B. If its steps hold more or fewer samples, compare "
    "samples per second, not steps"
)


def compare(
    a: Sequence[str],
    b: Sequence[str],
    *,
    paired: bool = False,
    unit: str = "ms",
    column: str | None = None,
    between_starts: float = BETWEEN_STARTS,
    explain: bool = True,
    cache: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Each side is one run or several. Raises if the two sides cannot be compared."""
    sides = [
        [run for path in paths for run in find_runs(path, unit=unit, column=column)]
        for paths in (a, b)
    ]

    @functools.cache
    def explain_path(path: str) -> Explanation:
        from stepscope.explain.explain_job import explain_job

        return explain_job(path, cache=cache, progress=progress)

    steps_are, notes = _step_kind(sides, explain_path)
    if steps_are == "profiled":
        sides = [[profiled_run(run, explain_path(run.path)) for run in side] for side in sides]
    _check(sides, paired)
    both = _explain_both(sides, explain_path) if explain or steps_are == "profiled" else None
    every = (
        [[explain_path(run.path) for run in side] for side in sides]
        if steps_are == "profiled"
        else []
    )
    one_start = steps_are == "measured" and len(sides[0]) == len(sides[1]) == 1
    starts = between_starts if one_start else 0.0
    return _build_comparison(sides, steps_are, both, every, notes, paired=paired, starts=starts)


def _step_kind(
    sides: Sequence[Sequence[ComparedRun]], explain_path: Explain
) -> tuple[StepsAre, list[str]]:
    """Which steps are compared: profiled steps are compared with profiled ones only."""
    runs = [run for side in sides for run in side]
    notes = [note for run in runs for note in run.notes]
    profiled = [run for run in runs if run.steps_are == "profiled"]
    if not profiled:
        return ("listed" if any(run.steps_are == "listed" for run in runs) else "measured"), notes
    bare = next((run for run in runs if not run.has_trace), None)
    if bare is not None:
        for run in profiled:
            explain_path(run.path)  # raises first if the file is no trace at all
        raise UsageError(
            f"{profiled[0].path} has only profiled steps and {bare.path} only steps without "
            "the profiler. Their difference would be the profiler's cost. Capture both with "
            "stepscope run, or compare two traces"
        )
    if len(profiled) < len(runs):
        notes.append(
            f"{profiled[0].path} has only profiled steps, so the profiled steps of both sides "
            "are compared"
        )
    return "profiled", notes


def _check(sides: Sequence[Sequence[ComparedRun]], paired: bool) -> None:
    for run in (run for side in sides for run in side):
        if len(run.step_ms) < 2:
            raise NotCapturedError(
                f"{run.path} has one "
                f"{'profiled ' if run.steps_are == 'profiled' else ''}step. One step cannot "
                "show whether a change is noise. Record several steps"
            )
        if not (run.step_ms > 0).all():
            raise NotCapturedError(f"{run.path} has a step that takes no time")
    if paired and len(sides[0]) != len(sides[1]):
        raise UsageError(
            f"pairs need as many runs of A as of B, but A has {len(sides[0])} and B has "
            f"{len(sides[1])}"
        )


def _explain_both(
    sides: Sequence[Sequence[ComparedRun]], explain_path: Explain
) -> tuple[Explanation, Explanation] | None:
    """The last run with a trace on each side: `ab` records traces in its last pair."""
    traced = [[run for run in side if run.has_trace] for side in sides]
    if not all(traced):
        return None
    return explain_path(traced[0][-1].path), explain_path(traced[1][-1].path)


def _build_comparison(
    sides: Sequence[Sequence[ComparedRun]],
    steps_are: StepsAre,
    both: tuple[Explanation, Explanation] | None,
    profiled_runs: Sequence[Sequence[Explanation]],
    notes: list[str],
    *,
    paired: bool,
    starts: float,
) -> Comparison:
    paired = paired and len(sides[0]) > 1
    steady = [[_steady_steps(run) for run in side] for side in sides]
    steps = [[run.step_ms for run in side] for side in steady]
    basis: StepBasis = "median" if steps_are == "profiled" else "mean"
    within_runs = (mean_ratio if basis == "mean" else median_ratio)(*steps, paired=paired)
    ratio = widen_for_starts(within_runs, starts)
    a, b = (_side(runs, rest, basis) for runs, rest in zip(sides, steady, strict=True))
    corrected = correct_sides((a, b), profiled_runs, ratio) if profiled_runs else None
    profiled = None
    if corrected is not None:
        profiled = _as_pair(a.ms, b.ms, ratio)
        within_runs, ((a, b), ratio) = corrected[1], corrected
    median = _median_step(steps, paired, starts) if basis == "mean" else None
    last = (sides[0][-1], sides[1][-1])
    config = differences(last[0].facts, last[1].facts, both)
    phases = _phases(steady, paired, starts)
    stalls = _stalls(steady, paired)
    explanations = both or (None, None)
    if any(row.name == SHAPES for row in config):
        notes.append(_OTHER_SHAPES)
    return Comparison(
        a_ms=a.ms,
        b_ms=b.ms,
        change=_change(ratio.value),
        low=_change(ratio.low),
        high=_change(ratio.high),
        confidence=CONFIDENCE,
        verdict=_decide(ratio, median),
        smallest_detectable=_change(ratio.smallest),
        steps_low=_change(within_runs.low),
        steps_high=_change(within_runs.high),
        between_starts=starts or None,
        steps_are=steps_are,
        paired=paired,
        a=a,
        b=b,
        basis=basis,
        median=median,
        profiled=profiled,
        slow_steps=_slow_steps(steps, paired, starts),
        phases=phases,
        stalls=stalls,
        rest=_rest(a, b, ratio, (*phases, *stalls)) if phases else None,
        budget=part_changes(
            both, (a, b), stalls, as_recorded=steps_are == "profiled" and profiled is None
        )
        if both
        else (),
        kernels=kernel_changes(*both) if both else (),
        operators=operator_changes(*both) if both else (),
        a_peak_bytes=_peak(sides[0]),
        b_peak_bytes=_peak(sides[1]),
        config=config,
        workload=describe_workload(last[0].facts, explanations[0]),
        evidence=compare_traits(
            (last[0].facts, explanations[0]),
            (last[1].facts, explanations[1]),
            (*phases, *stalls),
            a.ms,
        ),
        notes=(*notes, *notes_on(a, b, steps_are, starts, both, corrected is not None)),
    )


def _change(logarithm: float) -> float:
    """B / A - 1 from ln(B / A), which two steps may leave without an upper end."""
    return math.expm1(min(logarithm, 700.0))


def _decide(ratio: Estimate, median: MedianStep | None) -> Verdict:
    """Decide by the step of record. Where stalls leave its mean open, the typical step decides, if
    it is sure at 99% and the mean does not contradict it."""
    verdict = _verdict(ratio)
    if verdict != "no difference seen" or median is None:
        return verdict
    change, low, high = (math.log1p(x) for x in (median.change, median.low, median.high))
    sure = change - _SURER * (change - low) > 0 or change + _SURER * (high - change) < 0
    agrees = ratio.low <= change <= ratio.high and ratio.value * change > 0
    return median.verdict if sure and agrees else verdict


def _verdict(ratio: Estimate) -> Verdict:
    if ratio.high < 0:
        return "faster"
    return "slower" if ratio.low > 0 else "no difference seen"


def _steady_steps(run: ComparedRun) -> SteadySteps:
    if run.columns is None:
        return SteadySteps(warm_up=0, step_ms=run.step_ms)
    return find_steady_steps(run.columns)


def _median_step(steps: Sequence[Sequence[Floats]], paired: bool, starts: float) -> MedianStep:
    ratio = widen_for_starts(median_ratio(steps[0], steps[1], paired=paired), starts)
    return _as_pair(typical_step(steps[0])[0], typical_step(steps[1])[0], ratio)


def _as_pair(a_ms: float, b_ms: float, ratio: Estimate) -> MedianStep:
    return MedianStep(
        a_ms=a_ms,
        b_ms=b_ms,
        change=_change(ratio.value),
        low=_change(ratio.low),
        high=_change(ratio.high),
        verdict=_verdict(ratio),
    )


def _side(runs: Sequence[ComparedRun], steady: Sequence[SteadySteps], basis: StepBasis) -> Side:
    steps = [run.step_ms for run in steady]
    is_mean = basis == "mean"
    ms, low, high = mean_step(steps) if is_mean else typical_step(steps)
    return Side(
        ms=ms,
        low_ms=low,
        high_ms=high,
        remedies=tuple(runs[-1].facts.get("remedies", ())),
        quantiles_ms=tuple(np.quantile(np.concatenate(steps), _PERCENTS).tolist()),
        runs=tuple(
            RunSteps(
                path=run.path,
                steps=len(rest.step_ms),
                warm_up=rest.warm_up,
                median_ms=median(rest.step_ms),
                mean_ms=float(rest.step_ms.mean()),
                effective_steps=(mean_spread if is_mean else quantile_spread)(
                    rest.step_ms
                ).effective,
                rank=run.rank,
                drift=drift(rest.step_ms),
                trail_ms=_trail(rest.step_ms),
            )
            for run, rest in zip(runs, steady, strict=True)
        ),
    )


def _trail(steps: Floats) -> tuple[float, ...]:
    """The steps in order; a long run becomes medians of equal stretches."""
    parts = np.array_split(steps, min(len(steps), _MOST_POINTS))
    return tuple(median(part) for part in parts)


def _slow_steps(steps: Sequence[Sequence[Floats]], paired: bool, starts: float) -> SlowSteps | None:
    if min(len(run) for side in steps for run in side) < _ENOUGH_FOR_SLOW:
        return None
    ratio = widen_for_starts(quantile_ratio(steps[0], steps[1], _SLOW, paired=paired), starts)
    a, b = (
        float(np.exp(np.mean([np.log(np.quantile(run, _SLOW)) for run in side]))) for side in steps
    )
    return SlowSteps(
        a_ms=a,
        b_ms=b,
        change=_change(ratio.value),
        low=_change(ratio.low),
        high=_change(ratio.high),
    )


def _phases(
    steady: Sequence[Sequence[SteadySteps]], paired: bool, starts: float
) -> tuple[PhaseChange, ...]:
    """The phases that every run has and that take any time."""
    runs = [run for side in steady for run in side]
    names = [name for name in runs[0].phases_ms if all(name in run.phases_ms for run in runs)]
    out = []
    for name in names:
        a, b = ([run.phases_ms[name] for run in side] for side in steady)
        medians = [float(np.mean([median(run) for run in side])) for side in (a, b)]
        if not any(medians):
            continue
        difference = median_difference(a, b, paired=paired)
        difference = widen_for_starts(difference, starts, max(medians))
        out.append(
            PhaseChange(
                id=name,
                a_ms=medians[0],
                b_ms=medians[1],
                change_ms=difference.value,
                low_ms=difference.low,
                high_ms=difference.high,
            )
        )
    return tuple(out)


def _stalls(steady: Sequence[Sequence[SteadySteps]], paired: bool) -> tuple[PhaseChange, ...]:
    """Return what stalls of each cause add to the mean step; a cause without any on both sides is
    left out. Starts are not counted: how long a stall takes says nothing about how fast a start is.
    """
    causes = dict.fromkeys(cause for side in steady for run in side for cause in run.stalls_ms)
    rows = []
    for cause in causes:
        a, b = (
            [run.stalls_ms.get(cause, np.zeros(len(run.step_ms))) for run in side]
            for side in steady
        )
        means = [float(np.mean([run.mean() for run in side])) for side in (a, b)]
        difference = mean_difference(a, b, paired=paired)
        rows.append(
            PhaseChange(
                id=f"stall_{cause}",
                a_ms=means[0],
                b_ms=means[1],
                change_ms=means[1] - means[0],
                low_ms=difference.low,
                high_ms=difference.high,
            )
        )
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ms)))


def _rest(a: Side, b: Side, ratio: Estimate, phases: Sequence[PhaseChange]) -> PhaseChange:
    """The step less its phases' medians and its stalls, so that all rows add up to B - A exactly.

    It is as uncertain as the step and the rows together.
    """
    change = (b.ms - a.ms) - sum(row.change_ms for row in phases)
    halves = [(row.high_ms - row.low_ms) / 2 for row in phases]
    reach = math.hypot(a.ms * (_change(ratio.high) - _change(ratio.low)) / 2, *halves)
    return PhaseChange(
        id="rest",
        a_ms=a.ms - sum(row.a_ms for row in phases),
        b_ms=b.ms - sum(row.b_ms for row in phases),
        change_ms=change,
        low_ms=change - reach,
        high_ms=change + reach,
    )


def _peak(runs: Sequence[ComparedRun]) -> int | None:
    return max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None)


# Traces compared by the step that `explain` gives: without the profiler's overhead.

_SMALLEST_OVER_REACH = (
    NORMAL_95_PRECISE + normal_quantile(POWER)
) / NORMAL_95_PRECISE  # found 4 times of 5


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
    """Return, as `explain` does, the step of the slowest rank."""
    slowest = max(explanation.ranks, key=lambda rank: rank.budget.step_ms)
    step, value = slowest.step_ms, explanation.budget.step_ms
    if explanation.budget.basis != "corrected" or not value or not step.low or not step.high:
        return None
    return _LogStep(math.log(value), max(0.0, math.log(step.high / step.low) / 2))


def _with_step(side: Side, step: _LogStep) -> Side:
    low, high = math.exp(step.value - step.reach), math.exp(step.value + step.reach)
    return replace(side, ms=math.exp(step.value), low_ms=low, high_ms=high)


# What to know about a comparison: few steps, the profiler's overhead, drift, single runs.

FEWEST_STEADY = 100  # with fewer steps the interval may be too narrow
_BASES = {
    "corrected": "estimated",
    "measured": "measured",
    "cycles": "as recorded",
    "window": "whole window",
}


def notes_on(
    a: Side,
    b: Side,
    steps_are: StepsAre,
    starts: float,
    both: tuple[Explanation, Explanation] | None,
    corrected: bool,
) -> list[str]:
    notes = []
    if corrected:
        notes.append(
            f"the profiler's cost is subtracted from {_steps(a)} and {_steps(b)} profiled "
            "steps, so both steps are estimates. stepscope run measures steps without the "
            "profiler"
        )
    elif steps_are == "profiled":
        notes.append(
            f"these are only {_steps(a)} and {_steps(b)} profiled steps, and the profiler "
            "slows the CPU. stepscope run measures steps without it"
        )
        notes += _overhead_notes(*both) if both else []
    elif starts:
        notes.append(
            "one run on each side does not show how much two starts of one command differ. A "
            f"standard deviation of {unsigned_percent(starts)} is assumed (--between-starts). "
            "stepscope ab measures it"
        )
    elif len(a.runs) == len(b.runs) == 1:
        notes.append(
            "one run on each side does not show how much two starts of one command differ. "
            "The interval leaves this out"
        )
    return [*notes, *_side_notes("A", a), *_side_notes("B", b)]


def _overhead_notes(*both: Explanation) -> list[str]:
    """The steps that `explain` reports for these traces, if they are not the verdict's."""
    budgets = [explanation.budget for explanation in both]
    if all(budget.basis == "cycles" for budget in budgets):
        return []
    a, b = (f"{milliseconds(budget.step_ms)} ({_BASES[budget.basis]})" for budget in budgets)
    return [
        f"without the profiler's cost, stepscope explain gives {a} for A's step and {b} for "
        "B's. The verdict and the parts here are of profiled steps"
    ]


def _steps(side: Side) -> int:
    return sum(run.steps for run in side.runs)


def _side_notes(name: str, side: Side) -> list[str]:
    notes = []
    for number, run in enumerate(side.runs, 1):
        if run.drift is not None:
            whose = name if len(side.runs) == 1 else f"{name}'s run {number}"
            size, way = unsigned_percent(run.drift), "slower" if run.drift > 0 else "faster"
            notes.append(f"{whose} drifts: its second half is {size} {way} than its first half")
    if len(side.runs) == 1 and (steps := side.runs[0].steps) < FEWEST_STEADY:
        caution = (
            "the interval assumes independent steps, but neighbouring steps are seldom independent"
            if steps < FEW
            else "if slow and fast periods alternate, the interval is too narrow"
        )
        notes.append(f"{name} has only {counted(steps, 'step')}: {caution}")
    return notes
