"""What still costs in a compiled or graphed step: the widest gaps to the device's peak rates."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.explain.efficiency import above_peak
from stepscope.explain.findings.evidence import LOW, MEDIUM, RankEvidence, spot_words
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import Remedy
from stepscope.records.hardware import Spot
from stepscope.text.figures import milliseconds, percent
from stepscope.text.words import counted, plural

_MOST = 3
# Of a peak: what good kernels reach. Time above it is what another kernel may save.
REACHABLE = 0.8


def find(evidence: RankEvidence) -> Finding | None:
    """The operators that lose most. An eager step has simpler findings: fusion, precision."""
    efficiency = evidence.efficiency
    if evidence.on_host or efficiency is None or above_peak(efficiency):
        return None
    if not evidence.is_compiled and not evidence.is_graphed:
        return None
    # Per step; 0 where the roof is not known.
    lost = sorted(
        (
            ((spot.device_ns - spot.roof_ns / REACHABLE if spot.roof_ns is not None else 0.0), spot)
            for spot in efficiency.spots
        ),
        key=lambda row: -row[0],
    )
    widest = [(ns, spot) for ns, spot in lost[:_MOST] if ns > 0]
    share = evidence.mean_step_share(sum(ns for ns, _ in widest))
    if share < LOW:
        return None
    return RULE.finding(
        share=share,
        severity="medium" if share >= MEDIUM else "low",
        summary=f"{percent(share)} of the step is lost because "
        f"{counted(len(widest), 'operator')} {plural(len(widest), 'runs', 'run')} below "
        f"{percent(REACHABLE)} of the {evidence.device}'s peak. The costliest is "
        f"{_named(widest[0][1])}.",
        evidence=tuple(_describe(evidence, ns, spot) for ns, spot in widest),
        remedies=tuple(_offer([spot for _, spot in widest])),
    )


def _named(spot: Spot) -> str:
    return f"{spot.operator} of {spot.place.short}" if spot.place else spot.operator


def _describe(evidence: RankEvidence, lost_ns: float, spot: Spot) -> str:
    longer = milliseconds(evidence.mean_step_share(lost_ns) * evidence.budget.step_ms)
    limit = {"compute": "arithmetic", "memory": "memory bandwidth"}.get(spot.bound, "its work")
    reached = percent((spot.roof_ns or 0.0) / spot.device_ns)
    return f"{spot_words(evidence, spot)}, {reached} of the peak by {limit}: {longer} lost"


def _offer(spots: list[Spot]) -> Iterator[Remedy]:
    """By what limits them."""
    if any(spot.bound == "memory" and spot.phase != "optimizer" for spot in spots):
        yield remedies.FUSE_NEIGHBOURS.offer()
    if any(spot.bound == "compute" and spot.dtype in ("fp32", "tf32") for spot in spots):
        yield remedies.BF16.offer()
    yield remedies.BATCH.offer("Use a larger batch: each kernel comes closer to the peak")


RULE = FindingRule(id="below-roof", title="Kernels far below the peak", find=find)
