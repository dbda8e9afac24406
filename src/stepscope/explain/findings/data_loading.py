"""The device waits for the next batch."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, Evidence, places, severity
from stepscope.records.explanation import GAP_CAUSES, Finding, Remedy


def find(evidence: Evidence) -> Finding | None:
    """Host idle while a feeding thread was inside the data loader."""
    share = evidence.part("data_loading")
    if share < LOW:
        return None
    return Finding(
        id="data-loading",
        title="Waiting for data",
        share=share,
        severity=severity(share),
        summary=f"the {evidence.device} waits {share:.0%} of the step for the data loader.",
        evidence=(f"idle inside the loader: {evidence.part_ms('data_loading')}",),
        where=places(evidence, (GAP_CAUSES.index("data_loading"),)),
        remedies=(
            Remedy(
                id="no-data-wait",
                summary="DataLoader(num_workers=..., persistent_workers=True, prefetch_factor=...)",
            ),
            Remedy(id="pin-memory", summary="pin_memory=True and copies with non_blocking=True"),
        ),
    )
