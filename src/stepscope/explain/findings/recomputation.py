"""Forward work that is done a second time during backward, to keep fewer activations."""

from __future__ import annotations

from stepscope.explain.efficiency import above_peak
from stepscope.explain.findings.evidence import LOW, Evidence, severity, spot_words
from stepscope.records.explanation import Finding, Remedy


def find(evidence: Evidence) -> Finding | None:
    """What activation checkpointing costs; never graver than medium: somebody chose it."""
    efficiency = evidence.efficiency
    if efficiency is None:
        return None
    spots = [spot for spot in efficiency.spots if spot.recomputed]
    share = evidence.of_step(sum(spot.device_ns for spot in spots))
    if share < LOW:
        return None
    lines = [f"recomputed forward: {evidence.ms(share)}"]
    if efficiency.hardware_flops:
        part = efficiency.recomputed_flops / efficiency.hardware_flops
        lines.append(f"{part:.0%} of the step's FLOPs are done a second time")
    if efficiency.mfu is not None and efficiency.hfu is not None and not above_peak(efficiency):
        lines.append(f"HFU {efficiency.hfu:.0%} counts them, MFU {efficiency.mfu:.0%} does not")
    return Finding(
        id="recomputation",
        title="Recomputation",
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
            Remedy(
                id="no-checkpoint",
                summary="checkpoint fewer blocks, as many as memory needs and no more",
            ),
        ),
    )
