"""Remedies that are predicted to do far more together run together first."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_runs import (
    TOOK_S,
    CrashesTogether,
    SimulatedCommand,
    contenders,
    made_up_fix,
    searched,
)

from stepscope.records.comparison import TriedConfiguration
from stepscope.ui.tune.contenders import OUT_OF_TIME
from stepscope.ui.tune.plan import Journal, PlannedCombination, TunePlan, TuneStart
from stepscope.ui.tune.result import tune_result
from stepscope.ui.tune.search import Search


def test_what_is_predicted_together_is_kept_without_trying_each_alone() -> None:
    """As bf16 and a CUDA graph: each alone saves little, because the other limits the step."""
    both = {frozenset("ab"): 0.25}
    command = SimulatedCommand({"a": 0.9, "b": 0.95}, together=both)
    search = searched(command, contenders(*map(made_up_fix, "ab")), together=("a", "b"))
    assert search.kept == ("a", "b")
    assert command.asked[:3] == [(), (), ("a", "b")]
    assert search.final is not None
    assert search.final.base == ()
    assert search.final.kept


def test_each_member_runs_without_the_others_help_once_and_a_clear_loss_settles_it() -> None:
    command = SimulatedCommand({"a": 0.5, "b": 0.8, "c": 0.7})
    fixes = contenders(*map(made_up_fix, "abc"))
    search = searched(command, fixes, together=("a", "c", "b"))
    assert search.kept == ("a", "b", "c")
    assert [test.challenger for test in search.tests] == [("a", "b", "c")]
    for rest in (("a", "c"), ("a", "b"), ("b", "c")):
        assert command.asked.count(rest) == 1


def test_a_member_that_adds_nothing_is_dropped_and_the_rest_is_confirmed() -> None:
    command = SimulatedCommand({"a": 0.5, "b": 0.8, "idle": 1.0})
    fixes = contenders(*map(made_up_fix, ("a", "b", "idle")))
    search = searched(command, fixes, together=("a", "b", "idle"))
    assert search.kept == ("a", "b")
    assert search.final is not None
    assert (search.final.base, search.final.challenger) == ((), ("a", "b"))
    assert search.final.kept


def test_two_members_of_which_one_is_enough_leave_one() -> None:
    both = {frozenset("ab"): 2.0}
    command = SimulatedCommand({"a": 0.5, "b": 0.5}, together=both)
    search = searched(command, contenders(*map(made_up_fix, "ab")), together=("a", "b"))
    assert search.kept == ("a",)


def test_if_it_crashes_together_each_is_tried_alone() -> None:
    command = CrashesTogether({"a": 0.8, "b": 0.9})
    search = searched(command, contenders(*map(made_up_fix, "ab")), together=("a", "b"))
    assert search.kept == ("a",)
    assert search.tests[0].why == "failed: exit code 1 with b"
    assert {("a",), ("b",)} <= set(command.asked)


def test_if_it_does_not_help_together_each_is_tried_alone() -> None:
    both = {frozenset("ab"): 2.0}
    command = SimulatedCommand({"a": 0.7, "b": 1.0}, together=both)
    search = searched(command, contenders(*map(made_up_fix, "ab")), together=("a", "b"))
    assert search.kept == ("a",)


def test_where_nothing_helps_nothing_is_kept() -> None:
    kept = [
        searched(
            SimulatedCommand({}, seed=seed),
            contenders(*map(made_up_fix, "abcd")),
            together=("a", "b"),
        ).kept
        for seed in range(20)
    ]
    assert sum(map(bool, kept)) <= 2


def test_everything_else_is_tried_once_on_top_and_rivals_come_last() -> None:
    command = SimulatedCommand({"a": 0.4, "b": 0.8, "c": 0.9, "d": 1.0, "a2": 0.45})
    fixes = [
        made_up_fix("a2", family="f"),
        made_up_fix("a", family="f"),
        *map(made_up_fix, "bcd"),
    ]
    search = searched(command, contenders(*fixes), together=("a", "b"))
    assert search.kept == ("a", "b", "c")
    on_top = [names for names in command.asked if {"c", "d", "a2"} & set(names)]
    assert on_top[:3] == [("a", "b", "c"), ("a", "b", "d"), ("a2", "b")]
    assert sum("d" in names for names in command.asked) == 1
    assert not search.not_tried()


def test_a_rival_that_is_better_on_top_takes_the_place() -> None:
    command = SimulatedCommand({"a": 0.5, "b": 0.8, "a2": 0.3})
    fixes = [made_up_fix("a", family="f"), made_up_fix("a2", family="f"), made_up_fix("b")]
    search = searched(command, contenders(*fixes), together=("a", "b"))
    assert search.kept == ("a2", "b")


def test_without_time_to_look_at_its_members_the_combination_stands() -> None:
    command = SimulatedCommand({"a": 0.5, "b": 0.8})
    fixes = contenders(*map(made_up_fix, "abcd"))
    search = searched(command, fixes, together=("a", "b"), budget_s=3.5 * TOOK_S)
    assert search.kept == ("a", "b")
    assert search.out_of_time
    assert search.final is not None
    assert search.final.kept


def test_without_time_to_confirm_it_nothing_is_kept() -> None:
    command = SimulatedCommand({"a": 0.9, "b": 0.9})
    fixes = contenders(*map(made_up_fix, "ab"))
    search = searched(command, fixes, together=("a", "b"), budget_s=4.5 * TOOK_S)
    assert search.kept == ()
    assert [test.why for test in search.tests] == [OUT_OF_TIME]


def test_a_gain_of_many_times_what_starts_differ_by_needs_no_pairs() -> None:
    command = SimulatedCommand({"a": 0.5, "b": 0.3}, starts=0.02)
    fixes = contenders(*map(made_up_fix, "ab"))
    search = searched(command, fixes, together=("a", "b"), budget_s=3.5 * TOOK_S)
    assert command.asked == [(), (), ("a", "b")]
    assert search.kept == ("a", "b")
    assert search.final is not None
    assert not search.final.pairs
    assert "many times what starts differ by" in search.final.why


def test_where_starts_differ_too_much_to_tell_a_member_stays_and_the_row_says_so() -> None:
    command = SimulatedCommand({"a": 0.3, "b": 0.95}, starts=0.1, seed=3)
    fixes = contenders(*map(made_up_fix, "ab"))
    search = searched(command, fixes, together=("a", "b"))
    assert search.kept == ("a", "b")
    earned = next(test for test in search.tests if test.is_for == "b")
    assert earned.is_unsure
    row = next(row for row in rows_of(search) if row.remedies == ("a",))
    assert "starts of the same command differ" in row.why
    assert row.why.endswith("b stays")


def test_a_part_that_there_is_no_time_to_confirm_gives_way_to_the_whole() -> None:
    """What is kept always beat the command as it is."""
    for trials in range(9, 20):
        command = SimulatedCommand({"a": 0.5, "b": 0.6, "idle": 1.0})
        fixes = contenders(*map(made_up_fix, ("a", "b", "idle")))
        search = searched(
            command, fixes, together=("a", "b", "idle"), budget_s=(trials + 0.5) * TOOK_S
        )
        assert search.kept in (("a", "b"), ("a", "b", "idle"))
        assert search.final is not None
        assert search.final.base == ()
        assert search.final.challenger == search.kept
        assert search.final.kept


def test_rows_hold_the_prediction_and_what_is_lost_without_each_member() -> None:
    command = SimulatedCommand({"a": 0.5, "b": 0.8})
    search = searched(command, contenders(*map(made_up_fix, "ab")), together=("a", "b"))
    rows = {row.remedies: row for row in rows_of(search)}
    assert list(rows) == [("a", "b"), ("a",), ("b",)]
    assert rows["a", "b"].kept
    assert rows["a", "b"].predicted_ms == pytest.approx(42.0, rel=0.01)
    assert rows["a",].measured_ms is not None
    assert rows["a",].why.startswith("25% slower")
    assert rows["a",].why.endswith("against a + b")
    assert rows["b",].parity == "bit-identical"


def rows_of(search: Search) -> tuple[TriedConfiguration, ...]:
    start = TuneStart(command=("x",), folder="/w", steps=60, budget_s=9e9, allow="rounding")
    plan = TunePlan(
        candidates=(),
        left_out=(),
        late=(),
        proposals=(),
        baseline_ms=100.0,
        took_s=1.0,
        limit_s=60.0,
        least_steps=60,
        together=PlannedCombination(
            remedies=("a", "b"), predicted_ms=42.0, low_ms=40.0, high_ms=45.0
        ),
    )
    return tune_result(Journal(Path("/t"), [start, plan]), search, None, "finished").trials
