"""Runs are added until a slow-down of 5% would be seen, or there are as many as may be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace
from test_against import results, row

from stepscope.bench import catalogue
from stepscope.bench.against import MOST_OF_MANY, MOST_RUNS, MOST_S, EnoughRuns, sees
from stepscope.bench.results import BenchMachine
from stepscope.bench.rules import CLAIM_RUNS
from stepscope.bench.task import BenchTask
from stepscope.ui.bench import suite
from stepscope.ui.bench.results import BenchRun, PacedRun

if TYPE_CHECKING:
    from collections.abc import Callable


def starts(deviation: float, runs: int, seed: int = 0) -> tuple[float, ...]:
    draw = np.random.default_rng(seed)
    return tuple(np.exp(draw.normal(0.0, deviation, runs)).tolist())


def test_five_runs_are_enough_where_starts_hardly_differ() -> None:
    calm = starts(0.002, CLAIM_RUNS)
    assert sees(calm, calm, comparisons=1)


def test_five_runs_are_not_enough_where_starts_differ_by_two_percent() -> None:
    restless = starts(0.02, CLAIM_RUNS)
    assert not sees(restless, restless, comparisons=1)
    many = starts(0.02, 25)
    assert sees(many, many, comparisons=1)
    assert not sees(many, many, comparisons=24)


def test_one_run_says_nothing() -> None:
    assert not sees([1.0], [1.0], comparisons=1)


def test_runs_are_added_only_if_they_get_there_before_the_limit() -> None:
    restless = row(starts(0.05, CLAIM_RUNS, seed=1))  # five of these see 6.5%, seven see 5%
    assert not EnoughRuns(workloads=1).are_there(restless)
    assert EnoughRuns(workloads=1).are_there(row(starts(0.3, CLAIM_RUNS, seed=1)))
    assert EnoughRuns(workloads=24).are_there(restless)  # ten are the most, and see 5.3%
    assert MOST_OF_MANY == 10
    assert MOST_RUNS == 30


def test_runs_are_added_only_while_the_time_for_a_workload_lasts() -> None:
    runs = starts(0.05, CLAIM_RUNS, seed=1)
    alone = EnoughRuns(workloads=1)
    assert not alone.are_there(row(runs, seconds=5 * 1.0))
    assert alone.are_there(row(runs, seconds=5 * 20.0))  # one more fits, which is not enough
    assert alone.are_there(row(runs, seconds=2 * MOST_S))


def test_against_a_base_of_few_runs_three_times_as_many_are_all_that_helps() -> None:
    rule = EnoughRuns(workloads=1, base=results(row(starts(0.02, 5, seed=1))))
    assert not rule.are_there(row(starts(0.02, 5, seed=1)))
    assert not sees(starts(0.02, 5, seed=1), starts(0.06, 15), comparisons=1)
    assert rule.are_there(row(starts(0.06, 15)))


def test_a_longer_wait_needs_no_more_runs() -> None:
    wild = starts(0.02, CLAIM_RUNS)
    parts = {"computing_ms": wild, "queue_ms": (0.0,) * 5}
    base = results(row(wild, **parts, waiting_ms=(0.0,) * 5, paced=wild))
    rule = EnoughRuns(workloads=1, base=base)
    still = row(wild, **parts, waiting_ms=(0.0,) * 5)
    waits = row(wild, **parts, waiting_ms=(0.05,) * 5)
    assert not rule.are_there(still)
    assert rule.are_there(waits)
    assert rule.paces(still, base.machine)
    assert not rule.paces(waits, base.machine)


def test_what_the_runs_see_is_known() -> None:
    wild = starts(0.05, CLAIM_RUNS, seed=1)
    seen = EnoughRuns(workloads=1).smallest_seen(row(wild))
    assert seen is not None
    assert seen.step > 0.05
    assert seen.waiting is None
    split = row(wild, computing_ms=wild, queue_ms=(0.0,) * 5, waiting_ms=(0.0,) * 5)
    seen = EnoughRuns(workloads=1).smallest_seen(split)
    assert seen is not None
    assert seen.waiting is not None
    # Runs that wait alike leave what sessions differ by: (2.24 + 0.84) standard deviations.
    assert seen.waiting == pytest.approx((2.2414 + 0.8416) * 0.005 * 2**0.5, rel=5e-3)


def test_a_row_that_cannot_be_compared_needs_no_more_runs() -> None:
    base = results(row())
    assert EnoughRuns(workloads=1, base=base).are_there(row((1.0, 2.0), status="failed"))
    assert EnoughRuns(workloads=1, base=base).are_there(row((1.0, 2.0), name="other"))
    assert EnoughRuns(workloads=1, base=base).are_there(row((1.0, 2.0), size="small"))


def test_runs_do_not_help_against_a_base_of_another_machine() -> None:
    here = BenchMachine(host="a", processor="fast", cores=2)
    base = replace(results(row()), machine=here)
    assert EnoughRuns(workloads=1, base=base).can_help(replace(here, host="b"))
    assert not EnoughRuns(workloads=1, base=base).can_help(replace(here, cores=64))
    assert EnoughRuns(workloads=1).can_help(here)


class _Silent:
    def news(self, words: str) -> None:
        del words

    def trying(self, words: str) -> None:
        del words


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """A suite whose runs take no time: each of its steps takes as long as drawn for the run, also
    beside a yardstick unless paced runs fail."""

    def run(deviation: dict[str, float], *, paced: bool = False) -> dict[str, tuple[int, int]]:
        draws = {name: np.random.default_rng(1) for name in deviation}

        def run_once(task: BenchTask, number: int, home: Path) -> BenchRun:
            name = task.workload.name
            step = float(np.exp(draws[name].normal(0.0, deviation[name])))
            return BenchRun(
                number=number, folder=home, seconds=0.0, steps_ms=np.full(20, step), losses=(1.0,)
            )

        def run_paced(task: BenchTask, number: int, home: Path) -> PacedRun | None:
            step = float(run_once(task, number, home).steps_ms[0])
            return PacedRun(step, step) if paced else None

        monkeypatch.setattr(suite, "run_once", run_once)
        monkeypatch.setattr(suite, "run_paced", run_paced)
        monkeypatch.setattr(suite, "explain_run", lambda _: None)
        tasks = [BenchTask(workload=catalogue.load(name), size="tiny") for name in deviation]
        end = suite.run_suite(
            tasks,
            runs=CLAIM_RUNS,
            folder=tmp_path,
            command=("stepscope", "bench"),
            progress=_Silent(),
            check_memory=False,
            enough=EnoughRuns(workloads=len(tasks)),
        )
        return {one.name: (len(one.runs_ms), len(one.paced)) for one in end.results.workloads}

    return run


def test_only_the_restless_workload_runs_more_often(measured: Callable[..., Any]) -> None:
    runs = measured({"ncf": 0.001, "dlrm": 0.05}, paced=True)
    assert runs["ncf"] == (CLAIM_RUNS, CLAIM_RUNS)
    assert sum(runs["dlrm"]) > 2 * CLAIM_RUNS
    assert max(runs["dlrm"]) <= MOST_RUNS


def test_further_runs_are_of_the_kind_that_is_compared() -> None:
    alone = EnoughRuns(workloads=1)
    calm, wild = starts(0.002, 5), starts(0.2, 5)
    assert alone.wants_paced(row(wild, paced=calm))
    assert not alone.wants_paced(row(calm, paced=wild))
    base = results(row(wild, paced=calm))
    assert EnoughRuns(workloads=1, base=base).wants_paced(row(wild, paced=calm))
    assert not EnoughRuns(workloads=1, base=base).wants_paced(row(wild))


def test_where_paced_runs_fail_plain_ones_are_added(measured: Callable[..., Any]) -> None:
    runs = measured({"ncf": 0.001, "dlrm": 0.02}, paced=False)
    assert runs["ncf"] == (CLAIM_RUNS, 0)
    assert CLAIM_RUNS < runs["dlrm"][0] <= MOST_RUNS
    assert runs["dlrm"][1] == 0
