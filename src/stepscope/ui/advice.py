"""Findings meet predictions: what each remedy would buy, and what would not help.

One rank is looked at, the one that decides the step. Nothing here may fail an explanation: what
goes wrong is a note.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.errors import NotCapturedError, StepscopeError
from stepscope.explain.rank_steps import own_ms
from stepscope.predict.whatifs import WHATIFS, settings_for_remedy
from stepscope.records.explanation import Advice
from stepscope.records.figures import significant
from stepscope.records.prediction import Setting
from stepscope.records.quality import Note
from stepscope.ui.whatif import (
    WORTH,
    bench_of,
    judge,
    labels,
    saved_ms,
    try_each,
    usual,
    verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.predict.whatif import Bench
    from stepscope.records.explanation import Explanation, Finding, RankExplanation, Remedy
    from stepscope.records.job import Job
    from stepscope.records.prediction import Prediction
    from stepscope.records.trace import Trace
    from stepscope.ui.html.whatif_grid import WhatIfGrid

# Until these are mended every prediction is about the wrong thing.
_BEFORE_ALL = frozenset({"not-training-together", "gloo-on-device"})


class Foresight(msgspec.Struct, frozen=True, kw_only=True):
    """What was made of one rank's step while its trace was there."""

    path: str
    advice: tuple[Advice, ...] = ()
    page: WhatIfGrid | None = None  # for the report, where one is asked for
    note: Note | None = None


def foresee(
    trace: Trace,
    rank: RankExplanation,
    job: Job | None = None,
    *,
    draw: bool = False,
    analysis: RankAnalysis | None = None,
) -> Foresight:
    """Never raises: a step that cannot be predicted has no advice."""
    try:
        return _foresee(bench_of(trace, rank, job, analysis), rank, draw)
    except NotCapturedError:
        return Foresight(path=rank.path)
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        return Foresight(path=rank.path, note=_not_predicted(error))


def foresee_again(explanation: Explanation, *, cache: bool, draw: bool = False) -> Foresight | None:
    """Of several ranks the one that decides the step: its trace is read once more."""
    from stepscope.explain.snapshot_rank import is_memory_only
    from stepscope.trace.discover import find_traces, on_disk
    from stepscope.trace.read import read_trace

    rank = deciding_rank(explanation)
    if is_memory_only(rank):
        return None
    try:
        with on_disk(find_traces(rank.path)[0]) as path:
            trace = read_trace(path, cache=cache)
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG") and not isinstance(error, StepscopeError):
            raise
        return Foresight(path=rank.path, note=_not_predicted(error))
    return foresee(trace, rank, explanation.job, draw=draw)


def deciding_rank(explanation: Explanation) -> RankExplanation:
    """The one that needs the most time of its own: the others wait for it."""
    return max(explanation.ranks, key=own_ms)


def _foresee(bench: Bench, rank: RankExplanation, draw: bool) -> Foresight:
    from stepscope.verify.track_record import history

    kept = history()
    tried = try_each(bench, _worth_trying(bench, rank.findings), kept)
    page = None
    if draw:
        from stepscope.ui.html.whatif_grid import lay_out

        page = lay_out(bench, tried, kept, rank)
    advice = tuple(_advice(prediction, rank) for prediction in tried.predictions)
    return Foresight(path=rank.path, advice=advice, page=page)


def _worth_trying(bench: Bench, findings: Iterable[Finding]) -> list[Setting]:
    """The usual ones, and what the findings name besides."""
    asked = {
        setting
        for finding in findings
        for remedy in finding.remedies
        for setting in settings_for_remedy(remedy.id)
    }
    usual_ones = [
        setting
        for setting in usual(bench)
        if setting.value not in WHATIFS[setting.name].saves_memory
    ]
    return [*usual_ones, *sorted(asked.difference(usual_ones), key=str)]


def _predicts(setting: str, remedy: Remedy) -> bool:
    return setting in map(str, settings_for_remedy(remedy.id))


def _advice(prediction: Prediction, rank: RankExplanation) -> Advice:
    saved, low, high = saved_ms(prediction)
    setting = str(prediction.settings[0])
    named = [
        finding.id
        for finding in rank.findings
        if any(_predicts(setting, remedy) for remedy in finding.remedies)
    ]
    return Advice(
        setting=setting,
        label=labels(prediction.settings),
        verdict=judge(prediction),
        summary=verdict(prediction),
        saved_ms=saved,
        saved_low_ms=low,
        saved_high_ms=high,
        baseline_ms=prediction.baseline_ms,
        predicted_ms=prediction.predicted_ms,
        low_ms=prediction.low_ms,
        high_ms=prediction.high_ms,
        throughput_factor=prediction.throughput_factor,
        findings=tuple(named),
        rank=rank.rank,
    )


