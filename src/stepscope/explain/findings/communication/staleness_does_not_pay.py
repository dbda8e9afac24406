"""Reads are stale, and no more updates come of it than a barrier would give."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import HIGH
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.parameter_server import describe_staleness, name_blockers
from stepscope.records.parameter_server import TogetherSummary


def find(summary: TogetherSummary) -> Finding | None:
    """Medium at least: stale gradients cost convergence and buy nothing."""
    straggling = summary.straggling
    if summary.verdict != "does not pay" or straggling is None:
        return None
    slow = (
        remedies.NO_STRAGGLER.offer(
            "Find what slows this worker: other processes, low clocks or a smaller device"
        ),
        remedies.BALANCE.offer("Give the slow worker smaller batches, or leave it out"),
    )
    return RULE.finding(
        share=summary.blocked_share,
        of="run",
        severity="high" if summary.blocked_share >= HIGH else "medium",
        summary=summary.why,
        evidence=(*describe_staleness(summary), *name_blockers(summary)),
        remedies=(
            *(slow if straggling.kind == "persistent" else ()),
            remedies.KEEP_BARRIER.offer(),
        ),
    )


RULE = FindingRule(
    id="staleness-does-not-pay", scope="together", title="Staleness does not pay", find=find
)
