"""The device waits for the next batch."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, RankEvidence, places, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import GAP_CAUSES, Finding


def find(evidence: RankEvidence) -> Finding | None:
    """Host idle while a feeding thread was inside the data loader."""
    share = evidence.budget_share("data_loading")
    if share < LOW:
        return None
    return RULE.finding(
        share=share,
        severity=severity(share),
        summary=f"the {evidence.device} waits {share:.0%} of the step for the data loader.",
        evidence=(f"idle inside the loader: {evidence.budget_ms('data_loading')}",),
        where=places(evidence, (GAP_CAUSES.index("data_loading"),)),
        remedies=(
            remedies.NO_DATA_WAIT.offer(
                "DataLoader(num_workers=..., persistent_workers=True, prefetch_factor=...)",
            ),
            remedies.PIN_MEMORY.offer("pin_memory=True and copies with non_blocking=True"),
        ),
    )


RULE = FindingRule(id="data-loading", scope="rank", title="Waiting for data", find=find)
