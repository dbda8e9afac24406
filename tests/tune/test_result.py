"""The answer of a search: rows, reasons and words."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from msgspec.structs import replace
from simulated_runs import SimulatedCommand, contenders, made_up_fix, searched

from stepscope.changes.change import Effect
from stepscope.records.comparison import TriedConfiguration, TuneResult, short_name, short_why
from stepscope.ui.terminal.tune import print_tune
from stepscope.ui.tune.contenders import Contender, control_words
from stepscope.ui.tune.plan import Journal, LeftOut, PlannedRemedy, TunePlan, TuneStart
from stepscope.ui.tune.result import gain_words, tune_result
from stepscope.ui.tune.search import Search
from stepscope.verify.tuned_gain import Gain

START = TuneStart(
    command=("python", "my train.py"), folder="/w", steps=60, budget_s=600.0, allow="rounding"
)
PLAN = TunePlan(
    candidates=(),
    left_out=(LeftOut(remedy="tf32", why="it needs a CUDA device"),),
    late=(),
    proposals=(),
    baseline_ms=None,
    took_s=1.0,
    limit_s=60.0,
    least_steps=20,
)


def result_of(search: Search | None, status: str = "finished") -> TuneResult:
    return tune_result(Journal(Path("/t"), [START, PLAN]), search, None, status)


def rows(result: TuneResult) -> dict[tuple[str, ...], TriedConfiguration]:
    assert len({row.remedies for row in result.trials}) == len(result.trials)
    return {row.remedies: row for row in result.trials}


def searched_ab() -> Search:
    command = SimulatedCommand({"a": 0.8, "b": 0.85, "slow": 1.3}, off={"a": 1e-7})
    rounding = made_up_fix("a", effect=Effect.ROUNDING)
    return searched(command, contenders(rounding, made_up_fix("b"), made_up_fix("slow")))


def test_numbers_of_a_combination() -> None:
    result = result_of(searched_ab())
    assert result.kept == ("a", "b")
    assert result.baseline_ms == pytest.approx(100, rel=0.02)
    assert result.best_ms == pytest.approx(68, rel=0.03)
    assert result.speedup == pytest.approx(100 / 68, rel=0.03)
    assert result.best_low_ms is not None
    assert result.best_high_ms is not None
    assert result.best_low_ms < result.best_ms < result.best_high_ms  # type: ignore[operator]
    assert result.control == "its losses are bit-identical from run to run"
    assert result.baseline_peak_bytes == 1000
    assert result.verdict.startswith("a + b: a step is ")


def test_one_row_per_configuration_with_its_reason() -> None:
    result = result_of(searched_ab())
    table = rows(result)
    assert {("a",), ("b",), ("slow",), ("a", "b")} <= set(table)
    assert table["a",].kept
    assert table["b",].kept
    assert table["a", "b"].kept
    assert not table["slow",].kept
    assert "slower" in table["slow",].why
    assert table["a",].parity == "rounding"
    assert table["b",].parity == "bit-identical"
    assert table["a", "b"].measured_ms == pytest.approx(68, rel=0.03)
    assert all(row.why for row in result.trials)
    assert all(run.startswith("trials/") for row in result.trials for run in row.runs)


def test_a_crash_has_a_row_without_numbers() -> None:
    command = SimulatedCommand({}, crashes=frozenset({"bad"}))
    result = result_of(searched(command, contenders(made_up_fix("bad"))))
    row = rows(result)["bad",]
    assert row.measured_ms is None
    assert row.parity == "failed"
    assert row.why == "failed: exit code 1 with bad"
    assert result.verdict == "none of the tried changes gains 2% or more"
    assert result.speedup == 1.0


def test_what_was_not_tried_is_listed_with_the_reason() -> None:
    search = searched(
        SimulatedCommand({}), contenders(*map(made_up_fix, "abcdefgh")), budget_s=85.0
    )
    left = {row.remedy: row.why for row in result_of(search).left_out}
    assert left["tf32"] == "it needs a CUDA device"
    assert left["h"] == "the budget leaves no time to try it and to confirm it"
    assert result_of(search).status == "out of time"


def test_what_the_budget_cut_short_has_not_failed() -> None:
    """At every budget: nothing here crashes or trains otherwise."""
    cut_short = 0
    for seconds in range(60, 300, 10):
        command = SimulatedCommand({"a": 0.8, "b": 0.95, "c": 0.97})
        search = searched(command, contenders(*map(made_up_fix, "abc")), budget_s=float(seconds))
        trials = result_of(search).trials
        assert [row for row in trials if row.parity == "failed"] == []
        cut_short += sum(row.parity == "not known" for row in trials)
    assert cut_short


def test_stopped_before_its_first_trial_it_says_so() -> None:
    result = result_of(None, "interrupted")
    assert result.baseline_ms is None
    assert result.verdict == "stopped before anything was measured"
    assert result_of(None).verdict == "the budget ended before anything was measured"


def test_one_of_a_family_that_lost_says_to_whom() -> None:
    command = SimulatedCommand({"w=1": 0.9, "w=2": 0.6})
    family: list[Contender] = contenders(
        made_up_fix("w=1", family="w"), made_up_fix("w=2", family="w")
    )
    table = rows(result_of(searched(command, family)))
    assert table["w=2",].kept
    assert table["w=1",].why.endswith("not more than w=2, which excludes it")


@pytest.mark.parametrize("width", [60, 100, 160])
def test_it_can_be_printed(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_tune(result_of(searched_ab()), Path("/tunes/my tune"), width=width)
    text = capsys.readouterr().out
    lines = io.StringIO(text).read().splitlines()
    assert lines[-1] == "stepscope run --with a,b -- python 'my train.py'"
    assert "the unchanged command" in text
    assert "tf32: it needs a CUDA device" in text
    assert "1 + " not in text


def test_a_command_that_is_over_the_limit_itself_is_named() -> None:
    bases = searched_ab().bases
    assert control_words(bases, 2000) == "its losses are bit-identical from run to run"
    assert "breaks the memory limit: it needs 1.00 kB on the CPU" in control_words(bases, 900)


def test_losses_repeat_if_they_are_equal_as_far_as_both_runs_went() -> None:
    """A trial that is ended between two steps has a step more or less than another one."""
    first, second, *others = searched_ab().bases
    ranks = {rank: replace(one, losses=one.losses[:-3]) for rank, one in second.ranks.items()}
    shorter = dataclasses.replace(second, ranks=ranks)
    assert (
        control_words([first, shorter, *others]) == "its losses are bit-identical from run to run"
    )


def test_promised_and_measured_start_from_the_same_step() -> None:
    """The captured run had a step of 200 ms, stalls among them; 100 ms were measured: a promise of
    half is 50 ms."""
    command = SimulatedCommand({"a": 0.5})
    (contender,) = contenders(made_up_fix("a"))
    planned = PlannedRemedy(remedy="a", predicted_ms=100.0, low_ms=90.0, high_ms=110.0)
    search = searched(command, [Contender(planned=planned, chosen=contender.chosen)])
    plan = replace(PLAN, baseline_ms=200.0)
    result = tune_result(Journal(Path("/t"), [START, plan]), search, None, "finished")
    row = rows(result)["a",]
    assert row.predicted_ms == pytest.approx(result.baseline_ms / 2)
    assert row.predicted_low_ms == pytest.approx(0.45 * result.baseline_ms)


def test_gains_and_losses_in_words() -> None:
    assert gain_words(Gain(value=0.12, low=0.11, high=0.135)) == "saves 12.0% (11.0% to 13.5%)"
    assert (
        gain_words(Gain(value=-3.29, low=-3.57, high=-3.04))
        == "4.3 times as long (4.0 to 4.6 times)"
    )
    wide = gain_words(Gain(value=-0.1, low=-9.0, high=0.3))
    assert wide == "may make the step over 100% slower to 30% shorter"


@pytest.mark.parametrize(
    ("remedies", "kept", "name"),
    [
        (("a", "b", "c"), ("a", "b", "c"), "a + b + c"),
        (("a", "b"), ("a", "b", "c"), "without c"),
        (("a", "b", "c", "d"), ("a", "b", "c"), "with d"),
        (("a", "b", "d"), ("a", "b", "c"), "d instead of c"),
        (("a",), ("a", "b"), "a"),
        (("a", "b"), ("a",), "a + b"),
        (("a", "d"), ("a", "b", "c"), "a + d"),
    ],
)
def test_a_configuration_is_named_by_how_it_differs_from_what_is_kept(
    remedies: tuple[str, ...], kept: tuple[str, ...], name: str
) -> None:
    assert short_name(remedies, kept) == name


def test_reasons_do_not_spell_out_what_is_kept_again() -> None:
    row = TriedConfiguration(remedies=("a", "b"), why="5% slower against a + b + c")
    assert short_why(row, ("a", "b", "c")) == "5% slower against the kept changes"
    assert short_why(row, ("a",)) == row.why
