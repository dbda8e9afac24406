"""Efficiency in words and sums, for the terminal and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.explain.efficiency import ABOVE, above_peak
from stepscope.explain.truncate_tables import OTHERS
from stepscope.records.figures import flop_rate, percent
from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from stepscope.records.efficiency import Efficiency, Spot
    from stepscope.records.explanation import RankExplanation

ABOVE_WORDS = "above it: wrong"  # instead of a share of the peak
MFU_WORDS = "MFU is the share of the device's peak that the model's own arithmetic uses."
LEAST_SHARE = 0.002  # of the step: smaller losses are not shown
_SOURCES = {"table": "data sheet", "calibrated": "calibrated"}
_FASTEST = ("bf16", "fp16")  # the fastest dtypes that most models train in
_COLOURS = {"exposed_comm": "comm", "exposed_memory": "memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakLoss:
    """One loss on the way from the peak down to MFU."""

    id: str
    label: str
    hint: str
    color: str  # names a CSS variable
    share: float
    ms: float
    left: float  # share of the peak that remains after it


def peak_losses(rank: RankExplanation) -> list[PeakLoss]:
    """The parts of the step that are not the model's arithmetic; with MFU they add up to 1.

    Empty without an MFU.
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
    shares |= _compute_losses(efficiency, step, shares["compute"] - useful)
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
    ("recomputed", "Recomputation", "Forward work that backward recomputes.", "recomputed"),
    (
        "moving",
        "Moving data",
        "Kernels without matmuls: memory bandwidth limits them, not arithmetic.",
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
        "Matmuls below peak",
        "Matmuls, convolutions and attention that run below the device's peak.",
        "compute",
    ),
)


def _compute_losses(efficiency: Efficiency, step_ms: float, rest: float) -> dict[str, float]:
    """Compute time beyond the model's arithmetic at peak, by cause; adds up to `rest`."""
    rest = max(0.0, rest)

    def share(spots: list[Spot]) -> float:
        return sum(spot.device_ns for spot in spots) / 1e6 / step_ms

    first = [spot for spot in efficiency.spots if not spot.recomputed]
    products = share([spot for spot in first if spot.flops])
    useful = (efficiency.mfu or 0.0) * (efficiency.step_ms or step_ms) / step_ms
    losses = {
        "recomputed": share([spot for spot in efficiency.spots if spot.recomputed]),
        "moving": share([spot for spot in first if not spot.flops and spot.bound == "memory"]),
        "below": max(0.0, products - useful),
    }
    known = sum(losses.values())
    if known > rest:  # kernels that ran at the same time count once in compute
        losses = {name: value * rest / known for name, value in losses.items()}
    return {**losses, "unknown": max(0.0, rest - sum(losses.values()))}


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
        f"MFU {percent(efficiency.mfu)}: {flop_rate(_achieved(efficiency))} of "
        f"{flop_rate(efficiency.peak_flops)} in {efficiency.dtype} ({source})"
    )


def against_fastest(efficiency: Efficiency) -> str:
    """The same arithmetic as a share of a faster dtype's peak; empty if there is none."""
    if efficiency.mfu is None or not efficiency.peak_flops or efficiency.ceilings is None:
        return ""
    if above_peak(efficiency):
        return ""
    offered = {dtype: efficiency.ceilings.flops.get(dtype, 0.0) for dtype in _FASTEST}
    dtype, peak = max(offered.items(), key=lambda item: item[1])
    if peak < 1.5 * efficiency.peak_flops:
        return ""
    share = efficiency.mfu * efficiency.peak_flops / peak
    return f"That is {percent(share)} of what its tensor cores do in {dtype} ({flop_rate(peak)})."


def _no_flops(efficiency: Efficiency) -> str:
    if any("CUDA graph" in note for note in efficiency.notes):
        return (
            "the trace gives no FLOPs for kernels of CUDA graphs: record an eager step, or the "
            "graph's recording, in the same window."
        )
    return "the trace gives no FLOPs: record it with shapes to count them."


def no_peak(efficiency: Efficiency) -> str:
    """Why there is no MFU."""
    if efficiency.step_ms is None:
        return "the trace has no step."
    if not efficiency.model_flops:
        return _no_flops(efficiency)
    device = efficiency.ceilings.device if efficiency.ceilings else "this device"
    return f"the peak rate of {device} is not known; `stepscope calibrate` measures it."


def _achieved(efficiency: Efficiency) -> float:
    return efficiency.model_flops / ((efficiency.step_ms or 0.0) / 1e3 or 1e30)


def operators(efficiency: Efficiency) -> list[Spot]:
    """Without the rows that sum up what was left out."""
    return [spot for spot in efficiency.spots if spot.operator != OTHERS]


def gaps(efficiency: Efficiency, top: int) -> list[Spot]:
    """The widest gaps to the roof, widest first."""
    known = [spot for spot in operators(efficiency) if spot.gap_ns is not None and spot.gap_ns > 0]
    return sorted(known, key=lambda spot: -(spot.gap_ns or 0.0))[:top]


def of_roof(spot: Spot) -> float | None:
    """How close a spot is to its roof: 1 is on it."""
    return spot.roof_ns / spot.device_ns if spot.roof_ns is not None and spot.device_ns else None


def share_of_peak(share: float) -> str:
    """A share of a peak or a roof; more than all of it means that the peak is wrong."""
    return percent(share) if share <= ABOVE else ABOVE_WORDS


def share_of_roof(spot: Spot) -> str:
    """How close a spot is to its roof, in words."""
    near = of_roof(spot)
    if near is None:
        return "-"
    if near > ABOVE and spot.bound == "memory":
        return "above (its data stays in a cache)"
    return share_of_peak(near)


def about(spot: Spot) -> str:
    """Its dtype, its phase, and whether it is recomputed."""
    again = "recomputed" if spot.recomputed else ""
    return ", ".join(word for word in (spot.dtype, spot.phase, again) if word)
