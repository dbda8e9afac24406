"""Choose what to advise: predict what each remedy would save, and word the explanation's
first lines from findings and predictions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from stepscope.changes import APPLIED, PREDICTED
from stepscope.errors import NotCapturedError, StepscopeError
from stepscope.explain.explain_job import JobTraces
from stepscope.explain.findings import NO_LOSS
from stepscope.explain.incomplete_ranks import covers_span
from stepscope.explain.job.rank_part import own_ms
from stepscope.explain.rank import Visit
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.explain.verdict import leading_remedies, without_remedy
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs import settings_for_remedy
from stepscope.records.explanation import (
    Advice,
    Explanation,
    Finding,
    Headline,
    RankExplanation,
    Remedy,
)
from stepscope.records.job import Job
from stepscope.records.prediction import PredictedGain, Prediction, Setting
from stepscope.records.quality import Note
from stepscope.text.figures import milliseconds, percent, trimmed
from stepscope.ui.topics.whatif import (
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
    from stepscope.records.comparison import TriedRemedy
    from stepscope.trace.files import Progress
    from stepscope.ui.html.picture import RankPicture
    from stepscope.ui.html.whatif_grid import WhatIfGrid

# Only the rank that decides the step is advised. Nothing here may fail an explanation: an error
# becomes a note.


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
    from stepscope.explain.incomplete_ranks import is_untimed

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
        change for change in usual(bench) if change.value not in PREDICTED[change.name].saves_memory
    ]
    return with_offered(for_time, findings)


def _make_advice(prediction: Prediction, rank: RankExplanation) -> Advice:
    saved, low, high = saved_ms(prediction)
    setting = str(prediction.settings[0])
    findings = [
        finding.id
        for finding in rank.findings
        if any(setting in map(str, settings_for_remedy(remedy.id)) for remedy in finding.remedies)
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


# The first lines: the problem, the remedy of that very problem, and what else would help.
#
# `next` treats the cause that the verdict names, however much another change would save: those
# stand on the line after it.

# Until these are fixed, every prediction is about the wrong thing.
_BEFORE_ALL = ("not-training-together", "gloo-on-device")
_MOOT_WHEN_HIGH = "other-processes"  # every time is too long, and so is every saving
_MUCH_LARGER = 1 / 3  # the saving, over what the leading finding loses
_HARDLY = 0.05  # of the step
_SAME_STEP = 0.02  # ranks of one job differ by less: then the job's step is named
_MOST_OTHERS = 2


def with_headline(explanation: Explanation) -> Explanation:
    """Choose `next` among the remedies of the leading finding; name the best other changes."""
    top = explanation.findings[0]
    if _makes_moot(top) or covers_span(explanation):
        return explanation
    chosen, words = _choose(explanation, top)
    return replace(
        explanation,
        next=words,
        headline=Headline(finding=top.id, remedy=chosen.id if chosen else None),
        also=_describe_others(explanation, top, chosen),
    )


def _makes_moot(top: Finding) -> bool:
    if top.id in _BEFORE_ALL:
        return top.severity in ("high", "medium")
    return top.id == _MOOT_WHEN_HIGH and top.severity == "high"


def _choose(explanation: Explanation, top: Finding) -> tuple[Remedy | None, str]:
    """The remedy that surely saves most, unless it saves little of a large loss and another one,
    which nobody can predict, may save more."""
    remedies = [
        remedy for remedy in leading_remedies(top) if remedy.tried is None or remedy.tried.kept
    ]
    sure = sorted(filter(_surely_helps, remedies), key=known_saving, reverse=True)
    unpredicted = [remedy for remedy in remedies if remedy.gain is None and remedy.tried is None]
    if sure and (not unpredicted or known_saving(sure[0]) >= _least_saving(explanation, top)):
        return sure[0], f"{_how_to(sure[0], top)} ({_promise(explanation, sure[0])})"
    least = _least_saving(explanation, top)
    for remedy in sorted(remedies, key=known_saving, reverse=True):
        gain = remedy.gain if remedy.tried is None else None
        if gain is not None and gain.saved_ms >= least and may_pay(gain):
            return remedy, f"{_how_to(remedy, top)} ({gain.sentence()})"
    if unpredicted:
        return unpredicted[0], unpredicted[0].summary + _doubt(unpredicted[0])
    if sure:
        return sure[0], f"{_how_to(sure[0], top)} ({_promise(explanation, sure[0])})"
    for remedy in remedies:
        gain = remedy.gain
        if gain is not None and gain.is_known and not gain.is_sure:
            return remedy, f"{_how_to(remedy, top)} ({gain.sentence()})"
    return None, _without_remedy(explanation, top)


def may_pay(gain: PredictedGain) -> bool:
    """The interval reaches hardly beyond the present step: a change to try, if not a promise."""
    worth = gain.saved_ms >= WORTH * gain.step_ms
    return worth and gain.is_known and gain.low_ms > -_HARDLY * gain.step_ms


def _surely_helps(remedy: Remedy) -> bool:
    if remedy.tried is not None:
        return known_saving(remedy) > 0
    return remedy.gain is not None and _is_worth_having(remedy.gain)


def _is_worth_having(gain: PredictedGain) -> bool:
    return gain.low_ms > 0 and gain.is_known and gain.saved_ms >= WORTH * gain.step_ms


def known_saving(remedy: Remedy) -> float:
    """Measured, else predicted, per step."""
    saved = remedy.predicted_ms if remedy.tried is None else remedy.measured_ms
    return saved or 0.0


def _least_saving(explanation: Explanation, top: Finding) -> float:
    """A part of what the leading finding loses. What lies beside the steps is no step's to save:
    its remedy gives way only to a large saving."""
    if top.of not in ("step", "run") or top.severity not in ("high", "medium"):
        return 0.0
    part = _MUCH_LARGER if top.of == "step" else 0.5
    return part * top.share * explanation.budget.step_ms


def _how_to(remedy: Remedy, finding: Finding) -> str:
    """Ranks of equal speed have a number; another remedy says how to get there."""
    others = [other.summary for other in finding.remedies if not settings_for_remedy(other.id)]
    return others[0] if remedy.id == "no-straggler" and others else remedy.summary


def _promise(explanation: Explanation, remedy: Remedy) -> str:
    if remedy.tried is not None:
        return f"{remedy.tried.label}: {remedy.tried.words}"
    gain = remedy.gain
    assert gain is not None  # it surely helps
    words = gain.sentence(_step_words(explanation, gain))
    if not words.startswith("saves "):
        return words
    # The whole loss, as if the goal were reached: how far a change gets there is not predicted.
    is_goal = any(PREDICTED[setting.name].is_goal for setting in settings_for_remedy(remedy.id))
    return f"predicted to save {'at most ' if is_goal else ''}{words.removeprefix('saves ')}"


def _doubt(remedy: Remedy) -> str:
    """Of a change to the training whose gain nobody predicted; looking somewhere costs nothing."""
    is_change = bool(settings_for_remedy(remedy.id)) or remedy.id in APPLIED
    return " (may help: its gain is not predicted)" if is_change else ""


def _step_words(explanation: Explanation, gain: PredictedGain) -> str:
    """The step that the first line shows, unless the rank advised has another one."""
    step_ms = explanation.budget.step_ms
    if len(explanation.ranks) == 1 or not step_ms:
        return milliseconds(gain.step_ms)
    if abs(gain.step_ms / step_ms - 1) <= _SAME_STEP:
        return milliseconds(step_ms)
    whose = {advice.rank for advice in explanation.advice}
    called = [rank.called for rank in explanation.ranks if rank.rank in whose]
    return f"{called[0]}'s {milliseconds(gain.step_ms)}" if called else milliseconds(gain.step_ms)


def _without_remedy(explanation: Explanation, top: Finding) -> str:
    """A step in which nothing is wrong may still be made faster."""
    if top.id not in NO_LOSS:
        return without_remedy(top)
    best = next(iter(_sure_changes(explanation)), None)
    if best is None or best.gain.changes_samples:
        return without_remedy(top)
    return f"To go faster still, try {best.label} ({_gain_of(explanation, best)})"


def _describe_others(explanation: Explanation, top: Finding, chosen: Remedy | None) -> str:
    """The best changes that treat something else; none that is an alternative to the remedy."""
    taken = {str(setting) for remedy in top.remedies for setting in settings_for_remedy(remedy.id)}
    if chosen is None or chosen.id != "batch":
        taken -= {str(setting) for setting in settings_for_remedy("batch")}
    others = [change for change in _sure_changes(explanation) if change.setting not in taken]
    if top.id in NO_LOSS and chosen is None and others and not others[0].gain.changes_samples:
        others = others[1:]  # `next` names it
    best = {_kind(change): change for change in reversed(others)}  # of several values the best
    others = [change for change in others if best[_kind(change)] is change]
    named = [f"{change.label}: {_gain_of(explanation, change)}" for change in others[:_MOST_OTHERS]]
    return "; ".join(named)


def _kind(change: Advice) -> str:
    return Setting.parse(change.setting).name


def _sure_changes(explanation: Explanation) -> Sequence[Advice]:
    """Changes that somebody can make and that surely pay, those of the step's own time first."""
    sure = [
        change
        for change in explanation.advice
        if change.tried is None
        and _is_worth_having(change.gain)
        and not PREDICTED[Setting.parse(change.setting).name].is_goal
    ]
    return sorted(sure, key=lambda change: (change.gain.changes_samples, -change.saved_ms))