def advise(explanation: Explanation, foresight: Foresight | None) -> Explanation:
    """Remedies with their numbers, the best first; the advice; and what to do next."""
    if foresight is None:
        return explanation
    if foresight.note is not None:
        return replace(explanation, quality=(*explanation.quality, foresight.note))
    if not foresight.advice:
        return explanation
    told = {each.setting: each for each in foresight.advice}
    whose = next(rank.rank for rank in explanation.ranks if rank.path == foresight.path)
    findings = tuple(
        _with_numbers(finding, told) if finding.rank in (None, whose) else finding
        for finding in explanation.findings
    )
    return replace(
        explanation,
        findings=findings,
        advice=tuple(replace(each, rank=whose) for each in foresight.advice),
        next=_next(explanation.next, findings, foresight.advice),
    )


def _with_numbers(finding: Finding, told: dict[str, Advice]) -> Finding:
    remedies = [_with_number(remedy, told) for remedy in finding.remedies]
    remedies.sort(key=lambda remedy: -(remedy.predicted_ms or 0.0))
    return replace(finding, remedies=tuple(remedies))


def _with_number(remedy: Remedy, told: dict[str, Advice]) -> Remedy:
    settings = map(str, settings_for_remedy(remedy.id))
    found = [told[each] for each in settings if each in told]
    if not found:
        return remedy
    best = max(found, key=lambda each: each.saved_ms)
    return replace(
        remedy,
        predicted_ms=best.saved_ms,
        low_ms=best.saved_low_ms,
        high_ms=best.saved_high_ms,
    )


def _next(said: str, findings: tuple[Finding, ...], advice: tuple[Advice, ...]) -> str:
    """The largest saving that is believable, whichever finding names it: its whole interval is
    above zero. What makes all other numbers moot comes first, and so does a remedy without a number
    for a loss beside which the saving is little."""
    top = findings[0]
    if top.id in _BEFORE_ALL and top.severity in ("high", "medium"):
        return said
    actions = {each.setting: _action(each, findings) for each in advice if _is_believable(each)}
    best = max(
        (each for each in advice if actions.get(each.setting)),
        key=lambda each: each.saved_ms,
        default=None,
    )
    if best is None or best.saved_ms < _little_of(top, best.baseline_ms):
        return _untried(said, top)
    saved = f"{significant(best.saved_ms)} of {significant(best.baseline_ms)} ms"
    return f"{actions[best.setting]} (predicted to save {saved})"


def _is_believable(advice: Advice) -> bool:
    return advice.saved_low_ms > 0 and advice.saved_ms >= WORTH * advice.baseline_ms


def _little_of(top: Finding, step_ms: float) -> float:
    """A tenth of what the leading finding loses, where something without a number can be done."""
    grave = top.of == "step" and top.severity in ("high", "medium")
    untried = any(remedy.predicted_ms is None for remedy in top.remedies)
    return 0.1 * top.share * step_ms if grave and untried else 0.0


def _action(advice: Advice, findings: tuple[Finding, ...]) -> str:
    """What to do for it, as the first finding that offers it says."""
    for finding in findings:
        for remedy in finding.remedies:
            if _predicts(advice.setting, remedy):
                return _how(remedy, finding)
    is_goal = WHATIFS[Setting.parse(advice.setting).name].is_goal
    return "" if is_goal else f"try {advice.label}"


def _how(remedy: Remedy, finding: Finding) -> str:
    """An even pace has a number, and how to get it is another remedy."""
    others = [each.summary for each in finding.remedies if not settings_for_remedy(each.id)]
    return others[0] if remedy.id == "no-straggler" and others else remedy.summary


def _untried(said: str, top: Finding) -> str:
    """The leading finding's first remedy that was not found useless."""
    useless = [each.summary for each in top.remedies if each.predicted_ms is not None]
    untried = [each.summary for each in top.remedies if each.predicted_ms is None]
    return untried[0] if said in useless and untried else said


def not_helping(advice: Iterable[Advice]) -> list[str]:
    """What was tried in vain, in a line or two."""
    lines = []
    for found, words in (
        ("no difference", f"no real difference (under {WORTH:.0%})"),
        ("slower", "slower"),
    ):
        names = [each.label for each in advice if each.verdict == found]
        if names:
            lines.append(f"{words}: {', '.join(names)}")
    return lines


def _not_predicted(error: Exception) -> Note:
    return Note(
        id="not-predicted",
        detail=f"what changes would buy could not be predicted: {_words(error)}",
    )


def _words(error: Exception) -> str:
    """A defect of ours is named; what is wrong with the input says it itself."""
    known = isinstance(error, StepscopeError)
    return str(error) if known else f"a defect in stepscope: {type(error).__name__}: {error}"
