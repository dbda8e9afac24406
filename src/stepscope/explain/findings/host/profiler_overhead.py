"""Gaps in the trace that the profiler itself causes."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.text.figures import percent


def find(evidence: RankEvidence) -> Finding | None:
    """The device is idle while the profiler flushes or resizes its buffers."""
    share = evidence.budget_share("profiler")
    if share < LOW:
        return None
    return RULE.finding(
        share=share,
        severity="low" if severity(share) == "low" else "medium",
        summary=f"{percent(share)} of the step is the profiler's own work on its buffers. Steps "
        "without the profiler do not have it.",
        evidence=(f"in the profiler: {evidence.budget_ms('profiler')}",),
        remedies=(remedies.LIGHTER_PROFILE.offer(),),
    )


RULE = FindingRule(id="profiler-overhead", title="Profiler overhead", find=find)
