"""B against A: reads both sides, drops warm-up, and puts the change, its interval and what moved
into one record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepscope.errors import NotCapturedError, UsageError
from stepscope.records.comparison import (
    Comparison,
    PhaseChange,
    RunSteps,
    Side,
    SlowSteps,
)
from stepscope.records.words import counted
from stepscope.verify.change import (
    CONFIDENCE,
    FEW,
    allow_for_starts,
    median_difference,
    median_ratio,
    quantile_ratio,
    typical,
)
from stepscope.verify.differences import kernel_changes, operator_changes, part_changes
from stepscope.verify.evidence import compare_traits
from stepscope.verify.runs import find_runs, profiled_run
from stepscope.verify.spread import quantile_spread
from stepscope.verify.steady import drift, warm_up
from stepscope.verify.workload import SHAPES, describe_workload, differences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.records.comparison import StepsAre, Verdict
    from stepscope.records.explanation import Explanation
    from stepscope.trace.files import Progress
    from stepscope.verify.change import Estimate
    from stepscope.verify.runs import ComparedRun

    Floats = NDArray[np.float64]

_PERCENTS = np.arange(101) / 100
_SLOW = 0.95
_MOST_POINTS = 160  # of a run's trail
_ENOUGH_FOR_SLOW = 100  # steps of every run: five of them are the slow ones
FEWEST_STEADY = 100  # with fewer steps the interval may be too narrow
# What the median step changes from one start of a command to the next, as a standard deviation,
# where it cannot be seen: one run on each side. docs/compare.md says where it comes from.
BETWEEN_STARTS = 0.005
_BASES = {
    "corrected": "estimated",
    "measured": "measured",
    "cycles": "as recorded",
    "window": "whole window",
}
_OTHER_SHAPES = (
    "shapes of operators differ: where a step of B holds more or fewer samples, compare "
    "samples a second, not steps"
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
    """Each side one run or several. Raises where the two sides cannot be compared."""
    sides = [
        [run for path in paths for run in find_runs(path, unit=unit, column=column)]
        for paths in (a, b)
    ]
    explained = _Explained(cache, progress)
    steps_are, notes = _same_kind(sides, explained)
    if steps_are == "profiled":
        sides = [[profiled_run(run, explained(run)) for run in side] for side in sides]
    _check(sides, paired)
    both = _explain_both(sides, explained) if explain or steps_are == "profiled" else None
    unseen = steps_are == "measured" and len(sides[0]) == len(sides[1]) == 1
    starts = between_starts if unseen else 0.0
    return _compared(sides, steps_are, both, notes, paired=paired, starts=starts)


class _Explained:
    """Explanations by path, each made once."""

    def __init__(self, cache: bool, progress: Progress | None) -> None:
        self._known: dict[str, Explanation] = {}
        self._cache, self._progress = cache, progress

    def __call__(self, run: ComparedRun) -> Explanation:
        if run.path not in self._known:
            from stepscope.explain.explain_job import explain_job

            self._known[run.path] = explain_job(
                run.path, cache=self._cache, progress=self._progress
            )
        return self._known[run.path]


def _same_kind(
    sides: Sequence[Sequence[ComparedRun]], explained: _Explained
) -> tuple[StepsAre, list[str]]:
    """Profiled steps are compared with profiled ones only."""
    runs = [run for side in sides for run in side]
    notes = [note for run in runs for note in run.notes]
    profiled = [run for run in runs if run.steps_are == "profiled"]
    if not profiled:
        return ("listed" if any(run.steps_are == "listed" for run in runs) else "measured"), notes
    bare = next((run for run in runs if not run.has_trace), None)
    if bare is not None:
        for run in profiled:
            explained(run)  # what is no trace at all is said first
        raise UsageError(
            f"{profiled[0].path} has only profiled steps and {bare.path} only steps without the "
            "profiler, which slows what it records: the difference would be the profiler's. "
            "Capture both with stepscope run, or compare two traces"
        )
    if len(profiled) < len(runs):
        notes.append(
            f"{profiled[0].path} has only profiled steps, so the profiled steps of both sides are "
            "compared"
        )
    return "profiled", notes


def _check(sides: Sequence[Sequence[ComparedRun]], paired: bool) -> None:
    for run in (run for side in sides for run in side):
        if len(run.step_ms) < 2:
            raise NotCapturedError(
                f"{run.path} has one {'profiled ' if run.steps_are == 'profiled' else ''}step: "
                "nothing tells a change from noise. Record several steps"
            )
        if not (run.step_ms > 0).all():
            raise NotCapturedError(f"{run.path} has a step that takes no time")
    if paired and len(sides[0]) != len(sides[1]):
        raise UsageError(
            f"pairs need as many runs of A as of B: there are {len(sides[0])} and {len(sides[1])}"
        )


def _explain_both(
    sides: Sequence[Sequence[ComparedRun]], explained: _Explained
) -> tuple[Explanation, Explanation] | None:
    """The last run with a trace on each side: `ab` records one in its last pair."""
    traced = [[run for run in side if run.has_trace] for side in sides]
    if not all(traced):
        return None
    return explained(traced[0][-1]), explained(traced[1][-1])


def _compared(
    sides: Sequence[Sequence[ComparedRun]],
    steps_are: StepsAre,
    both: tuple[Explanation, Explanation] | None,
    notes: list[str],
    *,
    paired: bool,
    starts: float,
) -> Comparison:
    paired = paired and len(sides[0]) > 1
    dropped = [[0 if steps_are == "profiled" else warm_up(r.step_ms) for r in s] for s in sides]
    steps = [
        [run.step_ms[first:] for run, first in zip(side, firsts, strict=True)]
        for side, firsts in zip(sides, dropped, strict=True)
    ]
    of_steps = median_ratio(*steps, paired=paired)
    found = allow_for_starts(of_steps, starts)
    a, b = (
        _side(runs, firsts, kept) for runs, firsts, kept in zip(sides, dropped, steps, strict=True)
    )
    last = (sides[0][-1], sides[1][-1])
    config = differences(last[0].facts, last[1].facts, both)
    phases = _phases(sides, dropped, paired, starts)
    explained = both or (None, None)
    if any(row.name == SHAPES for row in config):
        notes.append(_OTHER_SHAPES)
    return Comparison(
        a_ms=a.ms,
        b_ms=b.ms,
        change=_share(found.value),
        low=_share(found.low),
        high=_share(found.high),
        confidence=CONFIDENCE,
        verdict=_verdict(found),
        smallest_detectable=_share(found.smallest),
        steps_low=_share(of_steps.low),
        steps_high=_share(of_steps.high),
        between_starts=starts or None,
        steps_are=steps_are,
        paired=paired,
        a=a,
        b=b,
        slow_steps=_slow_steps(steps, paired, starts),
        phases=phases,
        rest=_rest(a, b, found, phases) if phases else None,
        budget=part_changes(both, (a, b), steps_are) if both else (),
        kernels=kernel_changes(*both) if both else (),
        operators=operator_changes(*both) if both else (),
        a_peak_bytes=_peak(sides[0]),
        b_peak_bytes=_peak(sides[1]),
        config=config,
        workload=describe_workload(last[0].facts, explained[0]),
        evidence=compare_traits(
            (last[0].facts, explained[0]), (last[1].facts, explained[1]), phases, a.ms
        ),
        notes=(*notes, *_about(a, b, steps_are, starts, both)),
    )


def _share(logarithm: float) -> float:
    """Of a ratio's logarithm, the change; two steps may leave it as wide as numbers go."""
    return math.expm1(min(logarithm, 700.0))


