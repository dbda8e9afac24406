"""threads=N: what other numbers of threads would bring, by hand, and when nobody can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benches import ask, bench_for
from explain.build import kernel, step, write
from explain.cpu_steps import CROWDED, LARGE, SECOND, SMALL, counters, load_of, steps
from stepscope import read_trace
from stepscope.errors import UsageError
from stepscope.records.job import RankFolder
from stepscope.records.rank import MeasuredSteps

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.prediction import Prediction
    from stepscope.records.rank_facts import HostLoad


def predicted(
    tmp_path: Path,
    calls: list[Any],
    load: HostLoad | None,
    setting: str,
    step_ms: float,
    **how: Any,
) -> Prediction:
    trace = read_trace(
        write(tmp_path / "trace.json", steps(calls, **how), device=None), cache=False
    )
    ns = round(step_ms * 1e6)
    truth = MeasuredSteps(
        steps=9, steps_ns=(ns,) * 9, step_ns=ns, wall_ns=ns, device_ns=None, phases_ns={}
    )
    folder = RankFolder(load=load)
    return ask(bench_for(trace, measured=truth, folder=folder), setting)


def test_idle_cores_share_long_operators(tmp_path: Path) -> None:
    found = predicted(tmp_path, [LARGE] * 5, load_of(counters()), "threads=4", 100)
    assert found.predicted_ms == pytest.approx(100 / 4**0.8, rel=0.02)
    assert found.low_ms < found.predicted_ms < found.high_ms
    assert found.assumptions[0] == "4 threads instead of 1"


def test_short_operators_gain_nothing(tmp_path: Path) -> None:
    found = predicted(tmp_path, [SMALL] * 100, load_of(counters()), "threads=4", 1)
    assert found.predicted_ms == pytest.approx(1, rel=0.02)


def test_fewer_threads_make_an_undisturbed_step_longer(tmp_path: Path) -> None:
    load = load_of(
        counters(user_ns=38 * SECOND, busy_ns=38 * SECOND, job_ns=38 * SECOND), threads=4
    )
    found = predicted(tmp_path, [LARGE] * 5, load, "threads=1", 100)
    assert found.predicted_ms == pytest.approx(100 * 4**0.8, rel=0.02)


def test_threads_that_waited_for_cores_cost_their_stalls(tmp_path: Path) -> None:
    """Quick calls take 8 µs, every second step's 4 ms more: one thread needs the quick ones."""
    load = load_of(CROWDED, threads=4)
    found = predicted(tmp_path, [SMALL] * 50, load, "threads=1", 100, count=9, stall=4000)
    # 50 calls of at most 8 µs, and others stay: at most 1.7 times as long; gaps of the step remain.
    assert found.predicted_ms < 5
    assert found.high_ms / found.low_ms > 4  # nobody knows it well
    assert any("other processes stay" in line for line in found.assumptions)


def test_processor_time_bounds_what_one_thread_needs(tmp_path: Path) -> None:
    """Every call is late: no pace tells, but the process used 0.12 cores for 100 ms of a step."""
    plain = counters(
        waiting_ns=21 * SECOND, training_waiting_ns=6 * SECOND, user_ns=SECOND * 12 // 10
    )
    unpriced = ("aten::unknown_op", None, 200_000.0)
    found = predicted(tmp_path, [unpriced], load_of(plain, threads=4), "threads=1", 200)
    assert found.predicted_ms == pytest.approx(12, rel=0.1)


def test_fit_is_a_thread_for_each_free_core(tmp_path: Path) -> None:
    found = predicted(tmp_path, [LARGE] * 5, load_of(counters()), "threads=fit", 100)
    same = predicted(tmp_path, [LARGE] * 5, load_of(counters()), "threads=4", 100)
    assert found.predicted_ms == same.predicted_ms


@pytest.mark.parametrize(
    ("load", "setting", "word"),
    [
        (None, "threads=2", "stepscope run"),
        (load_of(counters()), "threads=1", "already"),
        (load_of(counters()), "threads=16", "free cores for 4 threads only"),
        (load_of(counters(waiting_ns=SECOND, training_waiting_ns=SECOND), threads=4), "threads=1",
         "only one thread computes"),
    ],
)  # fmt: skip
def test_it_refuses_where_nobody_can_tell(
    tmp_path: Path, load: HostLoad | None, setting: str, word: str
) -> None:
    found = predicted(tmp_path, [LARGE], load, setting, 20)
    assert word in found.refused[0]
    assert found.predicted_ms == found.baseline_ms


@pytest.mark.parametrize("value", ["0", "-1", "many", "", "1.5"])
def test_a_number_that_is_none_is_wrong_use(tmp_path: Path, value: str) -> None:
    with pytest.raises(UsageError, match="give their number"):
        predicted(tmp_path, [LARGE], load_of(counters()), f"threads={value}", 20)


def test_an_accelerators_step_is_refused(tmp_path: Path) -> None:
    events = [
        step(n, start=100 * n, dur=100)
        + kernel("gemm", start=100 * n + 9, dur=50, launched_at=100 * n + 2)
        for n in range(4)
    ]
    trace = read_trace(write(tmp_path / "trace.json", *events), cache=False)
    assert "does not compute on the CPU" in ask(bench_for(trace), "threads=2").refused[0]
