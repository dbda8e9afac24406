"""Nothing worth changing was found, which is an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.explanation import Finding

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import Evidence


def find(evidence: Evidence) -> Finding:
    """The device is busy computing and nothing else takes a tenth of the step."""
    timeline = evidence.timeline
    share = evidence.part("compute")
    return Finding(
        id="healthy",
        title="Healthy",
        share=share,
        severity="none",
        summary=f"the {evidence.device} computes for {share:.0%} of the step and no single loss "
        "reaches a tenth of it.",
        evidence=(
            f"idle {evidence.idle_share(timeline.idle_ns):.1%}, exposed communication "
            f"{evidence.part('exposed_comm'):.1%}, exposed copies "
            f"{evidence.part('exposed_memory'):.1%}",
        ),
    )
