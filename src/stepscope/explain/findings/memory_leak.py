"""Memory that grows with every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.explanation import Finding, Remedy
from stepscope.records.figures import size
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import Evidence
    from stepscope.records.memory import Memory

# In a thousand steps, of the limit (or of the peak where there is none).
LEAST_SHARE = 0.01
SOON_STEPS = 1000


def find(evidence: Evidence) -> Finding | None:
    """Steady growth of what is alive between steps."""
    return find_in(evidence.memory) if evidence.memory is not None else None


def find_in(memory: Memory) -> Finding | None:
    """The same of an account of memory alone."""
    growth = memory.growth
    if growth is None or not growth.steady:
        return None
    whole = memory.limit_bytes or memory.peak_bytes
    if SOON_STEPS * growth.bytes_per_step < LEAST_SHARE * whole:
        return None
    ends = growth.ends_bytes
    evidence = [
        f"alive at the end of a step: {size(ends[0])}, {counted(len(ends) - 1, 'step')} later "
        f"{size(ends[-1])}",
        f"{size(growth.bytes_per_step)} more in each step, the first {growth.skipped} left out",
    ]
    left = None
    if memory.limit_bytes:
        left = max(0, memory.limit_bytes - memory.peak_bytes) // growth.bytes_per_step
        evidence.append(f"at this rate memory is full in about {counted(left, 'step')}")
    return Finding(
        id="memory-leak",
        title="Memory grows",
        share=min(1.0, growth.bytes_per_step / memory.peak_bytes) if memory.peak_bytes else 0.0,
        of="memory",
        severity="high" if left is not None and left < SOON_STEPS else "medium",
        summary=f"every step adds {size(growth.bytes_per_step)} that is never released.",
        evidence=tuple(evidence),
        remedies=(
            Remedy(
                id="detach",
                summary="keep loss.item() or loss.detach(), not the loss: it holds its graph",
            ),
            Remedy(
                id="snapshot",
                summary="torch.cuda.memory._dump_snapshot() after some steps, then `stepscope "
                "explain` it: by_site names the lines",
            ),
        ),
    )