def _gain_of(explanation: Explanation, change: Advice) -> str:
    return change.gain.sentence(_step_words(explanation, change.gain))


# What a report takes from a rank while its trace is in memory: its picture, and the advice.

# Each drawn rank adds up to half a megabyte to the report; the tables of all ranks are there.
DRAWN_RANKS = 16


class RankLook(NamedTuple):
    """One rank's visit; what was not asked for is None."""

    picture: RankPicture | None
    advice: RankAdvice | None


def look_at_rank(
    analysis: RankAnalysis, rank: RankExplanation, *, draw: bool, advise: bool = False
) -> RankLook:
    """Draw the rank's picture, predict what changes would save, or both."""
    picture = advice = None
    if draw:
        from stepscope.explain.compiled.graph_kernels import open_regions
        from stepscope.ui.html.picture import draw_rank

        picture = draw_rank(analysis.trace, rank, analysis.compute_once(open_regions))
    if advise:
        advice = advise_rank(analysis, rank, draw=draw)
    return RankLook(picture, advice)


def choose_look(traces: JobTraces, *, draw: bool) -> Visit[RankLook] | None:
    """A single rank gets its advice at once. Which of several needs advice shows only when all are
    explained, so these are drawn and nothing else."""
    if traces.is_single:
        return partial(look_at_rank, draw=draw, advise=True)
    return partial(look_at_rank, draw=True) if draw else None


# The rank that decides a job's step, ready for what-ifs.


def open_slowest(
    *paths: str, cache: bool, progress: Progress | None = None
) -> tuple[Bench, RankExplanation, str]:
    """Also a word about which rank that is."""
    traces = JobTraces(paths, cache=cache)
    chosen, job = str(traces.files[0]), None
    about = Path(chosen).name
    if len(traces.files) > 1:
        explanation, _ = traces.explain(progress=progress)
        slowest = find_slowest(explanation)
        chosen, job = slowest.path, explanation.job
        about = f"{slowest.called} of {len(explanation.ranks)}, the slowest"
    rank, benches = traces.visit_here(chosen, partial(make_bench, job=job), progress)
    if not benches:
        raise NotCapturedError(f"{chosen} is a memory snapshot: it holds no step to change")
    return benches[0], rank, about
