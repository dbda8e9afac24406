"""Predictions rest on the mean step: what-ifs change the typical one, stalls come on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from ddp_steps import calibration, gpu_trace
from msgspec.structs import replace

from benches import ask, bench_for
from stepscope import UsageError
from stepscope.predict.stalls import describe_stalls, find_stalls, share_stalls
from stepscope.records.rank import MeasuredSteps
from stepscope.records.run import STALL_CAUSES, RankRun, Stall, StepSeries, StepTimes

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.engine import Bench
    from stepscope.records.prediction import Prediction

TYPICAL = 4.5  # ms
STEPS = 100


def stall(cause: str, ms: float, steps: int, **more: object) -> Stall:
    """`steps` of a hundred take `ms` longer."""
    cost = ms * steps / STEPS
    fields = {"cause": cause, "steps": steps, "cost_ms": cost, "share": cost / (TYPICAL + cost)}
    return Stall(**fields, typical_ms=ms, longest_ms=ms, **more)  # type: ignore[arg-type]


def a_run(*stalls: Stall, doubt_ms: float = 0.0) -> RankRun:
    mean = TYPICAL + sum(one.cost_ms for one in stalls)
    times = StepTimes(
        steps=STEPS,
        mean_ms=mean,
        low_ms=mean - doubt_ms,
        high_ms=mean + doubt_ms,
        median_ms=TYPICAL,
        typical_ms=TYPICAL,
        p99_ms=mean,
        longest_ms=mean,
        variation=0.0,
    )
    return RankRun(rank=0, steps=STEPS, warm_up=0, times=times, stalls=stalls)


def a_bench(folder: Path, *stalls: Stall, doubt_ms: float = 0.0) -> Bench:
    ns = round(1e6 * TYPICAL)
    measured = MeasuredSteps(
        steps=20, steps_ns=(ns,) * 20, step_ns=ns, wall_ns=ns, device_ns=None, phases_ns={}
    )
    run = a_run(*stalls, doubt_ms=doubt_ms)
    links = (calibration(8, kind="cuda", device="NVIDIA H200", backend="nccl"),)
    trace = gpu_trace(folder, [512, 512])
    return bench_for(trace, measured=measured, run=run, calibrations=links)


def predict(bench: Bench, *settings: str) -> Prediction:
    return ask(bench, *settings)


def test_the_baseline_is_the_mean_step(tmp_path: Path) -> None:
    """One step in four waits 8 ms for data: 2 ms per step."""
    now = predict(a_bench(tmp_path, stall("data", 8.0, 25)))
    assert now.baseline_ms == pytest.approx(6.5, rel=0.005)
    assert now.predicted_ms == now.baseline_ms
    assert (now.baseline_stall_ms, now.stall_ms) == (2.0, 2.0)


def test_what_a_change_saves_is_saved_in_the_typical_step(tmp_path: Path) -> None:
    """Without the optimizer's half millisecond the mean is 6.0 ms: stalls stay."""
    bench = a_bench(tmp_path, stall("data", 8.0, 25))
    then = predict(bench, "remove=sgd")
    assert then.saved_ms == pytest.approx(0.5, rel=0.02)
    assert then.stall_ms == 2.0
    assert "the average step keeps 2.00 ms of stalls (data 2.00 ms)" in then.assumptions


def test_stalls_under_a_hundredth_of_all_are_not_named() -> None:
    stalls = find_stalls(a_run(stall("data", 8.0, 25), stall("gc", 2.1, 1), stall("unknown", 1, 1)))
    assert describe_stalls(stalls) == (
        "the average step keeps 2.03 ms of stalls (data 2.00 ms, gc 0.0210 ms)",
    )


def test_who_decides_is_a_matter_of_the_typical_step(tmp_path: Path) -> None:
    now = predict(a_bench(tmp_path, stall("data", 80.0, 25)))
    assert now.device_ms == pytest.approx(TYPICAL, rel=0.02)
    assert now.typical_ms == pytest.approx(TYPICAL, rel=0.02)


