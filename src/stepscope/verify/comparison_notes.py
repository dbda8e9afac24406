"""What to know about a comparison: few steps, the profiler's overhead, drift, single runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import milliseconds, unsigned_percent
from stepscope.records.words import counted
from stepscope.verify.change import FEW

if TYPE_CHECKING:
    from stepscope.records.comparison import Side, StepsAre
    from stepscope.records.explanation import Explanation

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