def _verdict(found: Estimate) -> Verdict:
    if found.high < 0:
        return "faster"
    return "slower" if found.low > 0 else "no difference seen"


def _side(runs: Sequence[ComparedRun], dropped: Sequence[int], steps: Sequence[Floats]) -> Side:
    ms, low, high = typical(steps)
    return Side(
        ms=ms,
        low_ms=low,
        high_ms=high,
        quantiles_ms=tuple(np.quantile(np.concatenate(steps), _PERCENTS).tolist()),
        runs=tuple(
            RunSteps(
                path=run.path,
                steps=len(kept),
                warm_up=first,
                median_ms=float(np.median(kept)),
                effective_steps=quantile_spread(kept).effective,
                rank=run.rank,
                drift=drift(kept),
                trail_ms=_trail(kept),
            )
            for run, first, kept in zip(runs, dropped, steps, strict=True)
        ),
    )


def _trail(steps: Floats) -> tuple[float, ...]:
    """In order; of a long run the medians of equal stretches."""
    parts = np.array_split(steps, min(len(steps), _MOST_POINTS))
    return tuple(float(np.median(part)) for part in parts)


def _slow_steps(steps: Sequence[Sequence[Floats]], paired: bool, starts: float) -> SlowSteps | None:
    if min(len(run) for side in steps for run in side) < _ENOUGH_FOR_SLOW:
        return None
    found = allow_for_starts(quantile_ratio(steps[0], steps[1], _SLOW, paired=paired), starts)
    a, b = (
        float(np.exp(np.mean([np.log(np.quantile(run, _SLOW)) for run in side]))) for side in steps
    )
    return SlowSteps(
        a_ms=a,
        b_ms=b,
        change=_share(found.value),
        low=_share(found.low),
        high=_share(found.high),
    )


