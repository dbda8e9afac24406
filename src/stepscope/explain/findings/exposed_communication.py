"""Communication that no compute hides."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, Evidence, severity
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.words import counted


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
            *(
                f"{each.kind}: {counted(each.count, 'call')}, {each.exposed_ns / 1e6:.2f} ms "
                "exposed"
                for each in evidence.collectives[:3]
            ),
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
