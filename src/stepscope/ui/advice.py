"""Findings meet predictions: what each remedy would save, and what would not help.

Only the rank that decides the step is advised. Nothing here may fail an explanation: an error
becomes a note.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.errors import NotCapturedError, StepscopeError
from stepscope.explain.rank_steps import own_ms
from stepscope.predict.whatifs import WHATIFS, settings_for_remedy
from stepscope.records.explanation import Advice
from stepscope.records.figures import milliseconds, percent, significant, trimmed
from stepscope.records.prediction import Setting
from stepscope.records.quality import Note
from stepscope.ui.whatif import (
    WORTH,
    judge,
    labels,
    make_bench,
    saved_ms,
    try_each,
    usual,
    verdict,
    with_offered,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stepscope.explain.explain_job import JobTraces
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.predict.whatif import Bench
    from stepscope.records.explanation import Explanation, Finding, RankExplanation, Remedy
    from stepscope.records.job import Job
    from stepscope.records.prediction import Prediction
    from stepscope.records.tuning import TriedRemedy
    from stepscope.ui.html.whatif_grid import WhatIfGrid

# Until these are fixed, every prediction is about the wrong thing.
_BEFORE_ALL = frozenset({"not-training-together", "gloo-on-device"})
_MUCH_LARGER = 1 / 3  # the saving, over what the leading finding loses
_MOOT_WHEN_HIGH = "other-processes"  # every time is too long, and so is every saving


class RankAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What changes of one rank's step would save."""

    path: str
    advice: tuple[Advice, ...] = ()
    page: WhatIfGrid | None = None  # for the report, when one is asked for
    note: Note | None = None  # why nothing could be predicted


def advise_rank(
    analysis: RankAnalysis, rank: RankExplanation, job: Job | None = None, *, draw: bool = False
) -> RankAdvice:
    """Try the changes worth trying. Never raises: a step that cannot be predicted has no advice."""
    try:
        return _try_changes(make_bench(analysis, rank, job), rank, draw)
    except NotCapturedError:
        return RankAdvice(path=rank.path)
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        return RankAdvice(path=rank.path, note=_note_not_predicted(error))


def advise_slowest(
    traces: JobTraces, explanation: Explanation, *, draw: bool = False
) -> RankAdvice | None:
    """Read the rank that decides the job's step again, and advise it."""
    from stepscope.explain.untimed_rank import is_untimed

    rank = find_slowest(explanation)
    if is_untimed(rank):
        return None
    visit = partial(advise_rank, job=explanation.job, draw=draw)
    try:
        return traces.visit_here(rank.path, visit).results[0]
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG") and not isinstance(error, StepscopeError):
            raise
        return RankAdvice(path=rank.path, note=_note_not_predicted(error))


def find_slowest(explanation: Explanation) -> RankExplanation:
    """The rank that needs the most time of its own: the others wait for it."""
    return max(explanation.ranks, key=own_ms)


def _try_changes(bench: Bench, rank: RankExplanation, draw: bool) -> RankAdvice:
    from stepscope.verify.track_record import history

    past_promises = history()
    tried = try_each(bench, _list_changes(bench, rank.findings), past_promises)
    page = None
    if draw:
        from stepscope.ui.html.whatif_grid import lay_out

        page = lay_out(bench, tried, past_promises, rank)
    advice = tuple(_make_advice(prediction, rank) for prediction in tried.predictions)
    return RankAdvice(path=rank.path, advice=advice, page=page)


def _list_changes(bench: Bench, findings: Iterable[Finding]) -> list[Setting]:
    """The usual changes and those offered; what only saves memory is tried if it is offered."""
    for_time = [
        change for change in usual(bench) if change.value not in WHATIFS[change.name].saves_memory
    ]
    return with_offered(for_time, findings)


def _predicts(setting: str, remedy: Remedy) -> bool:
    return setting in map(str, settings_for_remedy(remedy.id))


def _make_advice(prediction: Prediction, rank: RankExplanation) -> Advice:
    saved, low, high = saved_ms(prediction)
    setting = str(prediction.settings[0])
    findings = [
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
        findings=tuple(findings),
        rank=rank.rank,
    )


def add_advice(
    explanation: Explanation,
    rank_advice: RankAdvice | None,
    tried: Mapping[str, TriedRemedy] | None = None,
) -> Explanation:
    """Give remedies their numbers, the best first; add the advice, and what to do next.

    `tried`: by remedy id, what was measured for this command already.
    """
    if rank_advice is None:
        return explanation
    if rank_advice.note is not None:
        return replace(explanation, quality=(*explanation.quality, rank_advice.note))
    if not rank_advice.advice:
        return explanation
    changes = tuple(
        replace(advice, tried=_find_trial(advice.setting, tried or {}))
        for advice in rank_advice.advice
    )
    by_setting = {advice.setting: advice for advice in changes}
    number = next(rank.rank for rank in explanation.ranks if rank.path == rank_advice.path)
    findings = tuple(
        _with_numbers(finding, by_setting) if finding.rank in (None, number) else finding
        for finding in explanation.findings
    )
    return replace(
        explanation,
        findings=findings,
        advice=tuple(replace(advice, rank=number) for advice in changes),
        next=_choose_next(explanation.next, findings, changes),
    )


