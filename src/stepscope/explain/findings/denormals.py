"""Numbers too small for their format: processors compute with them many times slower."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.machine_load import disturbed
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.records.efficiency import Spot
    from stepscope.records.explanation import Finding

LEAST_SHARE = 0.01  # of the values looked at
SLOW = 4.0  # times an operator's roof
LEAST_NS = 50_000  # of one call: a shorter one is slow because it is short


def find(evidence: RankEvidence) -> Finding | None:
    """Denormal values were seen, they are not flushed, and operators run far below their roof."""
    load = evidence.cpu.load if evidence.cpu else None
    if evidence.cpu is None or load is None or load.flush_denormal is not False:
        return None
    seen = load.denormal_share or 0.0
    slow = [] if disturbed(evidence.cpu) else _slow(evidence)
    share = evidence.mean_step_share(sum(spot.gap_ns or 0.0 for spot in slow))
    if seen < LEAST_SHARE or share < LOW:
        return None
    return RULE.finding(
        share=share,
        severity="medium" if severity(share) == "high" else severity(share),
        summary=f"{seen:.0%} of sampled parameters, gradients and optimizer state are denormal, "
        f"and operators more than {SLOW:g} times above their roof take {share:.0%} of the step.",
        evidence=(
            "denormal numbers are not flushed to zero (torch.set_flush_denormal is off)",
            *(f"{spot.operator}: {spot.device_ns / 1e6:.2f} ms a step" for spot in slow[:3]),
            "how much of that denormals cost is not known: time the step with them flushed",
        ),
        remedies=(
            remedies.FLUSH_DENORMAL.offer(
                "torch.set_flush_denormal(True) before training: such values become 0",
            ),
        ),
    )


def _slow(evidence: RankEvidence) -> list[Spot]:
    spots = evidence.efficiency.spots if evidence.efficiency else ()
    far = [
        spot
        for spot in spots
        if spot.roof_ns
        and spot.device_ns > SLOW * spot.roof_ns
        and spot.device_ns > LEAST_NS * spot.calls
    ]
    return sorted(far, key=lambda spot: -(spot.gap_ns or 0.0))


RULE = FindingRule(id="denormals", scope="rank", title="Denormal numbers", find=find)
