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
    facts: list[Fact] = []
    if rank.device:
        facts.append(("Device", rank.device, ""))
    elif rank.kind == "cpu":
        facts.append(("Device", "CPU only", ""))
    else:
        facts.append(("Device", rank.kind, "The trace does not name it"))
    if rank.rank is not None:
        world = f" of {rank.world_size}" if rank.world_size else ""
        kind, _, number = rank.called.partition(" ")
        facts.append((kind.capitalize(), f"{number}{world if kind == 'rank' else ''}", ""))
    facts.append(_steps_fact(rank))
    if rank.steps.is_span and rank.run is None:
        facts.append(("Time covered", duration(rank.timeline.span_ns), ""))
    else:
        facts += _step_time_facts(rank.step_ms)
    overlap = rank.timeline.overlap
    if overlap is not None:
        facts.append(("Overlap", percent(overlap), "Communication hidden by compute"))
    facts.append(("Events", f"{rank.events:,}", ""))
    return facts


def _steps_fact(rank: RankExplanation) -> Fact:
    if rank.steps.is_span:
        return ("Steps", "none found", "The trace has no step marks, and nothing in it repeats")
    hints = {
        "profiler": "Marked by the profiler's schedule",
        "optimizer": "No step marks in the trace: taken from optimizer.step",
        "repeated": f"No step marks in the trace: found by repeating {rank.steps.repeats}",
    }
    return ("Steps", f"{len(rank.steps.steps)}", hints[rank.steps.source])


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
        facts.append(("Step, profiled", _ms(times.profiled), _profiled_hint(times)))
    return facts


def _profiled_hint(times: StepTime) -> str:
    if times.truth is None or times.profiled is None:
        return "The profiler itself slows the CPU: real steps are shorter"
    if times.truth > times.profiled:
        return "In the profiled window; the steps outside it took longer"
    return "In the profiled window, where the profiler itself slows the CPU"


def _ms(ms: float) -> str:
    return duration(ms * 1e6)


PANE = Pane(id="step", title="Step", order=14, view=step_view)
