"""A tune that could not decide says so: that nothing helps is another answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from simulated_runs import SimulatedCommand, contenders, made_up_fix, searched

from stepscope.records.comparison import TuneResult
from stepscope.ui.tried_remedies import tune_answer
from stepscope.ui.tune.contenders import TrialRules
from stepscope.ui.tune.plan import Journal, TuneStart
from stepscope.ui.tune.result import tune_result
from stepscope.ui.tune.search import Search
from stepscope.ui.tune.trials import TrialBench, TrialLength

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.ui.tune.trials import TrialRun

START = TuneStart(command=("python", "x.py"), folder="/w", steps=60, budget_s=9e9, allow="rounding")


class StoppedCommand(SimulatedCommand):
    """Ctrl-C comes while the fifth trial runs."""

    def run(self, number: int, remedies: Sequence[str], *, steps: int, limit_s: float) -> TrialRun:
        if number == 5:
            raise KeyboardInterrupt
        return super().run(number, remedies, steps=steps, limit_s=limit_s)


def result_of(command: SimulatedCommand, budget_s: float = 9e9) -> TuneResult:
    search = searched(command, contenders(*map(made_up_fix, "abcd")), budget_s=budget_s)
    return tune_result(Journal(Path("/t"), [START]), search, None, "finished")


def test_starts_that_differ_too_much_leave_the_answer_open() -> None:
    results = [result_of(SimulatedCommand({"a": 0.93}, starts=0.3, seed=n)) for n in range(12)]
    undecided = [one for one in results if one.starts_differ is not None and not one.kept]
    assert undecided
    for result in undecided:
        assert 0.1 < (result.starts_differ or 0.0) < 1.0
        assert result.verdict.startswith("none is clearly faster: starts of the same command ")
        assert "nothing else uses this machine" in tune_answer(result, Path("/t")).next


def test_a_quiet_machine_is_sure_that_nothing_helps() -> None:
    result = result_of(SimulatedCommand({"a": 1.05}, starts=0.001))
    assert result.starts_differ is None
    assert result.verdict == "none of the tried changes gains 2% or more"


def test_what_is_kept_is_the_verdict_however_the_starts_differ() -> None:
    result = result_of(SimulatedCommand({"a": 0.5}, starts=0.01))
    assert result.kept == ("a",)
    assert result.verdict.startswith("a: a step is ")


def test_a_budget_that_ended_first_proves_nothing() -> None:
    results = [result_of(SimulatedCommand({"a": 0.97}), float(s)) for s in range(40, 200, 10)]
    cut = [one for one in results if one.status == "out of time" and one.trials and not one.kept]
    assert cut
    for one in (one for one in cut if one.starts_differ is None):
        steps = "" if not one.leading else "a is probably faster, "
        assert one.verdict.startswith(steps)
        assert "the budget was spent before" in one.verdict


def test_what_ran_before_it_was_stopped_has_its_numbers() -> None:
    command = StoppedCommand({"a": 0.9, "b": 1.2})
    bench = TrialBench(command, length=TrialLength(asked=60), budget_s=9e9)
    search = Search(contenders(*map(made_up_fix, "abcd")), bench, TrialRules())
    with pytest.raises(KeyboardInterrupt):
        search.run()
    result = tune_result(Journal(Path("/t"), [START]), search, None, "interrupted")
    steps = {row.name: row.measured_ms for row in result.trials}
    assert steps == {"a": pytest.approx(90, rel=0.05), "b": pytest.approx(120, rel=0.05)}
    assert all(row.why for row in result.trials)
    assert [row.remedy for row in result.left_out] == ["c", "d"]
