"""Python's garbage collector stops the training thread."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    cost_lines,
    costly_stall,
    from_run,
    stall_severity,
    stalling_steps,
    typical_wait,
)
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.run import RankRun


def find_in(run: RankRun) -> Finding | None:
    """Steps that are longer because a collection ran in them."""
    stall = costly_stall(run, "gc")
    if stall is None:
        return None
    pauses = stalling_steps(stall, run, "pauses", "pause")
    return RULE.finding(
        share=stall.share,
        severity=stall_severity(stall),
        summary=f"{pauses} for {typical_wait(stall)} while Python collects garbage.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=(remedies.GC_FREEZE.offer(), remedies.GC_BY_HAND.offer()),
    )


RULE = FindingRule(id="gc-pauses", title="Garbage collection", find=from_run(find_in))
