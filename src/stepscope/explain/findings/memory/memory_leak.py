"""Memory that grows in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.text.figures import size
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.records.memory import Memory

# Share of the limit (or of the peak without a limit) that a thousand steps add.
LEAST_SHARE = 0.01
SOON_STEPS = 1000


def find(evidence: RankEvidence) -> Finding | None:
    """The window's steps. Where the whole run shows growth, memory-growth says it."""
    if evidence.memory is None or (evidence.run and evidence.run.memory_growth):
        return None
    return find_in(evidence.memory)


def find_in(memory: Memory) -> Finding | None:
    """Steady growth of the memory that is alive between steps."""
    growth = memory.growth
    if growth is None or not growth.steady:
        return None
    whole = memory.limit_bytes or memory.peak_bytes
    if SOON_STEPS * growth.bytes_per_step < LEAST_SHARE * whole:
        return None
    ends = growth.ends_bytes
    evidence = [
        f"alive at the end of a step: {size(ends[0])}; {counted(len(ends) - 1, 'step')} later: "
        f"{size(ends[-1])}",
        f"grows by {size(growth.bytes_per_step)} per step (without the first "
        f"{counted(growth.skipped, 'step')})",
    ]
    left = None
    if memory.limit_bytes:
        left = max(0, memory.limit_bytes - memory.peak_bytes) // growth.bytes_per_step
        evidence.append(f"at this rate memory is full in about {counted(left, 'step')}")
    return RULE.finding(
        share=min(1.0, growth.bytes_per_step / memory.peak_bytes) if memory.peak_bytes else 0.0,
        of="memory",
        severity="high" if left is not None and left < SOON_STEPS else "medium",
        summary=f"Every step adds {size(growth.bytes_per_step)} that is never released.",
        evidence=tuple(evidence),
        remedies=(remedies.DETACH.offer(), remedies.SNAPSHOT.offer()),
    )


RULE = FindingRule(id="memory-leak", title="Memory grows", find=find)
