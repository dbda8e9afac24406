"""Which remedies are tried, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulated_runs import made_up_fix

from stepscope.changes import APPLIED
from stepscope.changes.change import Effect
from stepscope.errors import UsageError
from stepscope.fix.named_changes import ChosenChange
from stepscope.records.script_facts import ScriptFacts
from stepscope.ui.tune import plan
from stepscope.ui.tune.plan import (
    FittingRemedies,
    LeftOut,
    PlannedRemedy,
    WantedRemedies,
    fitting_remedies,
    in_order,
)


def fix(
    name: str,
    effect: Effect = Effect.BIT_IDENTICAL,
    *,
    fits: Callable[[ScriptFacts, str], str | None] = lambda _facts, _value: None,
    values_of: Callable[[ScriptFacts], tuple[str, ...]] | None = None,
    **declared: Any,
) -> ChosenChange:
    made = made_up_fix(name, effect=effect)
    application = replace(made.application, **declared)
    change = replace(made.change, application=application)
    return replace(made, change=change, fix=replace(made.fix, fits=fits, values_of=values_of))


def fitting(
    monkeypatch: pytest.MonkeyPatch, *changes: ChosenChange, **wanted: object
) -> FittingRemedies:
    monkeypatch.setattr(plan, "applied_changes", lambda: changes)
    return fitting_remedies(ScriptFacts(), WantedRemedies(**wanted))  # type: ignore[arg-type]


def names(chosen: tuple[ChosenChange, ...]) -> list[str]:
    return list(map(str, chosen))


def test_every_value_of_what_fits_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fitting(monkeypatch, fix("a"), fix("w", values=("2", "4")))
    assert names(result.candidates) == ["a", "w=2", "w=4"]
    assert result.left_out == ()


def test_values_may_follow_from_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fitting(monkeypatch, fix("w", values_of=lambda facts: (str(facts.cores + 3),)))
    assert names(result.candidates) == ["w=3"]


def test_what_does_not_fit_is_named_once_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit = fix("w", values=("2", "4"), fits=lambda _facts, _value: "no loader")
    some = fix("b", values=("1", "9"), fits=lambda _f, value: "too large" if value == "9" else None)
    result = fitting(monkeypatch, unfit, some)
    assert result.left_out == (
        LeftOut(remedy="w", why="no loader"),
        LeftOut(remedy="b=9", why="too large"),
    )
    assert names(result.candidates) == ["b=1"]


def test_a_remedys_own_mistake_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fitting(monkeypatch, fix("a", fits=lambda _facts, _value: str(1 / 0)), fix("b"))
    assert names(result.candidates) == ["b"]
    assert "ZeroDivisionError" in result.left_out[0].why


def test_effects_beyond_what_is_allowed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fixes = [fix(effect.value, effect=effect) for effect in Effect]
    assert names(fitting(monkeypatch, *fixes).candidates) == ["bit-identical", "rounding"]
    result = fitting(monkeypatch, *fixes, allow=Effect.BIT_IDENTICAL)
    assert names(result.candidates) == ["bit-identical"]
    assert result.left_out[0].why == "it rounds differently. --allow rounding tries it"
    assert len(fitting(monkeypatch, *fixes, allow=Effect.TRAINING).candidates) == 4


def test_one_that_may_do_less_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = fix("w", effect=Effect.RANDOM, may_be=Effect.BIT_IDENTICAL)
    assert names(fitting(monkeypatch, workers).candidates) == ["w"]


def test_only_and_skip_name_remedies_or_single_values(monkeypatch: pytest.MonkeyPatch) -> None:
    fixes = [fix("a"), fix("w", values=("2", "4"))]
    assert names(fitting(monkeypatch, *fixes, only=("w",)).candidates) == ["w=2", "w=4"]
    assert names(fitting(monkeypatch, *fixes, only=("w=4",)).candidates) == ["w=4"]
    assert names(fitting(monkeypatch, *fixes, only=("w=7",)).candidates) == ["w=7"]
    assert names(fitting(monkeypatch, *fixes, skip=("w=4",)).candidates) == ["a", "w=2"]
    assert names(fitting(monkeypatch, *fixes, skip=("w",)).candidates) == ["a"]


def test_wrong_names_are_refused() -> None:
    with pytest.raises(UsageError, match="no change 'nonsense'"):
        WantedRemedies.parse(["nonsense"], [], "rounding")
    with pytest.raises(UsageError, match="no change 'nonsense'"):
        WantedRemedies.parse([], ["nonsense"], "rounding")


def test_what_costs_time_to_save_memory_is_tried_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver = fix("s", saves="memory")
    assert fitting(monkeypatch, saver).candidates == ()
    assert names(fitting(monkeypatch, saver, saves_memory=True).candidates) == ["s"]
    assert names(fitting(monkeypatch, saver, only=("s",)).candidates) == ["s"]


def test_what_waits_for_another_family_is_kept_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    late = fix("p", after=frozenset({"w"}), fits=lambda _facts, _value: "no workers")
    result = fitting(monkeypatch, late)
    assert names(result.late) == ["p"]
    assert result.left_out == (LeftOut(remedy="p", why="no workers"),)


def test_only_a_patch_is_a_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fitting(monkeypatch, fix("p", patch_only=True))
    assert result.candidates == ()
    assert names(result.proposals) == ["p"]


def test_the_largest_promise_comes_first_and_what_will_not_help_last() -> None:
    chosen = [made_up_fix(name) for name in ("none1", "useless", "good", "none2", "best")]
    predicted = {
        "good": PlannedRemedy(remedy="good", predicted_ms=9.0),
        "best": PlannedRemedy(remedy="best", predicted_ms=5.0),
        "useless": PlannedRemedy(remedy="useless", predicted_ms=10.0, hopeless=True),
    }
    order = [row.remedy for row in in_order(chosen, predicted)]
    assert order == ["best", "good", "none1", "none2", "useless"]


def test_every_real_remedy_answers_for_an_empty_script() -> None:
    result = fitting_remedies(ScriptFacts(), WantedRemedies())
    assert not [row for row in result.left_out if "a defect" in row.why]
    named = {name.partition("=")[0] for name in names((*result.candidates, *result.proposals))}
    named |= {row.remedy.partition("=")[0] for row in result.left_out}
    assert named == set(APPLIED)


def test_remedies_of_the_leading_finding_are_tried_before_larger_promises() -> None:
    chosen = [made_up_fix(name) for name in ("unknown", "best", "useless", "leads", "leads too")]
    predicted = {
        "best": PlannedRemedy(remedy="best", predicted_ms=5.0),
        "leads": PlannedRemedy(remedy="leads", predicted_ms=9.0),
        "useless": PlannedRemedy(remedy="useless", predicted_ms=10.0, hopeless=True),
    }
    order = [row.remedy for row in in_order(chosen, predicted, ("leads", "leads too", "useless"))]
    assert order == ["leads", "leads too", "best", "unknown", "useless"]
