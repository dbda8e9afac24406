"""Forward work that is done a second time during backward, to keep fewer activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.efficiency import above_peak
from stepscope.explain.findings.evidence import LOW, RankEvidence, severity, spot_words
from stepscope.explain.findings.rule import FindingRule
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.records.explanation import Finding


def find(evidence: RankEvidence) -> Finding | None:
    """What activation checkpointing costs; never graver than medium: somebody chose it."""
    efficiency = evidence.efficiency
    if efficiency is None:
        return None
    spots = [spot for spot in efficiency.spots if spot.recomputed]
    share = evidence.mean_step_share(sum(spot.device_ns for spot in spots))
    if share < LOW:
        return None
    lines = [f"recomputed forward: {evidence.step_ms(share)}"]
    if efficiency.hardware_flops:
        part = efficiency.recomputed_flops / efficiency.hardware_flops
        lines.append(f"{part:.0%} of the step's FLOPs are done a second time")
    if efficiency.mfu is not None and efficiency.hfu is not None and not above_peak(efficiency):
        lines.append(f"HFU {efficiency.hfu:.0%} counts them, MFU {efficiency.mfu:.0%} does not")
    return RULE.finding(
        share=share,
        severity="low" if severity(share) == "low" else "medium",
        summary=f"{share:.0%} of the step computes activations a second time, to save memory.",
        evidence=(
            *lines,
            *(
                spot_words(evidence, spot)
                for spot in sorted(spots, key=lambda spot: -spot.device_ns)[:2]
            ),
        ),
        remedies=(
            remedies.NO_CHECKPOINT.offer(
                "checkpoint fewer blocks, as many as memory needs and no more",
            ),
        ),
    )


RULE = FindingRule(id="recomputation", scope="rank", title="Recomputation", find=find)
