"""Copies and memsets that run while nothing else does."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, Evidence, severity
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.words import counted


def find(evidence: Evidence) -> Finding | None:
    """exposed_memory of the timeline."""
    share = evidence.part("exposed_memory")
    if share < LOW:
        return None
    worst = [copy for copy in evidence.copies if copy.exposed_ns][:3]
    return Finding(
        id="exposed-copies",
        title="Exposed copies",
        share=share,
        severity=severity(share),
        summary=f"{share:.0%} of the step the {evidence.device} only copies or clears memory.",
        evidence=(
            f"exposed: {evidence.part_ms('exposed_memory')}",
            *(
                f"{copy.name}: {counted(copy.count, 'call')} in the whole trace"
                + (f", {copy.gb_s:.1f} GB/s" if copy.gb_s is not None else "")
                for copy in worst
            ),
        ),
        remedies=(
            Remedy(id="pin-memory", summary="pinned host memory and non_blocking=True copies"),
            Remedy(id="prefetch", summary="copy the next batch on a side stream during compute"),
        ),
    )
