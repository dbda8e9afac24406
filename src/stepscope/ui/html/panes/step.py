"""Where a step goes, and the facts about each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.explain.incomplete_ranks import is_untimed
from stepscope.records.explanation import RankExplanation, StepTime
from stepscope.text.figures import duration, percent
from stepscope.ui.html.pane import Pane, ReportData, rank_label
from stepscope.ui.html.render import slices

if TYPE_CHECKING:
    Fact = tuple[str, str, str]  # label, value, hint


def step_view(report: ReportData) -> dict[str, Any]:
    return {
        "explanation": report.explanation,
        "timed": report.is_timed,
        "slices": slices(report.explanation.budget),
        "ranks": [
            {
                "label": rank_label(rank),
                "facts": [] if is_untimed(rank) else _facts(rank),
                "slices": slices(rank.budget),
                "step_ms": rank.budget.step_ms,
                "quality": [(note.id, note.detail) for note in (*report.notes, *rank.quality)],
            }
            for rank in report.ranks
        ],
    }


def _facts(rank: RankExplanation) -> list[Fact]:
    unnamed = ("CPU only", "") if rank.kind == "cpu" else (rank.kind, "The trace does not name it")
    facts: list[Fact] = [("Device", *((rank.device, "") if rank.device else unnamed))]
    if rank.rank is not None:
        world = f" of {rank.world_size}" if rank.world_size else ""
        kind, _, number = rank.called.partition(" ")
        facts.append((kind.capitalize(), f"{number}{world if kind == 'rank' else ''}", ""))
    if rank.steps.is_span:
        hint = "The trace has no step marks, and nothing in it repeats"
        facts.append(("Steps", "none found", hint))
    else:
        hints = {
            "profiler": "Marked by the profiler's schedule",
            "optimizer": "No step marks in the trace: taken from optimizer.step",
            "repeated": f"No step marks in the trace: found by repeating {rank.steps.repeats}",
        }
        facts.append(("Steps", f"{len(rank.steps.steps)}", hints[rank.steps.source]))
    if rank.steps.is_span and rank.run is None:
        facts.append(("Time covered", duration(rank.timeline.span_ns), ""))
    else:
        facts += _step_time_facts(rank.step_ms)
    overlap = rank.timeline.overlap
    if overlap is not None:
        facts.append(("Overlap", percent(overlap), "Communication hidden by compute"))
    return [*facts, ("Events", f"{rank.events:,}", "")]


def _step_time_facts(times: StepTime) -> list[Fact]:
    facts: list[Fact] = []
    if times.truth is not None:
        facts.append(("Step", _ms(times.truth), "Measured without the profiler"))
    if times.corrected is not None and times.truth is None:
        span = ""
        if times.low is not None and times.high is not None:
            span = f", between {_ms(times.low)} and {_ms(times.high)}"
        hint = f"Estimated without the profiler's overhead{span}"
        facts.append(("Step, corrected", _ms(times.corrected), hint))
    if times.profiled is not None:
        hint = "The profiler itself slows the CPU: real steps are shorter"
        if times.truth is not None:
            hint = "In the profiled window, where the profiler itself slows the CPU"
            if times.truth > times.profiled:
                hint = "In the profiled window; the steps outside it took longer"
        facts.append(("Step, profiled", _ms(times.profiled), hint))
    return facts


def _ms(ms: float) -> str:
    return duration(ms * 1e6)


PANE = Pane(id="step", title="Step", order=14, view=step_view)
