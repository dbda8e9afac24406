"""Every N-th step takes longer, and none of the usual causes was measured in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, from_run
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.findings.run_words import (
    cost_lines,
    stalling_steps,
    typical_wait,
    where_words,
)
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.records.explanation import Remedy
    from stepscope.records.whole_run import RankRun, Stall, StallCause

# Data, collections, compiling and the rest have findings of their own, with their period.
CAUSES: dict[StallCause, str] = {
    "logging": " in Python between two steps, as for logging or .item()",
    "operating_system": ": no core is free then, or pages come from disk",
    "unknown": "",
}


def find_in(run: RankRun) -> Finding | None:
    """The costliest stall that comes at a fixed distance."""
    stalls = [
        stall
        for stall in run.stalls
        if stall.period is not None and stall.cause in CAUSES and stall.share >= LOW
    ]
    stall = max(stalls, key=lambda stall: stall.share, default=None)
    if stall is None:
        return None
    takes = stalling_steps(stall, run, "takes", "take")
    return RULE.finding(
        share=stall.share,
        summary=f"{takes} {typical_wait(stall)} longer{where_words(stall) or CAUSES[stall.cause]}.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=_offer(stall),
    )


def _offer(stall: Stall) -> tuple[Remedy, ...]:
    if stall.cause == "logging":
        return (
            remedies.LESS_OFTEN.offer(
                "log less often than every "
                f"{stall.period} steps, or in another thread; read values of the device only then"
            ),
            remedies.NO_SYNC.offer(),
        )
    if stall.cause == "operating_system":
        return (remedies.IDLE_MACHINE.offer(), remedies.ON_STALL.offer())
    return (remedies.ON_STALL.offer(),)


RULE = FindingRule(id="periodic-stall", title="Periodic stall", find=from_run(find_in))
