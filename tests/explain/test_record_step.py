"""The step of record is the measured one; the trace divides it, the profiler's cost comes off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from benches import analyse
from measured import read_measured_steps
from stepscope.explain.budget import budget_of_record, with_correction, with_measured
from stepscope.records.explanation import Budget, Part, StepTime
from stepscope.records.rank import MeasuredSteps
from stepscope.records.run import RankRun, Stall, StepTimes

from .build import op
from .conftest import Read


def truth(ns: int) -> MeasuredSteps:
    return MeasuredSteps(
        steps=3, steps_ns=(ns,) * 3, step_ns=ns, wall_ns=ns, device_ns=None, phases_ns={}
    )


def budget(**ms: float) -> Budget:
    names = ("compute", "exposed_comm", "operators", "python", "profiler", "idle_launch")
    whole = sum(ms.values())
    parts = tuple(Part(id=n, ms=ms.get(n, 0.0), share=ms.get(n, 0.0) / whole) for n in names)
    return Budget(step_ms=whole, parts=parts, basis="cycles")


def ms_of(found: Budget) -> dict[str, float]:
    return {part.id: part.ms for part in found.parts if part.ms}


def test_what_the_profiler_added_comes_off_the_hosts_idle_time() -> None:
    # 46 ms profiled, 32 measured: 14 ms too long, 4 of them the profiler's own work, 10 from the 20
    # of operators and Python
    found = budget_of_record(
        budget(compute=22, operators=15, python=5, profiler=4),
        with_measured(StepTime(profiled=46), truth(32_000_000)),
    )
    assert ms_of(found) == pytest.approx({"compute": 22, "operators": 7.5, "python": 2.5})
    assert found.step_ms == 32
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    assert found.basis == "measured"


def test_where_there_is_no_idle_time_to_give_all_parts_shrink_alike() -> None:
    found = budget_of_record(
        budget(compute=90, exposed_comm=10),
        with_measured(StepTime(profiled=100), truth(50_000_000)),
    )
    assert ms_of(found) == pytest.approx({"compute": 45, "exposed_comm": 5})


def test_on_the_cpu_operators_are_slowed_as_much_as_the_python_between_them() -> None:
    """100 ms recorded, 70 measured: 30 of the 90 that are not waiting."""
    found = budget_of_record(
        budget(compute=60, exposed_comm=10, python=30),
        with_measured(StepTime(profiled=100), truth(70_000_000)),
        on_host=True,
    )
    assert ms_of(found) == pytest.approx({"compute": 40, "exposed_comm": 10, "python": 20})


def test_recorded_steps_that_were_longer_by_themselves_keep_their_shares() -> None:
    """Episodes of different length: nobody's Python becomes nothing."""
    found = budget_of_record(
        budget(compute=58, exposed_comm=10, python=32),
        with_measured(StepTime(profiled=100), truth(40_000_000)),
        on_host=True,
    )
    assert ms_of(found) == pytest.approx({"compute": 23.2, "exposed_comm": 4, "python": 12.8})


def test_without_a_truth_nothing_changes() -> None:
    bare = budget(compute=1)
    assert budget_of_record(bare, StepTime(profiled=1.0)) is bare
    assert with_measured(StepTime(profiled=5.0), None) == StepTime(profiled=5.0)


def test_a_corrected_step_takes_the_place_of_the_profiled_one() -> None:
    step = StepTime(profiled=42.0, corrected=32.0, low=30.0, high=35.0)
    found = budget_of_record(budget(compute=22, operators=15, python=5), step)
    assert ms_of(found) == pytest.approx({"compute": 22, "operators": 7.5, "python": 2.5})
    assert found.basis == "corrected"


def test_a_measured_step_needs_no_correction_and_has_an_interval_of_its_own(read: Read) -> None:
    # 1..9 ms: standard deviation 2.74, over the root of 9 it is 0.913; Student's 2.31 with 8
    times = tuple(range(1_000_000, 10_000_000, 1_000_000))
    measured = MeasuredSteps(
        steps=9, steps_ns=times, step_ns=5_000_000, wall_ns=5_000_000, device_ns=None, phases_ns={}
    )
    found = with_measured(StepTime(profiled=8.0), measured)
    assert (found.truth, found.corrected) == (5.0, 5.0)
    assert found.low == pytest.approx(5 - 2.31 * 0.9129, rel=1e-3)
    assert found.high == pytest.approx(5 + 2.31 * 0.9129, rel=1e-3)
    trace = read(op("aten::mm", start=0, dur=10))
    assert with_correction(found, analyse(trace)) is found


def test_truth_is_the_median_of_plain_steps(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "wall_ns": 9_000, "first": True},
        {"step": 1, "wall_ns": 10, "forward_ns": 4},
        {"step": 2, "wall_ns": 30, "forward_ns": 6},
        {"step": 3, "wall_ns": 20, "forward_ns": 5},
        {"step": 4, "wall_ns": 900, "window": True},
        {"step": 5, "wall_ns": 800, "memory": True},
    ]
    text = "\n".join(map(json.dumps, rows)) + '\n{"step": 6, "wall_'  # cut by a kill
    (tmp_path / "steps.jsonl").write_text(text)
    found = read_measured_steps(tmp_path / "trace.json.gz")
    assert found is not None
    assert (found.step_ns, found.steps, found.phases_ns["forward"]) == (20, 3, 5)


