"""Communication that no compute hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, Evidence, severity
from stepscope.records.explanation import Finding, Remedy

if TYPE_CHECKING:
    from stepscope.records.explanation import Collective


def find(evidence: Evidence) -> Finding | None:
    """exposed_comm of the timeline."""
    timeline = evidence.timeline
    share = evidence.part("exposed_comm")
    if share < LOW:
        return None
    overlap = timeline.overlap
    return Finding(
        id="exposed-communication",
        title="Exposed communication",
        share=share,
        severity=severity(share),
        summary=f"{share:.0%} of the step is communication that nothing hides.",
        evidence=(
            f"exposed: {evidence.part_ms('exposed_comm')}",
            f"{overlap:.0%} of communication overlaps compute"
            if overlap is not None
            else "no communication",
            *(_line(evidence, each) for each in evidence.collectives[:3]),
            "time in a collective includes waiting for slower ranks",
        ),
        remedies=(
            Remedy(id="bucket-mb", summary="other DDP bucket sizes start communication earlier"),
            Remedy(id="accumulate", summary="accumulate gradients: communicate every N-th step"),
            Remedy(
                id="bandwidth", summary="compress gradients (bf16 comm hook) or use a faster link"
            ),
        ),
    )


def _line(evidence: Evidence, each: Collective) -> str:
    """Its part of the exposed time. Calls add up to that, less what surrounds them."""
    whole = evidence.whole.exposed_comm_ns
    ms = evidence.part("exposed_comm") * evidence.budget.step_ms
    part = ms * each.exposed_ns / whole if whole else 0.0
    return f"{each.kind}: {part:.2f} ms of that, {each.count} calls in the trace"