def _find_trial(setting: str, tried: Mapping[str, TriedRemedy]) -> TriedRemedy | None:
    """Of a remedy with several what-ifs, the one that was tried with the very value."""
    for name, result in tried.items():
        settings = [*map(str, settings_for_remedy(name))]
        if setting in settings and (len(settings) == 1 or result.remedy == setting):
            return result
    return None


def _with_numbers(finding: Finding, by_setting: dict[str, Advice]) -> Finding:
    remedies = [_with_number(remedy, by_setting) for remedy in finding.remedies]
    remedies.sort(key=lambda remedy: -_known_saving(remedy))
    return replace(finding, remedies=tuple(remedies))


def _known_saving(remedy: Remedy) -> float:
    """Measured, else predicted, per step."""
    saved = remedy.predicted_ms if remedy.tried is None else remedy.measured_ms
    return saved or 0.0


def _with_number(remedy: Remedy, by_setting: dict[str, Advice]) -> Remedy:
    names = map(str, settings_for_remedy(remedy.id))
    settings = [setting for setting in names if setting in by_setting]
    if not settings:
        return remedy
    best = max((by_setting[setting] for setting in settings), key=lambda advice: advice.saved_ms)
    return replace(
        remedy, predicted_ms=best.saved_ms, low_ms=best.saved_low_ms, high_ms=best.saved_high_ms
    )


def _choose_next(now: str, findings: tuple[Finding, ...], advice: tuple[Advice, ...]) -> str:
    """The largest saving whose whole interval is above zero, whichever finding names it.

    Two things come before it: what makes all predictions moot, and a remedy without a number for a
    loss that is much larger than the saving.
    """
    top = findings[0]
    if top.id in _BEFORE_ALL and top.severity in ("high", "medium"):
        return now
    if top.id == _MOOT_WHEN_HIGH and top.severity == "high":
        return now
    believable = ((change, _describe(change, findings)) for change in advice if _is_sure(change))
    actions = [(change, action) for change, action in believable if action]
    if not actions:
        return _first_untried(now, top)
    best, action = max(actions, key=lambda pair: pair[0].saved_ms)
    if best.saved_ms < _least_saving(top, best.baseline_ms):
        return _first_untried(now, top)
    saved = f"{significant(best.saved_ms)} of {milliseconds(best.baseline_ms)}"
    return f"{action} (predicted to save {saved})"


def _is_sure(advice: Advice) -> bool:
    """What was tried and not kept is not advised again."""
    if advice.tried is not None and not advice.tried.kept:
        return False
    return advice.saved_low_ms > 0 and advice.saved_ms >= WORTH * advice.baseline_ms


def _least_saving(top: Finding, step_ms: float) -> float:
    """A part of what the leading finding loses, if it offers a remedy without a number. What lies
    beside the steps is no step's to save: its remedy gives way only to a large saving."""
    grave = top.of in ("step", "run") and top.severity in ("high", "medium")
    untried = any(remedy.predicted_ms is None for remedy in top.remedies)
    part = _MUCH_LARGER if top.of == "step" else 0.5
    return part * top.share * step_ms if grave and untried else 0.0


def _describe(advice: Advice, findings: tuple[Finding, ...]) -> str:
    """What to do, in the words of the first finding that offers it."""
    for finding in findings:
        for remedy in finding.remedies:
            if _predicts(advice.setting, remedy):
                return _how_to(remedy, finding)
    is_goal = WHATIFS[Setting.parse(advice.setting).name].is_goal
    return "" if is_goal else f"try {advice.label}"


def _how_to(remedy: Remedy, finding: Finding) -> str:
    """Ranks of equal speed have a number; another remedy says how to get there."""
    others = [other.summary for other in finding.remedies if not settings_for_remedy(other.id)]
    return others[0] if remedy.id == "no-straggler" and others else remedy.summary


def _first_untried(now: str, top: Finding) -> str:
    """The leading finding's first remedy that no prediction found useless."""
    known = [remedy.predicted_ms is not None or _in_vain(remedy) for remedy in top.remedies]
    pairs = [*zip(top.remedies, known, strict=True)]
    useless = [remedy.summary for remedy, is_known in pairs if is_known]
    untried = [remedy.summary for remedy, is_known in pairs if not is_known]
    return untried[0] if now in useless and untried else now


def _in_vain(remedy: Remedy) -> bool:
    return remedy.tried is not None and not remedy.tried.kept


def not_helping(advice: Iterable[Advice]) -> list[str]:
    """The changes that were tried in vain, in a line or two."""
    lines = []
    for judged, words in (
        ("no difference", f"no real difference (under {trimmed(percent(WORTH))})"),
        ("slower", "slower"),
    ):
        names = [change.label for change in advice if change.verdict == judged]
        if names:
            lines.append(f"{words}: {', '.join(names)}")
    return lines


def _note_not_predicted(error: Exception) -> Note:
    known = isinstance(error, StepscopeError)
    reason = str(error) if known else f"a defect in stepscope: {type(error).__name__}: {error}"
    return Note(
        id="not-predicted", detail=f"what changes would save could not be predicted: {reason}"
    )
