"""Memory at step ends grows over the whole run."""

from __future__ import annotations

from stepscope.explain.findings.evidence import MEDIUM, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import Remedy, Severity
from stepscope.records.run import MemoryGrowth, RankRun
from stepscope.text.figures import percent, size
from stepscope.text.words import counted

SOON_STEPS = 1000


def find(evidence: RankEvidence) -> Finding | None:
    """The limit is known where memory was captured."""
    limit = evidence.memory.limit_bytes if evidence.memory else None
    return find_in(evidence.run, limit) if evidence.run else None


def find_in(run: RankRun, limit_bytes: int | None = None) -> Finding | None:
    """`limit_bytes` is what the device has."""
    growth = run.memory_growth
    if growth is None:
        return None
    left = _steps_left(growth, limit_bytes)
    share = max(0.0, 1 - growth.first_bytes / max(1, growth.last_bytes))
    whose = "The process's memory" if growth.of == "host" else "Allocated memory"
    lines = [
        f"at the end of a step: {size(growth.first_bytes)} after the warm-up, "
        f"{size(growth.last_bytes)} at the end of the run ({percent(share)} of it is growth)",
        f"{_interval(growth)} per step, by the lowest level from each step to the end",
    ]
    if left is not None:
        lines.append(f"at this rate memory is full in about {counted(left, 'step')}")
    return RULE.finding(
        share=share,
        of="memory",
        severity=_severity(share, left, run.steps),
        summary=f"{whose} grows by {size(growth.bytes_per_step)} per step over the whole run.",
        evidence=tuple(lines),
        remedies=_offer(growth),
    )


def _steps_left(growth: MemoryGrowth, limit_bytes: int | None) -> int | None:
    if growth.of == "host" or not limit_bytes:
        return None
    return int(max(0, limit_bytes - growth.last_bytes) // max(1.0, growth.bytes_per_step))


def _severity(share: float, left: int | None, steps: int) -> Severity:
    """High if memory is full before as many steps again."""
    if left is not None and left < max(SOON_STEPS, steps):
        return "high"
    return "medium" if share >= MEDIUM else "low"


def _interval(growth: MemoryGrowth) -> str:
    low, high = size(growth.low), size(growth.high)
    return low if low == high else f"{low} to {high}"


def _offer(growth: MemoryGrowth) -> tuple[Remedy, ...]:
    detach = remedies.DETACH.offer()
    if growth.of == "host":
        return (detach, remedies.TRACEMALLOC.offer())
    return (detach, remedies.SNAPSHOT.offer())


RULE = FindingRule(id="memory-growth", title="Memory grows over the run", find=find)