def test_data_always_ready_removes_data_stalls_that_the_window_missed(tmp_path: Path) -> None:
    then = predict(a_bench(tmp_path, stall("data", 8.0, 25)), "no-data-wait")
    assert not then.refused
    assert then.predicted_ms == pytest.approx(TYPICAL, rel=0.005)
    assert then.assumptions == ("2.00 ms per step of data stalls removed",)


def test_data_always_ready_keeps_other_stalls(tmp_path: Path) -> None:
    bench = a_bench(tmp_path, stall("data", 8.0, 25), stall("gc", 50.0, 1))
    assert predict(bench, "no-data-wait").stall_ms == pytest.approx(0.5)


def test_without_stalls_every_step_is_typical(tmp_path: Path) -> None:
    bench = a_bench(tmp_path, stall("data", 8.0, 25), stall("gc", 50.0, 1))
    then = predict(bench, "no-stalls")
    assert then.stall_ms == 0.0
    assert then.predicted_ms == pytest.approx(TYPICAL, rel=0.005)
    assert then.speedup == pytest.approx(7.0 / 4.5, rel=0.005)


def test_stalls_of_some_causes_can_go(tmp_path: Path) -> None:
    bench = a_bench(tmp_path, stall("data", 8.0, 25), stall("gc", 50.0, 1))
    assert predict(bench, "no-stalls=gc").stall_ms == pytest.approx(2.0)
    assert predict(bench, "no-stalls=gc,data").stall_ms == 0.0
    with pytest.raises(
        UsageError, match=r"'disk' is not a cause of stalls. There are data, evaluation"
    ):
        predict(bench, "no-stalls=disk")


def test_a_run_without_such_stalls_refuses(tmp_path: Path) -> None:
    bench = a_bench(tmp_path, stall("data", 8.0, 25))
    assert predict(bench, "no-stalls=gc").refused == ("no-stalls: the run has no gc stalls",)
    assert predict(a_bench(tmp_path), "no-stalls").refused == ("no-stalls: the run has no stalls",)
    bare = bench_for(gpu_trace(tmp_path, [512, 512]))
    assert "Record one with `stepscope run`" in predict(bare, "no-stalls").refused[0]


def test_a_bare_trace_has_no_stalls(tmp_path: Path) -> None:
    """A run's mean is not comparable with a step that only the profiler saw."""
    trace = gpu_trace(tmp_path, [512, 512])
    with_run = bench_for(trace, run=a_run(stall("data", 8.0, 25))).predict([])
    assert with_run == bench_for(trace).predict([])


def test_twice_the_batch_waits_twice_as_long_for_data(tmp_path: Path) -> None:
    """Whether evaluation comes after as many steps or after as many samples is not known."""
    bench = a_bench(tmp_path, stall("data", 8.0, 25), stall("evaluation", 100.0, 1))
    then = predict(bench, "batch=x2")
    assert then.stall_ms == pytest.approx(2 * 2.0 + 1.5 * 1.0)
    assert "The interval covers both" in " ".join(then.assumptions)
    assert "data stalls grow 2 times" in " ".join(then.assumptions)


def test_micro_batches_repeat_what_comes_with_a_pass(tmp_path: Path) -> None:
    bench = a_bench(tmp_path, stall("data", 8.0, 25), stall("checkpoint", 100.0, 1))
    assert predict(bench, "accumulate=4").stall_ms == pytest.approx(4 * 2.0 + 1.0)


def test_the_means_own_doubt_joins_the_interval(tmp_path: Path) -> None:
    sure = predict(a_bench(tmp_path, stall("data", 8.0, 25)), "remove=sgd")
    unsure = predict(a_bench(tmp_path, stall("data", 8.0, 25), doubt_ms=1.0), "remove=sgd")
    assert unsure.baseline_low_ms == pytest.approx(5.5)
    assert unsure.baseline_high_ms == pytest.approx(7.5)
    assert unsure.high_ms - unsure.low_ms > 1.8
    assert sure.high_ms - sure.low_ms < 0.8
    assert unsure.low_ms < sure.low_ms < sure.high_ms < unsure.high_ms


