"""The device's allocator runs out of memory, empties its cache and asks again."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    cost_lines,
    costly_stall,
    from_run,
    stalling_steps,
    typical_wait,
)
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.run import RankRun


def find_in(run: RankRun) -> Finding | None:
    """Steps that are longer and in which the allocator tried again."""
    stall = costly_stall(run, "allocator")
    if stall is None:
        return None
    waits = stalling_steps(stall, run, "waits", "wait")
    return RULE.finding(
        share=stall.share,
        summary=f"{waits} {typical_wait(stall)} while the allocator frees its cache and asks for "
        "memory again.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=(
            remedies.EXPANDABLE_SEGMENTS.offer(),
            remedies.SMALLER_BATCH.offer(),
            remedies.STEADY_SHAPES.offer(),
        ),
    )


RULE = FindingRule(id="allocator-retries", title="Memory runs out", find=from_run(find_in))
