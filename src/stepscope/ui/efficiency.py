"""The words and sums about efficiency that the terminal and the report share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.explain.efficiency import ABOVE, above_peak
from stepscope.explain.truncate_tables import OTHERS
from stepscope.records.figures import flop_rate
from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from stepscope.records.efficiency import Efficiency, Spot
    from stepscope.records.explanation import RankExplanation

ABOVE_WORDS = "above it: wrong"  # in the place of a share of the peak
MFU_WORDS = "MFU is the share of the device's peak that the model's own arithmetic uses."
HFU_WORDS = "HFU counts recomputed arithmetic too."
LEAST_SHARE = 0.002  # of the step: less than that is no step down
_SOURCES = {"table": "data sheet", "calibrated": "calibrated"}
_FASTEST = ("bf16", "fp16")  # of the dtypes that most models train in
_COLOURS = {"exposed_comm": "comm", "exposed_memory": "memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakLoss:
    """One step down from the peak to what the model's arithmetic got."""

    id: str
    label: str
    hint: str
    color: str  # names a CSS variable
    share: float
    ms: float
    left: float  # share that remains below it


def peak_losses(rank: RankExplanation) -> list[PeakLoss]:
    """From the peak down to MFU: the parts of the step that are not the model's arithmetic.

    They and MFU add up to 1. Empty without an MFU.
    """
    efficiency, step = rank.efficiency, rank.budget.step_ms
    if efficiency is None or efficiency.mfu is None or not step or above_peak(efficiency):
        return []
    lost = [
        (part.id, *PARTS[part.id][::2], _COLOURS.get(part.id, part.id.removeprefix("idle_")))
        for part in rank.budget.parts
        if part.id != "compute"
    ]
    shares = {part.id: part.share for part in rank.budget.parts}
    useful = efficiency.mfu * (efficiency.step_ms or step) / step
    shares |= _of_compute(efficiency, step, shares["compute"] - useful)
    out, left = [], 1.0
    for name, label, hint, color in (*lost, *_COMPUTE):
        left -= shares[name]
        if shares[name] >= LEAST_SHARE:
            ms = shares[name] * step
            out.append(
                PeakLoss(
                    id=name,
                    label=label,
                    hint=hint,
                    color=color,
                    share=shares[name],
                    ms=ms,
                    left=max(0.0, left),
                )
            )
    return out


_COMPUTE = (
    (
        "recomputed",
        "Recomputation",
        "Forward work that is done a second time in backward.",
        "recomputed",
    ),
    (
        "moving",
        "Moving data",
        "Kernels that do no matrix product: their roof is the memory, not the arithmetic.",
        "memory",
    ),
    (
        "unknown",
        "Other kernels",
        "Kernels whose FLOPs and bytes the trace does not give, or too short to be listed.",
        "other",
    ),
    (
        "below",
        "Products below peak",
        "Matrix products, convolutions and attention that take longer than at the peak.",
        "compute",
    ),
)


def _of_compute(efficiency: Efficiency, step_ms: float, rest: float) -> dict[str, float]:
    """What compute is besides the model's arithmetic at peak; adds up to `rest`."""
    rest = max(0.0, rest)

    def share(spots: list[Spot]) -> float:
        return sum(spot.device_ns for spot in spots) / 1e6 / step_ms

    first = [spot for spot in efficiency.spots if not spot.recomputed]
    products = share([spot for spot in first if spot.flops])
    useful = (efficiency.mfu or 0.0) * (efficiency.step_ms or step_ms) / step_ms
    found = {
        "recomputed": share([spot for spot in efficiency.spots if spot.recomputed]),
        "moving": share([spot for spot in first if not spot.flops and spot.bound == "memory"]),
        "below": max(0.0, products - useful),
    }
    told = sum(found.values())
    if told > rest:  # kernels that ran side by side count once in compute
        found = {name: value * rest / told for name, value in found.items()}
    return {**found, "unknown": max(0.0, rest - sum(found.values()))}


def headline(efficiency: Efficiency) -> str:
    """MFU in a sentence, or why there is none."""
    if efficiency.mfu is None or efficiency.peak_flops is None:
        return f"MFU is not known: {no_peak(efficiency)}"
    if wrong := above_peak(efficiency):
        return f"MFU is not known: {wrong}"
    source = _SOURCES.get(efficiency.peak_source or "", "")
    if efficiency.peak_source == "calibrated" and efficiency.ceilings and efficiency.ceilings.doubt:
        source = "calibrated on a busy machine, so too low"
    return (
        f"MFU {efficiency.mfu:.1%}: {flop_rate(_achieved(efficiency))} of "
        f"{flop_rate(efficiency.peak_flops)} in {efficiency.dtype} ({source})"
    )


def against_fastest(efficiency: Efficiency) -> str:
    """What the same arithmetic is of a faster dtype's peak; empty where the used one is fastest."""
    if efficiency.mfu is None or not efficiency.peak_flops or efficiency.ceilings is None:
        return ""
    if above_peak(efficiency):
        return ""
    offered = {dtype: efficiency.ceilings.flops.get(dtype, 0.0) for dtype in _FASTEST}
    dtype, peak = max(offered.items(), key=lambda item: item[1])
    if peak < 1.5 * efficiency.peak_flops:
        return ""
    share = efficiency.mfu * efficiency.peak_flops / peak
    return f"Of what its tensor cores do in {dtype} ({flop_rate(peak)}) that is {share:.1%}."


def no_peak(efficiency: Efficiency) -> str:
    """Why there is no MFU."""
    if efficiency.step_ms is None:
        return "the trace has no step to take it over."
    if not efficiency.model_flops:
        return "the trace gives no FLOPs: record it with shapes to count them."
    device = efficiency.ceilings.device if efficiency.ceilings else "this device"
    return f"the peak rate of {device} is not known; `stepscope calibrate` measures it."


def _achieved(efficiency: Efficiency) -> float:
    return efficiency.model_flops / ((efficiency.step_ms or 0.0) / 1e3 or 1e30)


def operators(efficiency: Efficiency) -> list[Spot]:
    """Spots of one operator each, without the rows that sum up what was left out."""
    return [spot for spot in efficiency.spots if spot.operator != OTHERS]


def gaps(efficiency: Efficiency, top: int) -> list[Spot]:
    """The widest gaps to the roof, those worth a line only."""
    known = [spot for spot in operators(efficiency) if spot.gap_ns is not None and spot.gap_ns > 0]
    return sorted(known, key=lambda spot: -(spot.gap_ns or 0.0))[:top]


def of_roof(spot: Spot) -> float | None:
    """How close a spot is to its roof: 1 is on it."""
    return spot.roof_ns / spot.device_ns if spot.roof_ns is not None and spot.device_ns else None


def share_of_peak(share: float, decimals: int = 0) -> str:
    """A share of a peak or a roof, never more than all of it: that is an error in the peak."""
    return f"{share:.{decimals}%}" if share <= ABOVE else ABOVE_WORDS


def share_of_roof(spot: Spot) -> str:
    """How close a spot is to its roof, in words."""
    near = of_roof(spot)
    if near is None:
        return "-"
    if near > ABOVE and spot.bound == "memory":
        return "above (its data stays in a cache)"
    return share_of_peak(near)


def about(spot: Spot) -> str:
    """Its dtype, where it ran, and whether for the second time."""
    again = "recomputed" if spot.recomputed else ""
    return ", ".join(word for word in (spot.dtype, spot.phase, again) if word)
