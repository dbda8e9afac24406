"""Some steps take longer, at no fixed distance, and none of the usual causes was measured."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    LOW,
    cost_lines,
    from_run,
    stall_severity,
    stalling_steps,
    typical_wait,
    where_words,
)
from stepscope.explain.findings.loop.periodic_stall import CAUSES, offer_for_line
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.explanation import Remedy
from stepscope.records.run import RankRun, StallCause


def find_in(run: RankRun) -> Finding | None:
    """The costliest stall without a period that no other finding is about."""
    stalls = [
        stall
        for stall in run.stalls
        if stall.period is None and stall.cause in CAUSES and stall.share >= LOW
    ]
    stall = max(stalls, key=lambda stall: stall.share, default=None)
    if stall is None:
        return None
    takes = stalling_steps(stall, run, "takes", "take")
    unexplained = ", and nothing measured explains it"
    why = where_words(stall) or CAUSES[stall.cause] or unexplained
    return RULE.finding(
        share=stall.share,
        severity=stall_severity(stall),
        summary=f"{takes} {typical_wait(stall)} longer{why}.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=(*offer_for_line(stall), *_offer(stall.cause)),
    )


def _offer(cause: StallCause) -> tuple[Remedy, ...]:
    on_stall = remedies.ON_STALL.offer()
    if cause == "operating_system":
        return (remedies.IDLE_MACHINE.offer(), on_stall)
    if cause == "logging":
        return (on_stall, remedies.NO_SYNC.offer())
    return (on_stall, remedies.IDLE_MACHINE.offer())


RULE = FindingRule(id="irregular-stalls", title="Irregular stalls", find=from_run(find_in))
