"""Nothing was found, but much of the device's time is in kernels whose work is not known."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import MEDIUM, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.explanation import Remedy
from stepscope.text.figures import percent

_SHOWS = "Record with `stepscope run`: it also records shapes, and what CUDA graphs compute"
_STILL = "Record a step without CUDA graphs too: `stepscope run --wait 0`"


def find(evidence: RankEvidence) -> Finding | None:
    """Stands in the place of `healthy`, and is left out when another finding needs attention."""
    share = evidence.unknown_share
    efficiency = evidence.efficiency
    if share < MEDIUM or efficiency is None:
        return None
    return RULE.finding(
        share=share,
        severity="none",
        summary=f"No loss was found, but {percent(share)} of the step is in kernels whose work is "
        "not known. Their precision and speed were not checked.",
        evidence=(
            *(note for note in efficiency.notes if "lower bound" in note),
            f"the {evidence.device} computes for {percent(evidence.budget_share('compute'))} of "
            "the step",
        ),
        remedies=_offer(evidence),
    )


def _offer(evidence: RankEvidence) -> tuple[Remedy, ...]:
    """Nothing for other packages' kernels in a run that was recorded: they have no FLOPs."""
    if evidence.run is None:
        return (remedies.STEPSCOPE_RUN.offer(_SHOWS),)
    return (remedies.STEPSCOPE_RUN.offer(_STILL),) if evidence.is_graphed else ()


RULE = FindingRule(id="unknown-work", title="Unknown work", find=find)
