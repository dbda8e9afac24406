"""The first lines: the problem, the remedy of that very problem, and what else would help.

`next` treats the cause that the verdict names, however much another change would save: those
stand on the line after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.findings import NO_LOSS
from stepscope.explain.spans import covers_span
from stepscope.explain.verdict import leading_remedies, without_remedy
from stepscope.fix.remedies import FIXES
from stepscope.predict.whatifs import WHATIFS, settings_for_remedy
from stepscope.records.explanation import Headline
from stepscope.records.figures import milliseconds
from stepscope.records.prediction import Setting
from stepscope.ui.whatif import WORTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Advice, Explanation, Finding, Remedy
    from stepscope.records.gain import PredictedGain

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
    remedies = [remedy for remedy in leading_remedies(top) if not _in_vain(remedy)]
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


def _in_vain(remedy: Remedy) -> bool:
    return remedy.tried is not None and not remedy.tried.kept


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
    is_goal = any(WHATIFS[setting.name].is_goal for setting in settings_for_remedy(remedy.id))
    return f"predicted to save {'at most ' if is_goal else ''}{words.removeprefix('saves ')}"


def _doubt(remedy: Remedy) -> str:
    """Of a change to the training whose gain nobody predicted; looking somewhere costs nothing."""
    is_change = bool(settings_for_remedy(remedy.id)) or remedy.id in FIXES
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
        and not WHATIFS[Setting.parse(change.setting).name].is_goal
    ]
    return sorted(sure, key=lambda change: (change.gain.changes_samples, -change.saved_ms))


def _gain_of(explanation: Explanation, change: Advice) -> str:
    return change.gain.sentence(_step_words(explanation, change.gain))