def test_the_devices_time_is_the_step_where_it_is_known(tmp_path: Path) -> None:
    rows = [{"step": n, "wall_ns": 10, "device_ns": 25} for n in range(1, 4)]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_measured_steps(tmp_path / "trace.json.gz")
    assert found is not None
    assert found.step_ns == 25


def test_steps_whose_host_ran_ahead_tell_what_the_host_needs(tmp_path: Path) -> None:
    """The queue is empty at first, and again behind the window; else the device holds the host."""
    rows = [
        {"step": 1, "wall_ns": 20, "device_ns": 160, "forward_ns": 8, "backward_ns": 12},
        {"step": 2, "wall_ns": 98, "device_ns": 161, "forward_ns": 8, "backward_ns": 90},
        {"step": 3, "wall_ns": 162, "device_ns": 162, "forward_ns": 30, "backward_ns": 132},
        {"step": 4, "wall_ns": 161, "device_ns": 161, "forward_ns": 30, "backward_ns": 131},
        {"step": 5, "wall_ns": 24, "device_ns": 163, "forward_ns": 10, "backward_ns": 14},
    ]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_measured_steps(tmp_path / "trace.json.gz")
    assert found is not None
    assert (found.host_ns["forward"], found.host_ns["backward"]) == (9, 13)


def test_without_the_devices_time_nobody_knows_whose_host_ran_ahead(tmp_path: Path) -> None:
    rows = [{"step": n, "wall_ns": wall} for n, wall in enumerate((20, 100, 100, 100), 1)]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_measured_steps(tmp_path / "trace.json.gz")
    assert found is not None
    assert found.host_ns == {}


def test_a_bare_trace_has_no_truth(tmp_path: Path) -> None:
    assert read_measured_steps(tmp_path / "trace.json.gz") is None


def test_the_run_says_how_long_a_typical_step_waits_for_data() -> None:
    """The window recorded 30 ms of it; a typical step of the run waits for 2."""
    parts = tuple(
        Part(id=name, ms=ms, share=ms / 50)
        for name, ms in (
            ("compute", 20.0), ("operators", 0.0), ("python", 0.0), ("profiler", 0.0),
            ("data_loading", 30.0),
        )
    )  # fmt: skip
    recorded = Budget(step_ms=50, parts=parts, basis="cycles")
    step = StepTime(profiled=50.0, truth=22.0, corrected=22.0)
    measured = replace(truth(22_000_000), data_ns=2_000_000)
    on_cpu = budget_of_record(recorded, step, measured=measured, on_host=True)
    assert ms_of(on_cpu) == pytest.approx({"compute": 20, "data_loading": 2})
    lucky = replace(measured, data_ns=12_000_000)
    assert ms_of(budget_of_record(recorded, step, measured=lucky, on_host=True)) == pytest.approx(
        {"compute": 10, "data_loading": 12}
    )
    queued = budget_of_record(recorded, step, measured=replace(measured, data_ns=20_000_000))
    assert ms_of(queued)["data_loading"] == pytest.approx(13.2)  # as recorded: 30 of 50, of 22


def test_a_device_feels_a_wait_that_makes_steps_longer_than_the_lucky_ones_recorded() -> None:
    """50 ms recorded without any wait; a typical step takes 70 and waits for 25."""
    recorded = budget(compute=30, operators=20)
    parts = (*recorded.parts, Part(id="data_loading", ms=0.0, share=0.0))
    recorded = replace(recorded, parts=parts)
    measured = replace(truth(70_000_000), data_ns=25_000_000)
    typical = budget_of_record(
        recorded, StepTime(profiled=50.0, truth=70.0, corrected=70.0), measured=measured
    )
    assert ms_of(typical) == pytest.approx({"compute": 30, "operators": 20, "data_loading": 20})


def test_stalls_are_parts_of_the_mean_step() -> None:
    stall = Stall(cause="data", steps=5, cost_ms=8.0, share=0.2, typical_ms=32.0, longest_ms=40.0)
    times = StepTimes(
        steps=20, mean_ms=40.0, low_ms=39.0, high_ms=41.0, median_ms=32.0, typical_ms=32.0,
        p99_ms=72.0, longest_ms=72.0, variation=0.01,
    )  # fmt: skip
    run = RankRun(rank=0, steps=20, warm_up=0, times=times, stalls=(stall,))
    step = with_measured(StepTime(profiled=46), truth(32_000_000), run)
    assert (step.truth, step.mean, step.median, step.p99) == (40.0, 40.0, 32.0, 72.0)
    mean = budget_of_record(budget(compute=22, operators=15, python=5, profiler=4), step, run=run)
    assert ms_of(mean) == pytest.approx(
        {"compute": 22, "operators": 7.5, "python": 2.5, "stall_data": 8}
    )
    assert sum(part.share for part in mean.parts) == pytest.approx(1)


def test_in_cuda_graphs_the_idle_time_between_kernels_shrinks() -> None:
    budget = Budget(
        step_ms=10.0,
        parts=tuple(
            Part(id=name, ms=ms, share=ms / 10)
            for name, ms in {
                "compute": 8.0,
                "operators": 0.0,
                "python": 0.0,
                "profiler": 0.0,
                "idle_launch": 1.5,
                "idle_other": 0.5,
            }.items()
        ),
        basis="cycles",
    )
    step = StepTime(profiled=10.0, corrected=9.0, low=8.0, high=10.0)
    parts = {part.id: part.ms for part in budget_of_record(budget, step, graphs=True).parts}
    assert parts["compute"] == pytest.approx(8.0)
    assert (parts["idle_launch"], parts["idle_other"]) == pytest.approx((0.75, 0.25))
