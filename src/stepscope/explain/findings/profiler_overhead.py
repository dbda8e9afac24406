"""The profiler's own work shows in the trace: those gaps are not the training's."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, Evidence, severity
from stepscope.records.explanation import Finding, Remedy


def find(evidence: Evidence) -> Finding | None:
    """Host idle while the profiler flushed or resized its buffers."""
    share = evidence.part("profiler")
    if share < LOW:
        return None
    return Finding(
        id="profiler-overhead",
        title="Profiler overhead",
        share=share,
        severity="low" if severity(share) == "low" else "medium",
        summary=f"{share:.0%} of the step is the profiler handling its own buffers; "
        "without the profiler this time does not exist.",
        evidence=(f"in the profiler: {evidence.part_ms('profiler')}",),
        remedies=(
            Remedy(
                id="lighter-profile", summary="profile fewer steps, or without shapes and stacks"
            ),
        ),
    )
