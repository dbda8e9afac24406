"""Nothing was found, but much of the device's time is in kernels whose work is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import MEDIUM
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.figures import percent

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import RankEvidence


def find(evidence: RankEvidence) -> Finding | None:
    """Stands in the place of `healthy`, and is left out when another finding needs attention."""
    share = unknown_share(evidence)
    efficiency = evidence.efficiency
    if share < MEDIUM or efficiency is None:
        return None
    return RULE.finding(
        share=share,
        severity="none",
        summary=f"no loss was found, but {percent(share)} of the step is in kernels whose work is "
        "not known: their precision and speed were not checked.",
        evidence=(
            f"the {evidence.device} computes for {percent(evidence.budget_share('compute'))} of "
            "the step",
            *(note for note in efficiency.notes if "lower bound" in note),
        ),
        remedies=(
            ()
            if evidence.run is not None
            else (
                remedies.STEPSCOPE_RUN.offer(
                    "`stepscope run` records shapes, and what CUDA graphs compute"
                ),
            )
        ),
    )


def unknown_share(evidence: RankEvidence) -> float:
    """Of the step: time on a GPU in kernels that may multiply matrices, with unknown FLOPs."""
    if evidence.on_host or evidence.efficiency is None:
        return 0.0
    return evidence.efficiency.unknown_share * evidence.budget_share("compute")


RULE = FindingRule(id="unknown-work", title="Not known", find=find)
