"""Put a step's use of its device into words: efficiency against the peaks, and memory: its
peak, what holds it, what would fit.
"""

from __future__ import annotations

from typing import NamedTuple

from stepscope.explain.efficiency import ABOVE, above_peak
from stepscope.explain.memory.model import LABELS, between_words
from stepscope.explain.rank import OTHERS
from stepscope.records.explanation import RankExplanation
from stepscope.records.hardware import Efficiency, Spot
from stepscope.records.memory import (
    CATEGORIES,
    LargestBatch,
    Memory,
    SavedMemory,
    SiteBytes,
    Theory,
    ZeroRow,
)
from stepscope.text.figures import duration, factor, flop_rate, percent, signed_percent, size
from stepscope.ui.words import PARTS

# Efficiency in words and sums, for the terminal and the report.

ABOVE_WORDS = "above it: wrong"  # instead of a share of the peak
MFU_WORDS = "MFU is the share of the device's peak that the model's own arithmetic uses."
LEAST_SHARE = 0.002  # of the step: smaller losses are not shown
_SOURCES = {"table": "data sheet", "calibrated": "calibrated"}
_FASTEST = ("bf16", "fp16")  # the fastest dtypes that most models train in
_COLOURS = {"exposed_comm": "comm", "exposed_memory": "memory"}


class PeakLoss(NamedTuple):
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
        share = shares[name]
        if share >= LEAST_SHARE:
            out.append(PeakLoss(name, label, hint, color, share, share * step, max(0.0, left)))
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


def efficiency_headline(efficiency: Efficiency) -> str:
    """MFU in a sentence, or why there is none."""
    if efficiency.mfu is None or efficiency.peak_flops is None:
        return f"MFU is not known: {no_peak(efficiency)}"
    if wrong := above_peak(efficiency):
        return f"MFU is not known: {wrong}"
    source = _SOURCES.get(efficiency.peak_source or "", "")
    if efficiency.peak_source == "calibrated" and efficiency.ceilings and efficiency.ceilings.doubt:
        source = "calibrated on a busy machine, so too low"
    reached = efficiency.model_flops / ((efficiency.step_ms or 0.0) / 1e3 or 1e30)
    return (
        f"MFU {percent(efficiency.mfu)}: {flop_rate(reached)} of "
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


def no_peak(efficiency: Efficiency) -> str:
    """Why there is no MFU."""
    if efficiency.step_ms is None:
        return "the trace has no step."
    if not efficiency.model_flops:
        if any("CUDA graph" in note for note in efficiency.notes):
            return (
                "the trace gives no FLOPs for kernels of CUDA graphs: record an eager step, or the "
                "graph's recording, in the same window."
            )
        return "the trace gives no FLOPs: record it with shapes to count them."
    device = efficiency.ceilings.device if efficiency.ceilings else "this device"
    return f"the peak rate of {device} is not known; `stepscope calibrate` measures it."


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


def about_spot(spot: Spot) -> str:
    """Its dtype, its phase, and whether it is recomputed."""
    again = "recomputed" if spot.recomputed else ""
    return ", ".join(word for word in (spot.dtype, spot.phase, again) if word)


# Memory in words for every surface: the peak, what holds it, what would fit.

HINTS = {
    "parameters": "The model's weights.",
    "gradients": "One per trained parameter, from backward until it is cleared.",
    "optimizer": "What the optimizer keeps between steps, such as Adam's two moments.",
    "activations": "What forward saves for backward.",
    "buffers": "Buffers of modules, such as running means.",
    "temporaries": "Results that live only within forward, backward or the optimizer's step.",
    "other": "The batch, outputs, workspaces, rounding, and anything unknown.",
}
LIMITS = {"device": "the device's memory", "given": "the limit given"}


def shown_categories(memory: Memory) -> list[tuple[str, int]]:
    """Categories that hold something at the peak."""
    return [(name, held) for name in CATEGORIES if (held := memory.categories.get(name))]


def unknown_categories(memory: Memory) -> list[str]:
    """Categories that were not captured."""
    return [LABELS[name] for name in CATEGORIES if memory.categories.get(name) is None]


def memory_headline(memory: Memory) -> str:
    """The peak, and its share of the memory there is."""
    least = "at least " if memory.source == "capture" and memory.device == "cpu" else ""
    words = f"peak {least}{size(memory.peak_bytes)}"
    if memory.phase:
        words += f" in {memory.phase}"
    if memory.reserved_bytes:
        words += f", {size(memory.reserved_bytes)} reserved"
    if memory.limit_bytes:
        words += (
            f", {percent(memory.peak_bytes / memory.limit_bytes)} of {size(memory.limit_bytes)}"
        )
    return words


def batch_words(fit: LargestBatch) -> str:
    """How far the batch can grow."""
    if fit.factor is None or fit.limit_bytes is None or fit.limit_from is None:
        sample = f"{size(fit.per_sample_bytes)} a sample" if fit.per_sample_bytes else ""
        return f"{sample}; give --memory-limit to see what fits".lstrip("; ")
    where = f"{size(fit.limit_bytes)} ({LIMITS[fit.limit_from]})"
    if fit.batch is None or fit.largest is None or fit.per_sample_bytes is None:
        between = between_words(fit.factor_low, fit.factor_high, factor)
        return f"the batch can be {factor(fit.factor)} times as large{between} in {where}"
    between = between_words(fit.low, fit.high)
    return (
        f"the largest batch in {where} is about {fit.largest:,}{between}; "
        f"now {fit.batch:,} at {size(fit.per_sample_bytes)} a sample"
    )


def theory_words(theory: Theory) -> str | None:
    """Activations by formula against the measured ones."""
    formula = theory.activations
    if formula is None or not formula.measured_bytes:
        return None
    off = formula.total_bytes / formula.measured_bytes - 1
    return (
        f"activations by formula {size(formula.total_bytes)} ({formula.model}), measured "
        f"{size(formula.measured_bytes)}: {signed_percent(off)}"
    )


def zero_rows(theory: Theory, ranks: tuple[int, ...]) -> list[tuple[int, list[ZeroRow]]]:
    """One row of cells per ZeRO stage, for these numbers of ranks."""
    return [
        (stage, [row for row in theory.zero if row.stage == stage and row.ranks in ranks])
        for stage in sorted({row.stage for row in theory.zero})
    ]


ACTION_LABELS = {
    "keep": "Kept",
    "recompute": "Recomputed",
    "encode": "Encoded",
    "offload": "In CPU memory",
}


def saving_words(saving: SavedMemory) -> str:
    """What the plan changed, and what it costs."""
    if saving.peak_bytes >= saving.peak_bytes_before:
        return f"save_memory changes nothing: {size(saving.saved_bytes_before)} saved for backward"
    held = saving.saved_bytes if saving.held_bytes is None else saving.held_bytes
    words = (
        f"save_memory: {size(held)} saved for backward instead of "
        f"{size(saving.saved_bytes_before)}; the peak of backward is {size(saving.peak_bytes)} "
        f"instead of {size(saving.peak_bytes_before)}"
    )
    if saving.step_ns is not None and saving.step_ns_before:
        words += (
            f", for {duration(saving.extra_ns)} more per step "
            f"({percent(saving.extra_ns / saving.step_ns_before)})"
        )
    return words


def place_words(site: SiteBytes) -> str:
    """File, line and function of an allocation, as far as they are known."""
    if site.file is None:
        return ""
    line = f":{site.line}" if site.line else ""
    return f"{site.file}{line}" + (f" {site.function}" if site.function else "")
