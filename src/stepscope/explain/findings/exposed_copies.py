"""Copies and memsets that run while nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.records import remedies
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.records.explanation import Finding


def find(evidence: RankEvidence) -> Finding | None:
    """exposed_memory of the timeline."""
    share = evidence.budget_share("exposed_memory")
    if share < LOW:
        return None
    worst = [copy for copy in evidence.copies if copy.exposed_ns][:3]
    return RULE.finding(
        share=share,
        severity=severity(share),
        summary=f"{share:.0%} of the step the {evidence.device} only copies or clears memory.",
        evidence=(
            f"exposed: {evidence.budget_ms('exposed_memory')}",
            *(
                f"{copy.name}: {counted(copy.count, 'call')} in the whole trace"
                + (f", {copy.gb_s:.1f} GB/s" if copy.gb_s is not None else "")
                for copy in worst
            ),
        ),
        remedies=(
            remedies.PIN_MEMORY.offer("pinned host memory and non_blocking=True copies"),
            remedies.PREFETCH.offer("copy the next batch on a side stream during compute"),
        ),
    )


RULE = FindingRule(id="exposed-copies", scope="rank", title="Exposed copies", find=find)
