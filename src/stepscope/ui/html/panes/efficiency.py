"""Efficiency: MFU, the way down from the peak, roofline and widest gaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.explain.efficiency import above_peak
from stepscope.explain.shapes import which_call
from stepscope.records.figures import byte_rate, duration, flop_rate, flops, percent
from stepscope.ui.efficiency import (
    about,
    against_fastest,
    gaps,
    no_peak,
    peak_losses,
    share_of_peak,
    share_of_roof,
)
from stepscope.ui.html.pane import Pane, ReportData, rank_label
from stepscope.ui.html.roofline import Roofline, draw_roofline

if TYPE_CHECKING:
    from stepscope.records.efficiency import Efficiency, Spot
    from stepscope.records.explanation import RankExplanation
    from stepscope.ui.efficiency import PeakLoss

MOST_GAPS = 15
MOST_RANKS = 8  # with pictures of their own: ranks of one job mostly do the same work
_SOURCES = {"table": "by its data sheet", "calibrated": "as calibrated here"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRow:
    """One row of the table next to the roofline."""

    number: int
    operator: str
    shapes: str
    about: str  # dtype, phase
    time: str
    near: str  # how much of its roof it reaches
    gap: str
    bar: float  # share of the widest gap
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyView:
    """What the template prints about one rank; an empty `no_roofline` means there is a picture."""

    mfu: str
    mfu_share: float
    sentence: str
    facts: list[tuple[str, str, str]]  # label, value, hint
    falls: list[PeakLoss]
    roofs: bool  # the device's peaks are known
    step_ms: float
    roofline: Roofline | None
    no_roofline: str
    rows: list[GapRow]
    notes: list[str]
    source: str


def efficiency_view(rank: RankExplanation, *, drawn: bool) -> EfficiencyView | None:
    """None where nothing is known; without pictures unless `drawn`."""
    efficiency = rank.efficiency
    if efficiency is None:
        return None
    widest = gaps(efficiency, MOST_GAPS)
    roofline = draw_roofline(efficiency, widest) if drawn else None
    return EfficiencyView(
        mfu="" if efficiency.mfu is None or above_peak(efficiency) else percent(efficiency.mfu),
        mfu_share=efficiency.mfu or 0.0,
        sentence=_sentence(efficiency),
        facts=_facts(efficiency),
        falls=peak_losses(rank),
        roofs=efficiency.ceilings is not None,
        step_ms=rank.budget.step_ms,
        roofline=roofline,
        no_roofline=_no_roofline(efficiency, roofline),
        rows=_rows(widest) if drawn else [],
        notes=list(efficiency.notes),
        source=efficiency.ceilings.source if efficiency.ceilings else "",
    )


def _sentence(efficiency: Efficiency) -> str:
    if efficiency.mfu is None or not efficiency.step_ms or efficiency.peak_flops is None:
        return f"MFU is not known: {no_peak(efficiency)}".replace("`", "")
    if wrong := above_peak(efficiency):
        return f"MFU is not known: {wrong}"
    reached = efficiency.model_flops / (efficiency.step_ms / 1e3)
    how = _SOURCES.get(efficiency.peak_source or "", "")
    device = efficiency.ceilings.device if efficiency.ceilings else "the device"
    return (
        f"of {device}'s peak is used by the model's own arithmetic: {flop_rate(reached)} of "
        f"{flop_rate(efficiency.peak_flops)} in {efficiency.dtype}, {how}. "
        f"{against_fastest(efficiency)}"
    ).strip()


def _facts(efficiency: Efficiency) -> list[tuple[str, str, str]]:
    facts = []
    if efficiency.model_flops:
        per_step = flops(efficiency.model_flops)
        facts.append(("FLOPs per step", per_step, "Forward and backward, of the model"))
    if efficiency.recomputed_flops:
        again = flops(efficiency.recomputed_flops)
        facts.append(("Recomputed", again, "Done a second time: counts for HFU, not for MFU"))
    if efficiency.hfu is not None and efficiency.recomputed_flops and not above_peak(efficiency):
        facts.append(("HFU", percent(efficiency.hfu), "Of the peak, recomputation included"))
    for use in efficiency.by_dtype:
        if use.device_ns:
            reached = use.flops / (use.device_ns / 1e9)
            peak = ""
            if use.peak_flops:
                peak = f", {share_of_peak(reached / use.peak_flops)} of its peak"
            facts.append(
                (f"Matmuls in {use.dtype}", flop_rate(reached), f"{duration(use.device_ns)}{peak}")
            )
    if efficiency.tensor_core_share is not None:
        share = percent(efficiency.tensor_core_share)
        facts.append(
            ("On tensor cores", share, "Of the time in matmuls, convolutions and attention")
        )
    if efficiency.ceilings and efficiency.ceilings.bytes_s:
        peak = byte_rate(efficiency.ceilings.bytes_s)
        facts.append(("Memory", peak, "Peak bandwidth, read and write"))
    if efficiency.unknown_share >= 0.005:
        share = percent(efficiency.unknown_share)
        facts.append(("Not known", share, "Of device time: kernels whose FLOPs are unknown"))
    return facts


def _no_roofline(efficiency: Efficiency, roofline: Roofline | None) -> str:
    if roofline is None:
        return "Not drawn for this rank: ranks of one job mostly do the same work."
    if not (roofline.products or roofline.moving):
        return "Nothing to draw: the trace gives no operator's FLOPs or bytes."
    if efficiency.ceilings is None or not efficiency.ceilings.flops:
        return (
            "The roofs are missing: this device's peaks are not known. "
            "Run stepscope calibrate on it."
        )
    return ""


def _rows(spots: list[Spot]) -> list[GapRow]:
    widest = max((spot.gap_ns or 0.0 for spot in spots), default=0.0)
    return [
        GapRow(
            number=place,
            operator=spot.operator,
            shapes=which_call(spot),
            about=about(spot),
            time=duration(spot.device_ns),
            near=share_of_roof(spot),
            gap=duration(spot.gap_ns or 0.0),
            bar=(spot.gap_ns or 0.0) / widest if widest else 0.0,
            bound=spot.bound,
        )
        for place, spot in enumerate(spots, 1)
    ]


def efficiency_views(report: ReportData) -> list[tuple[str, EfficiencyView | None]] | None:
    views = [
        (rank_label(rank), efficiency_view(rank, drawn=place < MOST_RANKS))
        for place, rank in enumerate(report.ranks)
    ]
    return views if any(view for _, view in views) else None


PANE = Pane(id="efficiency", title="Efficiency", order=50, view=efficiency_views)
