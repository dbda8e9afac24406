"""Forward work that backward repeats, so that fewer activations are kept."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.efficiency import above_peak
from stepscope.explain.findings.evidence import LOW, RankEvidence, severity, spot_words
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.text.figures import percent


def find(evidence: RankEvidence) -> Finding | None:
    """The cost of activation checkpointing; medium at most, because somebody chose it."""
    efficiency = evidence.efficiency
    if efficiency is None:
        return None
    spots = [spot for spot in efficiency.spots if spot.recomputed]
    share = evidence.mean_step_share(sum(spot.device_ns for spot in spots))
    if share < LOW:
        return None
    lines = [f"repeated forward work: {evidence.step_ms(share)}"]
    if efficiency.hardware_flops:
        part = efficiency.recomputed_flops / efficiency.hardware_flops
        lines.append(f"{percent(part)} of the step's FLOPs are done twice")
    if efficiency.mfu is not None and efficiency.hfu is not None and not above_peak(efficiency):
        lines.append(
            f"HFU {percent(efficiency.hfu)} counts them, MFU {percent(efficiency.mfu)} does not"
        )
    return RULE.finding(
        share=share,
        severity="low" if severity(share) == "low" else "medium",
        summary=f"{percent(share)} of the step recomputes activations to save memory.",
        evidence=(
            *lines,
            *(
                spot_words(evidence, spot)
                for spot in sorted(spots, key=lambda spot: -spot.device_ns)[:2]
            ),
        ),
        remedies=(remedies.NO_CHECKPOINT.offer(),),
    )


RULE = FindingRule(id="recomputation", title="Recomputation", find=find)
