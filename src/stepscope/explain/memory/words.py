"""Bytes in sentences: what findings say of an account of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import size

if TYPE_CHECKING:
    from stepscope.records.memory import Memory

LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "buffers": "buffers",
    "temporaries": "temporaries",
    "other": "other",
}


def biggest(memory: Memory) -> str:
    """The category, or the place, that holds most."""
    told = {name: held for name, held in memory.categories.items() if held and name != "other"}
    if told:
        name = max(told, key=lambda each: told[each])
        return f"{LABELS[name]} ({size(told[name])})"
    if memory.by_site:
        site = memory.by_site[0]
        place = f"{site.file}:{site.line}" if site.file else site.operator
        return f"from {place} ({size(site.size_bytes)})"
    return "not known"


def held_words(memory: Memory) -> list[str]:
    """What is held at the peak, as one line; where that is not known, who allocated it."""
    told = {name: held for name, held in memory.categories.items() if held}
    if set(told) - {"other"}:
        ranked = sorted(told, key=lambda name: -told[name])
        return ["at the peak: " + ", ".join(f"{LABELS[n]} {size(told[n])}" for n in ranked[:4])]
    places = [site for site in memory.by_site if site.file][:3]
    if not places:
        return []
    named = (f"{site.file}:{site.line} {size(site.size_bytes)}" for site in places)
    return ["allocated by " + ", ".join(named)]


def between_words(low: float | None, high: float | None, form: str = "{}") -> str:
    """A range in brackets; without a high end, what may scale may also not."""
    if low is None:
        return ""
    if high is None:
        return f" (at least {form.format(low)})"
    return f" ({form.format(low)} to {form.format(high)})"
