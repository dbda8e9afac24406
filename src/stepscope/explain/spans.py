"""A trace without steps, explained as a stretch of time: no step's length, nothing to predict."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.errors import NotCapturedError
from stepscope.explain.untimed_rank import is_untimed
from stepscope.records.explanation import Headline
from stepscope.records.figures import duration, percent
from stepscope.records.words import sentence

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.explanation import Explanation, Finding, RankExplanation

MARK_STEPS = (
    "Mark the steps: call prof.step() after each of them, or record them with "
    "`stepscope run -- python train.py`"
)
_OF_STEP_MS = re.compile(r"of the ([\d,.]+ \w+) step")


def refuse_span(analysis: RankAnalysis) -> None:
    """NotCapturedError where no step was found: there is none to predict."""
    if analysis.steps.is_span and analysis.run is None:
        raise NotCapturedError(
            f"{analysis.trace.path} has no step marks and repeats nothing, so there is no step to "
            f"predict: {MARK_STEPS.partition(': ')[2]}"
        )


def covers_span(explanation: Explanation) -> bool:
    """Whether no rank's trace shows a step."""
    return all(
        rank.steps.is_span and rank.run is None and not is_untimed(rank)
        for rank in explanation.ranks
    )


def tell_span(explanation: Explanation) -> Explanation:
    """The same without a word about a step, if no trace shows one."""
    if not covers_span(explanation) or not any(rank.events for rank in explanation.ranks):
        return explanation
    rank = max(explanation.ranks, key=lambda rank: rank.timeline.span_ns)
    evidence = [line for finding in explanation.findings[:1] for line in finding.evidence[:1]]
    return replace(
        explanation,
        verdict=f"No training steps found: {_what_it_covers(rank)}",
        why=sentence(_of_time(evidence[0])) if evidence else "",
        next=MARK_STEPS,
        headline=Headline(finding=explanation.findings[0].id),
        findings=tuple(map(_of_span, explanation.findings)),
    )


def _what_it_covers(rank: RankExplanation) -> str:
    timeline = rank.timeline
    busy = 1 - timeline.idle_ns / timeline.span_ns if timeline.span_ns else 0.0
    who = "operators run" if rank.kind == "cpu" else "the GPU works"
    return (
        f"The trace has no step marks. It covers {duration(timeline.span_ns)}, and "
        f"{who} for {percent(busy)} of that."
    )


def _of_span(finding: Finding) -> Finding:
    """Remedies change steps: a start-up is no step."""
    return replace(
        finding,
        summary=_of_time(finding.summary),
        evidence=tuple(map(_of_time, finding.evidence)),
        remedies=(),
        try_command=None,
        of="trace" if finding.of == "step" else finding.of,
    )


def _of_time(text: str) -> str:
    text = _OF_STEP_MS.sub(r"of \1", text)
    return text.replace("of the step", "of the trace")
