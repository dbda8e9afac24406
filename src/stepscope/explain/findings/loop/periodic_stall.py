"""Every N-th step takes longer, and none of the usual causes was measured in it."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    cost_lines,
    stalling_steps,
    typical_wait,
    where_words,
)
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.host_calls import is_library_frame
from stepscope.records.explanation import Remedy
from stepscope.records.run import RankRun, Stall, StallCause

# Data, collections, compiling and the rest have findings of their own, with their period.
CAUSES: dict[StallCause, str] = {
    "logging": " in Python between two steps, as for logging or .item()",
    "operating_system": ": no core is free, or pages come from disk",
    "unknown": "",
}


_AS_LONG = 0.8  # of what such a step takes longer: the trace shows work, and it is no stall


def find(evidence: RankEvidence) -> Finding | None:
    return find_in(evidence.run, evidence.longer_work_ns) if evidence.run else None


def find_in(run: RankRun, longer_work_ns: float = 0.0) -> Finding | None:
    """The costliest stall that comes at a fixed distance."""
    stalls = [
        stall
        for stall in run.stalls
        if stall.period is not None and stall.cause in CAUSES and stall.share >= LOW
        if stall.cause != "unknown" or longer_work_ns < _AS_LONG * 1e6 * stall.typical_ms
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


def offer_for_line(stall: Stall) -> tuple[Remedy, ...]:
    """Where the sampled stacks name a line, nothing has to be recorded first."""
    place = next((place for place in stall.where if not is_library_frame(place)), None)
    if place is None or stall.cause == "operating_system":
        return ()
    return (remedies.LESS_OFTEN.offer(f"Run {place.words} less often, or make it cheaper"),)


def _offer(stall: Stall) -> tuple[Remedy, ...]:
    if by_line := offer_for_line(stall):
        return (*by_line, remedies.ON_STALL.offer())
    if stall.cause == "logging":
        return (
            remedies.LESS_OFTEN.offer(
                "Log less often than every "
                f"{stall.period} steps, or in another thread. Read values of the device only then"
            ),
            remedies.NO_SYNC.offer(),
        )
    if stall.cause == "operating_system":
        return (remedies.IDLE_MACHINE.offer(), remedies.ON_STALL.offer())
    return (remedies.ON_STALL.offer(),)


RULE = FindingRule(id="periodic-stall", title="Periodic stall", find=find)
