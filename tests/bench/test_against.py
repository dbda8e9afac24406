"""A bench against saved results: intervals, verdicts, and what cannot be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.bench.against import (
    compare_results,
    moved_part,
    slower_by,
    slower_with_machine,
)
from stepscope.bench.results import BenchMachine, BenchResults, WorkloadChange, WorkloadResult
from stepscope.bench.run_change import run_change, usual_variance

MACHINE = BenchMachine(host="one", processor="A processor", cores=8, torch="2.13.0", python="3.12")
BASE_MS = (10.0, 10.1, 9.9, 10.05, 9.95)


def row(runs_ms: tuple[float, ...] = BASE_MS, **fields: Any) -> WorkloadResult:
    return WorkloadResult(**{"name": "ncf", "size": "tiny", "runs_ms": runs_ms, **fields})


def results(*rows: WorkloadResult, **fields: Any) -> BenchResults:
    known = {"stepscope": "0.1.0", "command": (), "started_unix": 1e9, "machine": MACHINE}
    return BenchResults(**{**known, "workloads": rows, **fields})


def only_change(base: WorkloadResult, now: WorkloadResult) -> WorkloadChange:
    (change,) = compare_results(results(base), results(now), "base.json").workloads
    return change


def times(share: float) -> tuple[float, ...]:
    return tuple(share * ms for ms in BASE_MS)


def test_a_slower_workload_is_named_with_its_interval() -> None:
    change = only_change(row(), row(times(1.05)))
    assert change.verdict == "slower"
    assert change.change == pytest.approx(0.05)
    assert change.low is not None
    assert change.high is not None
    assert 0 < change.low < 0.05 < change.high < 0.08
    assert change.now_ms == pytest.approx(10.5, rel=1e-3)
    assert only_change(row(), row(times(0.95))).verdict == "faster"
    assert only_change(row(), row(times(1.005))).verdict == "no difference seen"


def test_one_disturbed_run_makes_no_alarm_and_hides_no_change() -> None:
    disturbed = (*BASE_MS[:-1], 19.0)
    assert only_change(row(), row(disturbed)).verdict == "no difference seen"
    slower = (*times(1.06)[:-1], 19.0)
    assert only_change(row(), row(slower)).verdict == "slower"


def test_a_pause_in_every_run_is_no_change() -> None:
    steps = tuple((ms,) * 60 for ms in BASE_MS)
    paused = tuple((*run[:30], 40.0, *run[31:]) for run in steps)
    means = tuple(sum(run) / len(run) for run in paused)
    assert only_change(row(), row(means)).verdict == "slower"  # means alone cannot tell
    change = only_change(row(steps_ms=steps), row(means, steps_ms=paused))
    assert change.verdict == "no difference seen"
    stalled = tuple((*run[:20], *(40.0,) * 5, *run[25:]) for run in steps)
    means = tuple(sum(run) / len(run) for run in stalled)
    assert only_change(row(steps_ms=steps), row(means, steps_ms=stalled)).verdict == "slower"


def test_runs_that_agree_by_luck_do_not_make_the_interval_too_narrow() -> None:
    equal = (10.0,) * 5
    change = only_change(row(equal), row((10.05,) * 5))
    assert change.verdict == "no difference seen"
    assert change.high is not None
    assert change.high > 0.01


def test_one_saved_run_is_compared_with_several_of_now() -> None:
    assert only_change(row((10.0,)), row(times(1.2))).verdict == "slower"
    alone = only_change(row((10.0,)), row((12.0,)))
    assert alone.verdict == "not comparable"
    assert "--runs 5" in (alone.why or "")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"size": "small"}, "size small, the base tiny"),
        ({"ranks": 2}, "ranks 2, the base 1"),
        ({"remedies": ("bf16",)}, "with bf16, the base with no change"),
        ({"settings": {"batch": 8}}, "batch 8, the base unknown"),
        ({"name": "dlrm"}, "the base has no such workload"),
        ({"status": "failed", "why": "out of memory"}, "failed: out of memory"),
    ],
)
def test_what_was_measured_otherwise_is_not_compared(fields: dict[str, Any], said: str) -> None:
    change = only_change(row(), row(times(2.0), **fields))
    assert change.verdict == "not comparable"
    assert said in (change.why or "")
    assert change.change is None


def test_the_row_that_was_measured_alike_is_chosen() -> None:
    base = results(row(times(3.0), remedies=("bf16",)), row(), row(times(2.0), size="small"))
    (change,) = compare_results(base, results(row()), "base.json").workloads
    assert change.verdict == "no difference seen"


@pytest.mark.parametrize("fields", [{"cores": 4}, {"device": "H200"}, {"processor": "Another"}])
def test_another_machine_is_not_compared(fields: dict[str, Any]) -> None:
    now = results(row(), machine=replace(MACHINE, **fields))
    (change,) = compare_results(results(row()), now, "base.json").workloads
    assert change.verdict == "not comparable"
    assert "another machine" in (change.why or "")


def test_another_torch_is_compared_and_said() -> None:
    now = results(row(), machine=replace(MACHINE, torch="2.14.0"))
    comparison = compare_results(results(row()), now, "base.json")
    assert comparison.workloads[0].verdict == "no difference seen"
    assert comparison.notes == ("torch 2.14.0, the base's 2.13.0",)


def test_the_part_that_moved_is_named() -> None:
    base = row(budget_ms={"compute": 8.0, "data": 1.0, "host": 1.0})
    now = row(times(1.1), budget_ms={"compute": 8.1, "data": 2.5, "host": 0.4})
    change = only_change(base, now)
    assert [part.id for part in change.parts] == ["data", "host", "compute"]
    moved = moved_part(change)
    assert moved is not None
    assert moved.id == "data"
    assert moved.change_ms == pytest.approx(1.5)


def test_a_machine_that_changed_more_than_the_step_is_said() -> None:
    base = row(calibration_ms=(5.0, 5.01, 5.02, 4.99, 5.0))
    slow = tuple(1.1 * ms for ms in base.calibration_ms)
    change = only_change(base, row(times(1.06), calibration_ms=slow))
    assert change.verdict == "slower"  # nothing is corrected
    assert change.machine_changed
    assert change.pace_change == pytest.approx(0.1)
    assert "takes 10.0% longer for fixed arithmetic" in change.notes[0]
    more = only_change(base, row(times(1.2), calibration_ms=slow))
    assert more.notes == ()
    assert not more.machine_changed
    restless = (4.0, 7.0, 4.5, 6.8, 5.9)  # the pace is not surely slower
    assert not only_change(base, row(times(1.06), calibration_ms=restless)).machine_changed
    assert only_change(base, row(calibration_ms=slow)).notes  # it may hide a change
    same = replace(base, runs_ms=times(1.06))
    assert only_change(base, same).notes == ()
    assert only_change(row(), row(times(1.06))).pace_change is None


def test_a_machine_that_became_slower_raises_no_alarm() -> None:
    calm = row(calibration_ms=(5.0, 5.01, 5.02, 4.99, 5.0))
    tired = row(times(1.28), calibration_ms=tuple(1.3 * ms for ms in calm.calibration_ms))
    comparison = compare_results(results(calm), results(tired), "base.json")
    assert slower_by(comparison, 0.03) == ()
    assert [change.name for change in slower_with_machine(comparison, 0.03)] == [calm.name]


def test_an_alarm_needs_certainty_and_size() -> None:
    def alarms(now: WorkloadResult, share: float) -> int:
        return len(slower_by(compare_results(results(row()), results(now), "base.json"), share))

    assert alarms(row(times(1.05)), 0.03) == 1
    assert alarms(row(times(1.025)), 0.03) == 0  # surely slower, but not by so much
    assert alarms(row((8.0, 10.9, 12.0, 9.5, 13.0)), 0.03) == 0  # 6% on average, but not surely


def test_workloads_of_the_base_that_did_not_run_are_listed() -> None:
    base = results(row(), row(name="dlrm"), row(name="dlrm", size="small"))
    assert compare_results(base, results(row()), "base.json").not_run == ("dlrm",)


def simulated(
    count: int, runs: int, slower: float, *, workloads: int = 1, unlike: float = 0.0, **noise: float
) -> tuple[float, float]:
    """Shares of made-up benches with a verdict "slower", and of workloads with an alarm at 3%."""
    draw = np.random.default_rng(7)
    found, alarms = 0, []
    for _ in range(count):
        pairs = []
        for _ in range(workloads):
            restless = float(np.exp(draw.normal(0.0, unlike)))
            base, now = (np.exp(restless * made_logs(draw, runs, **noise)) for _ in range(2))
            pairs.append((base.tolist(), ((1 + slower) * now).tolist()))
        usual = usual_variance(pairs)
        changes = [run_change(*pair, comparisons=workloads, usual_variance=usual) for pair in pairs]
        slow = [change is not None and change.low > 0 for change in changes]
        found += any(slow)
        alarms += [
            one and change is not None and change.value > np.log(1.03)
            for one, change in zip(slow, changes, strict=True)
        ]
    return found / count, float(np.mean(alarms))


def made_logs(
    draw: np.random.Generator,
    runs: int,
    starts: float = 0.01,
    sessions: float = 0.0,
    disturbed: float = 0.0,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    logs = draw.normal(0.0, starts, runs) + draw.normal(0.0, sessions)
    return logs + np.where(draw.random(runs) < disturbed, draw.uniform(0.05, 0.3, runs), 0.0)


@pytest.mark.parametrize(
    "noise",
    [
        {"starts": 0.003},
        {"starts": 0.01},
        {"starts": 0.03},
        {"starts": 0.01, "sessions": 0.005},
        {"starts": 0.01, "disturbed": 0.15},
    ],
    ids=str,
)
@pytest.mark.parametrize("runs", [5, 7])
def test_same_against_same_seldom_raises_an_alarm(noise: dict[str, float], runs: int) -> None:
    found, alarms = simulated(200, runs, 0.0, **noise)
    assert found <= 0.05
    assert alarms <= 0.05


def test_the_whole_suite_seldom_raises_one_either() -> None:
    found, _ = simulated(40, 5, 0.0, workloads=24, sessions=0.005, unlike=0.5)
    assert found <= 0.1


def test_other_workloads_tell_how_much_runs_differ() -> None:
    _, with_others = simulated(8, 5, 0.05, workloads=24)
    assert with_others >= 0.7
    assert usual_variance([(BASE_MS, BASE_MS)]) is None  # nothing to learn from itself
    quiet, restless = (10.0, 10.01, 10.02, 9.99, 9.98), (10.0, 12.0, 9.0, 11.0, 8.0)
    few = usual_variance([(quiet, quiet), (quiet, quiet), (restless, restless)])
    assert few == pytest.approx(usual_variance([(quiet, quiet)] * 2))  # one restless changes little


def test_five_per_cent_are_found_with_so_many_runs() -> None:
    assert simulated(200, 5, 0.05)[1] >= 0.98
    assert simulated(200, 7, 0.05)[1] >= 0.99
    assert simulated(200, 5, 0.05, disturbed=0.05)[1] >= 0.9
