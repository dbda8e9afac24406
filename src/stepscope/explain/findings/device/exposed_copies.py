"""Copies and memsets that run while nothing computes."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.text.figures import percent, rate
from stepscope.text.words import counted


def find(evidence: RankEvidence) -> Finding | None:
    share = evidence.budget_share("exposed_memory")
    if share < LOW:
        return None
    worst = [copy for copy in evidence.copies if copy.exposed_ns][:3]
    return RULE.finding(
        share=share,
        summary=f"The {evidence.device} only copies or clears memory for {percent(share)} of the "
        "step.",
        evidence=(
            f"exposed time: {evidence.budget_ms('exposed_memory')}",
            *(
                f"{copy.name}: {counted(copy.count, 'call')} in the whole trace"
                + (f", {rate(copy.gb_s * 1e9, 'B/s')}" if copy.gb_s is not None else "")
                for copy in worst
            ),
        ),
        remedies=(
            remedies.PIN_MEMORY.offer(
                "Set pin_memory=True in the DataLoader, and copy with non_blocking=True"
            ),
            remedies.PREFETCH.offer(),
        ),
    )


RULE = FindingRule(id="exposed-copies", title="Exposed copies", find=find)