def test_the_speed_up_is_surer_than_the_steps(tmp_path: Path) -> None:
    """How often steps stall is the same before and after."""
    then = predict(a_bench(tmp_path, stall("data", 8.0, 25), doubt_ms=1.0), "remove=sgd")
    assert then.speedup_high / then.speedup_low < (then.high_ms / then.low_ms) ** 0.5


# Workers


def test_independent_stalls_grow_with_the_workers() -> None:
    """One step in four stalls for 8 ms: of two workers' steps, 1 - 0.75 x 0.75 do."""
    stalls = find_stalls(a_run(stall("data", 8.0, 25)))
    two = share_stalls(stalls, 2, 1)
    assert two is not None
    assert two.total_ns == pytest.approx(1e6 * 8.0 * (1 - 0.75**2))
    assert two.doubt_ns == pytest.approx(0.5 * (two.total_ns - 2e6))
    many = share_stalls(stalls, 1000, 1)
    assert many is not None
    assert many.total_ns == pytest.approx(8e6)


def test_a_step_waits_for_the_longest_stall() -> None:
    """Stalls of 1 and 3 ms in two steps of four: of two draws, 7/16 x 3 + 5/16 x 1."""
    times = replace(a_run().times, steps=4)
    series = StepSeries(
        number=np.arange(4),
        start_unix_ns=np.zeros(4, np.int64),
        step_ns=(1e6 * (TYPICAL + np.array([0, 1, 0, 3]))).astype(np.int64),
        cause=np.array([-1, 0, -1, STALL_CAUSES.index("data")], np.int8),
        window=np.zeros(4, np.bool_),
        warm_up=0,
    )
    data = replace(stall("data", 1.0, 1), cost_ms=1.0, steps=2)
    run = replace(a_run(), times=times, stalls=(data,), series=series)
    two = share_stalls(find_stalls(run), 2, 1)
    assert two is not None
    assert two.total_ns == pytest.approx(1e6 * (7 / 16 * 3 + 5 / 16 * 1))


def test_what_the_script_does_coincides_on_all_workers() -> None:
    run = a_run(stall("evaluation", 100.0, 1), stall("data", 8.0, 25, period=4))
    stalls = find_stalls(run)
    eight = share_stalls(stalls, 8, 1)
    assert stalls is not None
    assert eight is not None
    assert eight.total_ns == stalls.total_ns == pytest.approx(3e6)
    assert eight.doubt_ns == 0.0


def test_one_worker_waits_for_no_other() -> None:
    one = share_stalls(find_stalls(a_run(stall("collective", 8.0, 25))), 1, 4)
    assert one is not None
    assert one.total_ns == 0.0


def test_more_workers_make_the_mean_longer_and_say_what_they_assume(tmp_path: Path) -> None:
    calm = predict(a_bench(tmp_path), "workers=8")
    stalling = predict(a_bench(tmp_path, stall("data", 8.0, 25)), "workers=8")
    assert stalling.stall_ms == pytest.approx(8.0 * (1 - 0.75**8))
    assert stalling.predicted_ms - calm.predicted_ms == pytest.approx(stalling.stall_ms, rel=0.01)
    assert stalling.high_ms - stalling.low_ms > 2.0
    assert any("data stalls are assumed to be independent" in line for line in stalling.assumptions)


def test_planning_links_too_does_not_count_stalls_twice(tmp_path: Path) -> None:
    bench = a_bench(tmp_path, stall("data", 8.0, 25))
    alone, with_link = predict(bench, "workers=8"), predict(bench, "workers=8", "bandwidth=2")
    assert alone.stall_ms == with_link.stall_ms


def test_workers_that_share_a_batch_wait_less_for_data(tmp_path: Path) -> None:
    bench = a_bench(tmp_path, stall("data", 8.0, 25, period=4))
    assert predict(bench, "workers=8:strong").stall_ms == pytest.approx(2.0 / 8)


def test_more_workers_stall_as_well(tmp_path: Path) -> None:
    more = predict(a_bench(tmp_path, stall("data", 8.0, 25)), "workers=8")
    assert more.baseline_ms == pytest.approx(6.5, rel=0.005)
    assert more.predicted_ms > more.baseline_ms + 4
