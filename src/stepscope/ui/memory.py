"""Memory in words, for every surface: the peak, what holds it, what would fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.memory.words import LABELS, between_words
from stepscope.records.figures import size
from stepscope.records.memory import CATEGORIES

if TYPE_CHECKING:
    from stepscope.records.memory import LargestBatch, Memory, SiteBytes, Theory, ZeroRow

__all__ = ["LABELS", "size"]

HINTS = {
    "parameters": "The model's weights.",
    "gradients": "One for each trained parameter, from backward until it is cleared.",
    "optimizer": "What the optimizer keeps between steps, such as Adam's two moments.",
    "activations": "What forward keeps for backward.",
    "buffers": "Buffers of modules, such as running means.",
    "temporaries": "Results that are used up within forward, backward or the optimizer's step.",
    "other": "The batch, outputs, workspaces, rounding, and what is not known.",
}
LIMITS = {"device": "the device's memory", "given": "the limit given"}


def shown_categories(memory: Memory) -> list[tuple[str, int]]:
    """Those that hold something at the peak."""
    return [(name, held) for name in CATEGORIES if (held := memory.categories.get(name))]


def unknown_categories(memory: Memory) -> list[str]:
    """Those that the input does not tell."""
    return [LABELS[name] for name in CATEGORIES if memory.categories.get(name) is None]


def headline(memory: Memory) -> str:
    """The peak against what there is."""
    least = "at least " if memory.source == "capture" and memory.device == "cpu" else ""
    words = f"peak {least}{size(memory.peak_bytes)}"
    if memory.phase:
        words += f" in {memory.phase}"
    if memory.reserved_bytes:
        words += f", {size(memory.reserved_bytes)} reserved"
    if memory.limit_bytes:
        words += f", {memory.peak_bytes / memory.limit_bytes:.0%} of {size(memory.limit_bytes)}"
    return words


def batch_words(fit: LargestBatch) -> str:
    """How far the batch can grow."""
    if fit.factor is None or fit.limit_bytes is None or fit.limit_from is None:
        each = f"{size(fit.per_sample_bytes)} a sample" if fit.per_sample_bytes else ""
        return f"{each}; give --memory-limit to see what fits".lstrip("; ")
    where = f"{size(fit.limit_bytes)} ({LIMITS[fit.limit_from]})"
    if fit.batch is None or fit.largest is None or fit.per_sample_bytes is None:
        between = between_words(fit.factor_low, fit.factor_high, "{:.1f}")
        return f"the batch can be {fit.factor:.1f} times what it is{between} in {where}"
    between = between_words(fit.low, fit.high, "{:,}")
    return (
        f"the largest batch in {where} is about {fit.largest:,}{between}; "
        f"now {fit.batch:,}, {size(fit.per_sample_bytes)} a sample"
    )


def theory_words(theory: Theory) -> str | None:
    """The formula's activations against the measured ones."""
    found = theory.activations
    if found is None or not found.measured_bytes:
        return None
    off = found.total_bytes / found.measured_bytes - 1
    return (
        f"activations by formula {size(found.total_bytes)} ({found.model}), measured "
        f"{size(found.measured_bytes)}: {off:+.1%}"
    )


def zero_rows(theory: Theory, ranks: tuple[int, ...]) -> list[tuple[int, list[ZeroRow]]]:
    """Stage by stage, for these numbers of ranks."""
    return [
        (stage, [row for row in theory.zero if row.stage == stage and row.ranks in ranks])
        for stage in sorted({row.stage for row in theory.zero})
    ]


def place_words(site: SiteBytes) -> str:
    """Where a site is, as far as that is known."""
    if site.file is None:
        return ""
    line = f":{site.line}" if site.line else ""
    return f"{site.file}{line}" + (f" {site.function}" if site.function else "")
