"""Findings meet predictions: what each remedy would save, and what would not help.

Only the rank that decides the step is advised. Nothing here may fail an explanation: an error
becomes a note.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.errors import NotCapturedError, StepscopeError
from stepscope.explain.rank_steps import own_ms
from stepscope.predict.whatifs import WHATIFS, settings_for_remedy
from stepscope.records.explanation import Advice
from stepscope.records.figures import percent, trimmed
from stepscope.records.quality import Note
from stepscope.ui.headline import known_saving, may_pay, with_headline
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
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope.explain.explain_job import JobTraces
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.predict.whatif import Bench
    from stepscope.records.explanation import Explanation, Finding, RankExplanation, Remedy
    from stepscope.records.job import Job
    from stepscope.records.prediction import Prediction, Setting
    from stepscope.records.tuning import TriedRemedy
    from stepscope.ui.html.whatif_grid import WhatIfGrid


class RankAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What changes of one rank's step would save."""

    path: str
    advice: tuple[Advice, ...] = ()
    pointless: frozenset[str] = frozenset()  # settings that the step has nothing to change for
    page: WhatIfGrid | None = None  # for the report, when one is asked for
    note: Note | None = None  # why something could not be predicted


def advise_rank(
    analysis: RankAnalysis,
    rank: RankExplanation,
    job: Job | None = None,
    *,
    draw: bool = False,
    paths: Sequence[str] = (),
) -> RankAdvice:
    """Try the changes worth trying. Never raises: a step that cannot be predicted has no advice."""
    try:
        return _try_changes(make_bench(analysis, rank, job), rank, draw, paths)
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
    paths = _job_paths(traces.paths)
    visit = partial(advise_rank, job=explanation.job, draw=draw, paths=paths)
    try:
        return traces.visit_here(rank.path, visit).results[0]
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG") and not isinstance(error, StepscopeError):
            raise
        return RankAdvice(path=rank.path, note=_note_not_predicted(error))


def _job_paths(paths: Sequence[str | Path]) -> list[str]:
    """The run folder, where several are traces of its ranks."""
    traces = [Path(path) for path in paths]
    folders = {trace.parent.parent for trace in traces}
    in_one = len(paths) > 1 and len(folders) == 1
    if in_one and all(trace.parent.name.startswith("rank-") for trace in traces):
        return [str(folders.pop())]
    return [str(path) for path in paths]


def find_slowest(explanation: Explanation) -> RankExplanation:
    """The rank that needs the most time of its own: the others wait for it."""
    return max(explanation.ranks, key=own_ms)


def _try_changes(
    bench: Bench, rank: RankExplanation, draw: bool, paths: Sequence[str]
) -> RankAdvice:
    from stepscope.verify.track_record import history

    past_promises = history()
    tried = try_each(bench, _list_changes(bench, rank.findings), past_promises)
    page = None
    if draw:
        from stepscope.ui.html.whatif_grid import lay_out

        page = lay_out(bench, tried, past_promises, rank, paths)
    advice = tuple(_make_advice(prediction, rank) for prediction in tried.predictions)
    pointless = frozenset(map(str, tried.pointless))
    note = _note_defects(tried.defects) if tried.defects else None
    return RankAdvice(path=rank.path, advice=advice, pointless=pointless, page=page, note=note)


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
        explanation = replace(explanation, quality=(*explanation.quality, rank_advice.note))
        if not rank_advice.advice:
            return explanation
    changes = tuple(
        replace(advice, tried=_find_trial(advice.setting, tried or {}))
        for advice in rank_advice.advice
    )
    by_setting = {advice.setting: advice for advice in changes}
    number = next(rank.rank for rank in explanation.ranks if rank.path == rank_advice.path)
    findings = tuple(
        _with_numbers(finding, by_setting, rank_advice.pointless)
        if finding.rank in (None, number)
        else finding
        for finding in explanation.findings
    )
    advice = tuple(replace(advice, rank=number) for advice in changes)
    return with_headline(replace(explanation, findings=findings, advice=advice))


def _find_trial(setting: str, tried: Mapping[str, TriedRemedy]) -> TriedRemedy | None:
    """Of a remedy with several what-ifs, the one that was tried with the very value."""
    for name, result in tried.items():
        settings = [*map(str, settings_for_remedy(name))]
        if setting in settings and (len(settings) == 1 or result.remedy == setting):
            return result
    return None


def _with_numbers(
    finding: Finding, by_setting: dict[str, Advice], pointless: frozenset[str]
) -> Finding:
    """Without remedies that the step has nothing to change for."""
    remedies = [
        _with_number(remedy, by_setting)
        for remedy in finding.remedies
        if remedy.tried is not None or not _is_pointless(remedy, pointless)
    ]
    remedies.sort(key=lambda remedy: -known_saving(remedy))
    return replace(finding, remedies=tuple(remedies))


def _is_pointless(remedy: Remedy, pointless: frozenset[str]) -> bool:
    settings = settings_for_remedy(remedy.id)
    return bool(settings) and pointless.issuperset(map(str, settings))


def _with_number(remedy: Remedy, by_setting: dict[str, Advice]) -> Remedy:
    names = map(str, settings_for_remedy(remedy.id))
    settings = [setting for setting in names if setting in by_setting]
    if not settings:
        return remedy
    best = max((by_setting[setting] for setting in settings), key=lambda advice: advice.saved_ms)
    gain = best.gain
    return replace(
        remedy,
        summary=_value_words(best) or remedy.summary,
        predicted_ms=gain.saved_ms,
        low_ms=gain.low_ms,
        high_ms=gain.high_ms,
        step_ms=gain.step_ms,
        changed_ms=gain.changed_ms,
        samples_factor=gain.samples_factor,
    )


def _value_words(best: Advice) -> str:
    """Of a remedy whose value is predicted: the value, where it saves time, if not surely."""
    name, _, value = best.setting.partition("=")
    if name != "loader-workers" or not may_pay(best.gain):
        return ""
    none = ": the training thread makes its batches" if value == "0" else ""
    verb = "Set" if best.gain.is_sure else "Try"
    return f"{verb} num_workers={value} of the DataLoader{none}"


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


def _note_defects(defects: tuple[str, ...]) -> Note:
    return Note(
        id="not-predicted",
        detail=f"some changes could not be predicted: {'; '.join(defects)}",
        count=len(defects),
    )


def _note_not_predicted(error: Exception) -> Note:
    known = isinstance(error, StepscopeError)
    reason = str(error) if known else f"a defect in stepscope: {type(error).__name__}: {error}"
    return Note(
        id="not-predicted", detail=f"the effect of changes could not be predicted: {reason}"
    )