def _phases(
    sides: Sequence[Sequence[ComparedRun]],
    dropped: Sequence[Sequence[int]],
    paired: bool,
    starts: float,
) -> tuple[PhaseChange, ...]:
    """Where every run has them; phases that nobody spends time in are left out."""
    runs = [run for side in sides for run in side]
    names = [name for name in runs[0].phases if all(name in run.phases for run in runs)]
    out = []
    for name in names:
        a, b = (
            [run.phases[name][first:] for run, first in zip(side, firsts, strict=True)]
            for side, firsts in zip(sides, dropped, strict=True)
        )
        medians = [float(np.mean([np.median(run) for run in side])) for side in (a, b)]
        if not any(medians):
            continue
        found = median_difference(a, b, paired=paired)
        found = allow_for_starts(found, starts, max(medians))
        out.append(
            PhaseChange(
                id=name,
                a_ms=medians[0],
                b_ms=medians[1],
                change_ms=found.value,
                low_ms=found.low,
                high_ms=found.high,
            )
        )
    return tuple(out)


def _rest(a: Side, b: Side, found: Estimate, phases: Sequence[PhaseChange]) -> PhaseChange:
    """What medians of phases leave of the median step: with it they add up to B - A exactly.

    It is as uncertain as the step and the phases together.
    """
    change = (b.ms - a.ms) - sum(row.change_ms for row in phases)
    halves = [(row.high_ms - row.low_ms) / 2 for row in phases]
    reach = math.hypot(a.ms * (_share(found.high) - _share(found.low)) / 2, *halves)
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


def _about(
    a: Side,
    b: Side,
    steps_are: StepsAre,
    starts: float,
    both: tuple[Explanation, Explanation] | None,
) -> list[str]:
    notes = []
    if steps_are == "profiled":
        notes.append(
            f"profiled steps, {_steps(a)} and {_steps(b)}: the profiler slows the host, and so few "
            "steps say little; stepscope run measures steps without it"
        )
        notes += _about_cost(*both) if both else []
    elif starts:
        notes.append(
            "one run on each side: what two starts of one command differ cannot be seen; a "
            f"standard deviation of {starts:.2%} is assumed (--between-starts); stepscope ab "
            "measures it"
        )
    elif len(a.runs) == len(b.runs) == 1:
        notes.append(
            "one run on each side: what two starts of one command differ cannot be seen, and is "
            "not in the interval"
        )
    return notes + [note for name, side in (("A", a), ("B", b)) for note in _about_side(name, side)]


def _about_cost(*both: Explanation) -> list[str]:
    """What `explain` says of the same traces, where that is another step than the verdict's."""
    budgets = [each.budget for each in both]
    if all(budget.basis == "cycles" for budget in budgets):
        return []
    a, b = (f"{budget.step_ms:.2f} ms ({_BASES[budget.basis]})" for budget in budgets)
    return [
        f"stepscope explain, which takes off what the profiler costs, says {a} for a step of A and "
        f"{b} for one of B; the verdict and the parts here are about profiled steps"
    ]


def _steps(side: Side) -> int:
    return sum(run.steps for run in side.runs)


def _about_side(name: str, side: Side) -> list[str]:
    notes = []
    for number, run in enumerate(side.runs, 1):
        whose = name if len(side.runs) == 1 else f"{name}'s run {number}"
        if run.drift is not None:
            way = "slower" if run.drift > 0 else "faster"
            notes.append(
                f"{whose} drifts: its second half is {abs(run.drift):.1%} {way} than its first"
            )
        if len(side.runs) == 1 and FEW <= run.steps < FEWEST_STEADY:
            notes.append(
                f"{whose} has only {counted(run.steps, 'step')}: where steps come in slow and "
                "fast spells the "
                "interval is too narrow"
            )
        if len(side.runs) == 1 and run.steps < FEW:
            notes.append(
                f"{whose} has only {counted(run.steps, 'step')}: the interval takes each for a "
                "fair draw, "
                "which steps that follow each other seldom are"
            )
    return notes
