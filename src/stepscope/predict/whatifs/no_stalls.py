"""no-stalls: every step is a typical one. no-stalls=data,gc: stalls of these causes are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.predict.declaration import Outcome, Refused, WrongValue
from stepscope.predict.stalls import name_cause
from stepscope.records.run import STALL_CAUSES
from stepscope.text.figures import milliseconds

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses a run whose steps are not known, and one without such stalls."""
    causes = _causes(value)
    stalls = context.stalls
    if stalls is None:
        raise Refused(
            "no-stalls: only a run folder has every step of the run. Record one with "
            "`stepscope run`"
        )
    left = stalls.without(causes)
    saved_ns = stalls.total_ns - left.total_ns
    if saved_ns <= 0:
        raise Refused(f"no-stalls: the run has no {_named(value)}stalls")
    return Outcome(
        context=replace(context, stalls=left),
        assumptions=(f"{milliseconds(saved_ns / 1e6)} per step of {_named(value)}stalls removed",),
        spread=0.05,
    )


def _causes(value: str) -> tuple[str, ...]:
    names = _split(value)
    unknown = next((name for name in names if name not in STALL_CAUSES), None)
    if unknown is not None:
        known = ", ".join(STALL_CAUSES)
        raise WrongValue(
            f"no-stalls={value}: {unknown!r} is not a cause of stalls. There are {known}"
        )
    return names or STALL_CAUSES


def _split(value: str) -> tuple[str, ...]:
    return tuple(name.strip().replace("-", "_") for name in value.split(",")) if value else ()


def _named(value: str) -> str:
    """The causes, before the word "stalls"."""
    return f"{' and '.join(map(name_cause, _split(value)))} " if value else ""


def label(value: str) -> str:
    return f"no {_named(value)}stalls"
