"""The report's page about memory, one block a rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from stepscope.explain.memory.theory import RANKS
from stepscope.explain.memory.words import LABELS
from stepscope.records.figures import size
from stepscope.records.memory import CATEGORIES
from stepscope.records.words import counted, sentence
from stepscope.ui.html.memory_charts import draw_batches, draw_moments, draw_timeline
from stepscope.ui.memory import (
    HINTS,
    LIMITS,
    batch_words,
    headline,
    place_words,
    shown_categories,
    theory_words,
    unknown_categories,
    zero_rows,
)

if TYPE_CHECKING:
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.memory import Memory, Theory

MOST_ROWS = 10
MOST_DRAWN = 8  # ranks with pictures; the others have their figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A category's part of the peak."""

    name: str
    label: str
    size: str
    share: float
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table, with a bar behind its size."""

    size: str
    bar: float
    what: str
    about: str
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroLine:
    """One stage over all numbers of ranks."""

    stage: str
    volume: str
    cells: list[tuple[str, bool]]  # size, whether it alone is beyond the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """What the template prints."""

    headline: str
    facts: list[tuple[str, str, str]]
    slices: list[Slice]
    unknown: str
    picture: str
    timeline: Markup
    caption: str
    moments: Markup
    key: list[tuple[str, str]]
    dashed: bool
    batches: Markup
    batch_words: str
    batch_from: str
    sites: list[Row]
    modules: list[Row]
    zero: list[ZeroLine]
    ranks: tuple[int, ...]
    theory: str
    formula: str
    notes: tuple[str, ...]


def memory_page(rank: RankExplanation, *, drawn: bool) -> Markup:
    """Empty where nothing is known about the rank's memory."""
    if rank.memory is None:
        return Markup("")
    return Markup(_template().render(view=_view(rank.memory, drawn)))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = _percent
    source = files("stepscope.ui.html").joinpath("memory.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def _view(memory: Memory, drawn: bool) -> MemoryView:
    none = Markup("")
    fit, theory = memory.largest_batch, memory.theory
    timeline = draw_timeline(memory) if drawn else none
    activations = theory.activations if theory else None
    return MemoryView(
        headline=sentence(headline(memory)),
        facts=_facts(memory),
        slices=_slices(memory),
        unknown=", ".join(unknown_categories(memory)) if memory.source != "snapshot" else "",
        picture=_picture(memory),
        timeline=timeline,
        caption=_caption(memory),
        moments=draw_moments(memory) if drawn and not timeline else none,
        key=_key(memory),
        dashed=bool(memory.reserved_bytes),
        batches=draw_batches(fit, memory.peak_bytes) if drawn and fit else none,
        batch_words=sentence(batch_words(fit)) if fit else "",
        batch_from=fit.batch_from or "" if fit else "",
        sites=_sites(memory),
        modules=_modules(memory),
        zero=_zero(theory, memory.limit_bytes) if theory else [],
        ranks=RANKS,
        theory=sentence(theory_words(theory) or "") if theory else "",
        formula=activations.formula if activations else "",
        notes=(*memory.notes, *(theory.notes if theory else ())),
    )


def _facts(memory: Memory) -> list[tuple[str, str, str]]:
    facts = [("Peak", size(memory.peak_bytes), memory.measured)]
    if memory.reserved_bytes:
        facts.append(("Reserved", size(memory.reserved_bytes), "What torch took from the device"))
    if memory.fragmentation is not None:
        found = memory.fragmentation
        hint = f"Reserved and holding nothing, at the {found.at}"
        facts.append(("Unused", _percent(found.share), hint))
    last = memory.at_end
    if last is not None and last.largest_free_bytes is not None:
        facts.append(
            (
                "Largest free block",
                size(last.largest_free_bytes),
                f"of {last.free_blocks} at the end",
            )
        )
    if memory.limit_bytes:
        fit = memory.largest_batch
        hint = LIMITS[fit.limit_from] if fit and fit.limit_from else ""
        facts.append(("Limit", size(memory.limit_bytes), hint))
    if memory.growth is not None:
        steps = len(memory.growth.ends_bytes) - 1
        each = memory.growth.bytes_per_step
        hint = f"Over {counted(steps, 'step')}"
        facts.append(("Growth per step", size(each) if each else "none", hint))
    if memory.out_of_memory:
        failed = memory.out_of_memory[-1]
        hint = f"The last one asked for {size(failed.asked_bytes)}"
        facts.append(("Failed requests", str(len(memory.out_of_memory)), hint))
    return [(label, value, sentence(hint)) for label, value, hint in facts]


def _slices(memory: Memory) -> list[Slice]:
    whole = memory.peak_bytes or 1
    return [
        Slice(
            name=name,
            label=LABELS[name].capitalize(),
            size=size(held),
            share=held / whole,
            hint=HINTS[name],
        )
        for name, held in shown_categories(memory)
    ]


def _picture(memory: Memory) -> str:
    if memory.timeline is None:
        return "At the moments of the step"
    return "Through the history" if memory.source == "snapshot" else "Through the step"


def _caption(memory: Memory) -> str:
    if memory.timeline is not None:
        return f"Allocated through {memory.timeline.of}; the peak is the highest point."
    if memory.moments:
        return (
            "What is held where each phase of the step ends, and at the peak. Between these "
            "moments nothing was recorded."
        )
    return ""


def _key(memory: Memory) -> list[tuple[str, str]]:
    """Categories that the picture shows; one that cannot be told apart needs no name."""
    if memory.timeline is not None:
        shown = {name for name, levels in memory.timeline.categories.items() if any(levels)}
    else:
        shown = {n for each in memory.moments for n, held in each.categories.items() if held}
    return [(name, LABELS[name].capitalize()) for name in CATEGORIES if name in shown]


def _sites(memory: Memory) -> list[Row]:
    most = memory.by_site[0].size_bytes if memory.by_site else 1
    return [
        Row(
            size=size(site.size_bytes),
            bar=site.size_bytes / max(most, 1),
            what=site.operator,
            about=place_words(site),
            category=site.category or "",
        )
        for site in memory.by_site[:MOST_ROWS]
    ]


def _modules(memory: Memory) -> list[Row]:
    most = memory.by_module[0].size_bytes if memory.by_module else 1
    return [
        Row(
            size=size(each.size_bytes),
            bar=each.size_bytes / max(most, 1),
            what=each.module,
            about=counted(each.tensors, "tensor"),
            category="activations",
        )
        for each in memory.by_module[:MOST_ROWS]
    ]


def _zero(theory: Theory, limit: int | None) -> list[ZeroLine]:
    return [
        ZeroLine(
            stage="Not sharded" if stage == 0 else f"Stage {stage}",
            volume=f"{rows[0].volume:g}x",
            cells=[(size(row.size_bytes), bool(limit and row.size_bytes > limit)) for row in rows],
        )
        for stage, rows in zero_rows(theory, RANKS)
    ]


def _percent(share: float) -> str:
    percent = 100 * share
    if 0 < percent < 0.1:
        return "<0.1%"
    return f"{percent:.1f}%" if percent < 10 else f"{percent:.0f}%"
