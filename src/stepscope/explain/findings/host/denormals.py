"""Denormal numbers: values so small that CPUs compute with them many times slower."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.cpu_use import disturbed
from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.hardware import Spot
from stepscope.text.figures import milliseconds, percent

LEAST_SHARE = 0.01  # of the sampled values
SLOW = 4.0  # times the time at the roof
LEAST_NS = 50_000  # per call: shorter calls are slow because they are short


def find(evidence: RankEvidence) -> Finding | None:
    """Denormal values exist, are not flushed to zero, and operators run far below their roof."""
    load = evidence.cpu.load if evidence.cpu else None
    if evidence.cpu is None or load is None or load.flush_denormal is not False:
        return None
    seen = load.denormal_share or 0.0
    slow = [] if disturbed(evidence.cpu) else _list_slow(evidence)
    share = evidence.mean_step_share(sum(spot.gap_ns or 0.0 for spot in slow))
    if seen < LEAST_SHARE or share < LOW:
        return None
    return RULE.finding(
        share=share,
        severity="medium" if severity(share) == "high" else severity(share),
        summary=f"Unusually slow operators lose {percent(share)} of the step. {percent(seen)} of "
        "the sampled parameters, gradients and optimizer state are denormal (extremely small) "
        "numbers.",
        evidence=(
            "denormal numbers are not flushed to zero (torch.set_flush_denormal is off)",
            *(
                f"{spot.operator}: {milliseconds(spot.device_ns / 1e6)} per step"
                for spot in slow[:3]
            ),
            "how much of this is due to denormals is not known: time the step with them flushed",
        ),
        remedies=(remedies.FLUSH_DENORMAL.offer(),),
    )


def _list_slow(evidence: RankEvidence) -> list[Spot]:
    spots = evidence.efficiency.spots if evidence.efficiency else ()
    slow = [
        spot
        for spot in spots
        if spot.roof_ns
        and spot.device_ns > SLOW * spot.roof_ns
        and spot.device_ns > LEAST_NS * spot.calls
    ]
    return sorted(slow, key=lambda spot: -(spot.gap_ns or 0.0))


RULE = FindingRule(id="denormals", title="Denormal numbers", find=find)
