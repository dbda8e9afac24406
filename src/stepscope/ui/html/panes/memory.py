"""Memory: what holds the peak, memory through a step, and what batch fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from stepscope.explain.memory.theory import RANKS
from stepscope.explain.memory.words import LABELS
from stepscope.records.figures import duration, percent, size
from stepscope.records.memory import CATEGORIES
from stepscope.records.words import counted, sentence
from stepscope.ui.html.memory_charts import draw_batches, draw_moments, draw_timeline
from stepscope.ui.html.pane import Pane, ReportData, rank_label
from stepscope.ui.html.saving_chart import draw_saving, drawn_actions
from stepscope.ui.memory import (
    ACTION_LABELS,
    HINTS,
    LIMITS,
    batch_words,
    headline,
    place_words,
    saving_words,
    shown_categories,
    theory_words,
    unknown_categories,
    zero_rows,
)

if TYPE_CHECKING:
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.memory import Memory, Theory
    from stepscope.records.saved_memory import SavedMemory

MOST_ROWS = 10
MOST_DRAWN = 8  # ranks with charts; the others have their figures


def memory_views(report: ReportData) -> list[tuple[str, dict[str, Any] | None]] | None:
    views = [
        (rank_label(rank), memory_view(rank, drawn=place < MOST_DRAWN))
        for place, rank in enumerate(report.ranks)
    ]
    return views if any(view for _, view in views) else None


def memory_view(rank: RankExplanation, *, drawn: bool) -> dict[str, Any] | None:
    """None where nothing is known about the rank's memory."""
    memory, none = rank.memory, Markup("")
    if memory is None:
        return None
    fit, theory = memory.largest_batch, memory.theory
    timeline = draw_timeline(memory) if drawn else none
    activations = theory.activations if theory else None
    return {
        "headline": sentence(headline(memory)),
        "facts": _facts(memory),
        "slices": _slices(memory),
        "unknown": ", ".join(unknown_categories(memory)) if memory.source != "snapshot" else "",
        "picture": _picture(memory),
        "timeline": timeline,
        "caption": _caption(memory),
        "moments": draw_moments(memory) if drawn and not timeline else none,
        "key": _key(memory),
        "dashed": bool(memory.reserved_bytes),
        "batches": draw_batches(fit, memory.peak_bytes) if drawn and fit else none,
        "batch_words": sentence(batch_words(fit)) if fit else "",
        "batch_from": fit.batch_from or "" if fit else "",
        "saving": _saving(memory.saving, drawn=drawn) if memory.saving else None,
        "sites": _sites(memory),
        "modules": _modules(memory),
        "zero": _zero(theory, memory.limit_bytes) if theory else [],
        "ranks": RANKS,
        "theory": sentence(theory_words(theory) or "") if theory else "",
        "formula": activations.formula if activations else "",
        "notes": (*memory.notes, *(theory.notes if theory else ())),
    }


def _facts(memory: Memory) -> list[tuple[str, str, str]]:
    facts = [("Peak", size(memory.peak_bytes), memory.measured)]
    if memory.reserved_bytes:
        facts.append(("Reserved", size(memory.reserved_bytes), "What torch took from the device"))
    if memory.fragmentation is not None:
        unused = memory.fragmentation
        hint = f"Reserved and holding nothing, at the {unused.at}"
        facts.append(("Unused", percent(unused.share), hint))
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
        growth = memory.growth.bytes_per_step
        hint = f"Over {counted(steps, 'step')}"
        facts.append(("Growth per step", size(growth) if growth else "none", hint))
    if memory.out_of_memory:
        failed = memory.out_of_memory[-1]
        hint = f"The last one asked for {size(failed.asked_bytes)}"
        facts.append(("Failed requests", str(len(memory.out_of_memory)), hint))
    return [(label, value, sentence(hint)) for label, value, hint in facts]


def _slices(memory: Memory) -> list[dict[str, Any]]:
    whole = memory.peak_bytes or 1
    return [
        {
            "name": name,
            "label": LABELS[name].capitalize(),
            "size": size(held),
            "share": held / whole,
            "hint": HINTS[name],
        }
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
    """Categories that the chart shows; where they cannot be separated there are none."""
    if memory.timeline is not None:
        shown = {name for name, levels in memory.timeline.categories.items() if any(levels)}
    else:
        shown = {n for moment in memory.moments for n, held in moment.categories.items() if held}
    return [(name, LABELS[name].capitalize()) for name in CATEGORIES if name in shown]


def _sites(memory: Memory) -> list[dict[str, Any]]:
    most = memory.by_site[0].size_bytes if memory.by_site else 1
    return [
        {
            "size": size(site.size_bytes),
            "bar": site.size_bytes / max(most, 1),
            "what": site.operator,
            "about": place_words(site),
            "category": site.category or "",
        }
        for site in memory.by_site[:MOST_ROWS]
    ]


def _modules(memory: Memory) -> list[dict[str, Any]]:
    most = memory.by_module[0].size_bytes if memory.by_module else 1
    return [
        {
            "size": size(module.size_bytes),
            "bar": module.size_bytes / max(most, 1),
            "what": module.module,
            "about": counted(module.tensors, "tensor"),
            "category": "activations",
        }
        for module in memory.by_module[:MOST_ROWS]
    ]


def _saving(saving: SavedMemory, *, drawn: bool) -> dict[str, Any]:
    line = saving.timeline if drawn else None
    return {
        "words": sentence(saving_words(saving)),
        "chart": draw_saving(line),
        "key": [(action, ACTION_LABELS.get(action, action)) for action in drawn_actions(line)]
        if line
        else [],
        "actions": [
            {
                "action": row.action,
                "label": ACTION_LABELS.get(row.action, row.action),
                "count": counted(row.values, "value"),
                "before": size(row.before_bytes),
                "held": size(row.held_bytes),
                "cost": duration(row.cost_ns) if row.cost_ns else "",
            }
            for row in saving.actions
        ],
        "values": [
            {
                "value": row.value,
                "module": row.module,
                "operator": row.operator,
                "size": size(row.size_bytes),
                "held": size(row.held_bytes),
                "action": row.action,
                "cost": duration(row.cost_ns) if row.cost_ns else "",
            }
            for row in saving.values[:MOST_ROWS]
        ],
        "notes": saving.notes,
    }


def _zero(theory: Theory, limit: int | None) -> list[dict[str, Any]]:
    return [
        {
            "stage": "Not sharded" if stage == 0 else f"Stage {stage}",
            "volume": f"{rows[0].volume:g}x",
            "cells": [
                (size(row.size_bytes), bool(limit and row.size_bytes > limit)) for row in rows
            ],
        }
        for stage, rows in zero_rows(theory, RANKS)
    ]


PANE = Pane(id="memory", title="Memory", order=60, view=memory_views)
