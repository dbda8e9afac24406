"""Memory in words for every surface: the peak, what holds it, what would fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.memory.words import LABELS, between_words
from stepscope.records.figures import duration, factor, percent, signed_percent, size
from stepscope.records.memory import CATEGORIES

if TYPE_CHECKING:
    from stepscope.records.memory import LargestBatch, Memory, SiteBytes, Theory, ZeroRow
    from stepscope.records.saved_memory import SavedMemory

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


def headline(memory: Memory) -> str:
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
