"""The device waits for the next batch."""

from __future__ import annotations

from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    describe_loader,
    offer_for_waits,
    places,
)
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.explanation import GAP_CAUSES
from stepscope.text.figures import percent


def find(evidence: RankEvidence) -> Finding | None:
    """The device is idle while the training thread is inside the data loader."""
    share = evidence.budget_share("data_loading")
    if share < LOW:
        return None
    loader = evidence.run.loader if evidence.run else None
    return RULE.finding(
        share=share,
        summary=f"The {evidence.device} waits for the data loader for {percent(share)} of the "
        "step.",
        evidence=(
            f"waiting for the next batch: {evidence.budget_ms('data_loading')}",
            *describe_loader(loader),
        ),
        where=places(evidence, (GAP_CAUSES.index("data_loading"),)),
        remedies=offer_for_waits(loader, gpu=not evidence.on_host),
    )


RULE = FindingRule(id="data-loading", title="Waiting for data", find=find)
