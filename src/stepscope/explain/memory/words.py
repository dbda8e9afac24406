"""Bytes in sentences: what findings say about memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import size
from stepscope.records.memory import CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.records.memory import Memory

LABELS = {name: name for name in CATEGORIES} | {"optimizer": "optimizer state"}


def biggest(memory: Memory) -> str:
    held = {n: amount for n, amount in memory.categories.items() if amount and n != "other"}
    if held:
        name = max(held, key=lambda name: held[name])
        return f"{LABELS[name]} ({size(held[name])})"
    if memory.by_site:
        site = memory.by_site[0]
        place = f"{site.file}:{site.line}" if site.file else site.operator
        return f"from {place} ({size(site.size_bytes)})"
    return "not known"


def held_words(memory: Memory) -> list[str]:
    """One line: what is held at the peak or, if that is unknown, what allocated it."""
    held = {name: amount for name, amount in memory.categories.items() if amount}
    if set(held) - {"other"}:
        ranked = sorted(held, key=lambda name: -held[name])
        return ["at the peak: " + ", ".join(f"{LABELS[n]} {size(held[n])}" for n in ranked[:4])]
    places = [site for site in memory.by_site if site.file][:3]
    if not places:
        return []
    named = (f"{site.file}:{site.line} {size(site.size_bytes)}" for site in places)
    return ["allocated by " + ", ".join(named)]


def between_words(
    low: float | None, high: float | None, write: Callable[[float], str] = "{:,}".format
) -> str:
    """A range in brackets; without a high end, only the low one."""
    if low is None:
        return ""
    if high is None:
        return f" (at least {write(low)})"
    return f" ({write(low)} to {write(high)})"
