"""What the profiler cost, taken out by constants."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benches import analyse
from graphs import Call, Task, make
from stepscope import read_trace
from stepscope.errors import NotCapturedError
from stepscope.records.trace import Trace
from stepscope.step.correct import (
    WITH_SHAPES,
    as_recorded,
    correct,
    find_slowness,
    launch_slowness,
    without_profiler,
)
from stepscope.step.graph import Phase, StepGraph, typical_step
from stepscope.step.replay import step_ns
from stepscope.step.steps import find_steps
from stepscope.step.work import find_work
from stepscope.text.figures import milliseconds

from ..build import kernel, op, step
from ..conftest import Read


def typical(trace: Trace) -> StepGraph:
    work = find_work(trace)
    return typical_step(trace, work, find_steps(trace, work)).graph


def test_the_hosts_time_shrinks_by_one_factor_and_the_devices_stays() -> None:
    graph = make(Call(1000, own=100, tasks=(Task(70, latency=5),)), end=400)
    found = without_profiler(graph)
    assert found.calls.gap_ns.tolist() == pytest.approx([660])
    assert found.calls.call_ns.tolist() == pytest.approx([66])
    assert found.end_ns == pytest.approx(264)
    assert found.tasks.dur_ns.tolist() == [70]


def test_the_slower_recording_made_the_host_the_more_is_taken_out() -> None:
    graph = make(Call(1000, tasks=(Task(70),)))
    found = without_profiler(graph, WITH_SHAPES, 1.5)
    assert found.calls.gap_ns[0] == pytest.approx(660 * 1.5**-0.2)


def test_a_phase_whose_launches_were_slow_loses_more() -> None:
    graph = make(Call(1000, tasks=(Task(70),)), Call(1000, tasks=(Task(70),), phase=Phase.BACKWARD))
    found = without_profiler(graph, WITH_SHAPES, 1.0, (2.0, 1.0, 1.0, 1.0, 1.0))
    assert found.calls.gap_ns.tolist() == pytest.approx([660 * 2**-0.4, 660])


def launches(count: int, *, start: float, took: float) -> list[dict[str, object]]:
    return [
        event
        for number in range(count)
        for event in kernel(
            "k",
            start=start + 60 * number + 40,
            dur=5,
            launched_at=start + 60 * number,
            launch_dur=took,
        )
    ]


def test_launches_are_slow_beside_the_usual_7_us(read: Read) -> None:
    trace = read(launches(20, start=0, took=14))
    assert launch_slowness(typical(trace), trace)[Phase.FORWARD] == pytest.approx(2.0)


def test_few_launches_tell_nothing(read: Read) -> None:
    trace = read(launches(19, start=0, took=14))
    assert launch_slowness(typical(trace), trace) == (1.0,) * len(Phase)


def transposes(took_ns: float) -> list[dict[str, object]]:
    events = []
    for number in range(10):
        at = 100.0 * number
        events += op("aten::t", start=at, dur=50)
        events += op("aten::transpose", start=at + took_ns / 1e3, dur=20)
    return events


def test_slowness_is_what_operators_took_that_only_call_another(read: Read) -> None:
    assert find_slowness(read(transposes(1391))) == pytest.approx(1.0, abs=1e-3)
    assert find_slowness(read(transposes(1391 * 1.3))) == pytest.approx(1.3, abs=1e-3)
    assert find_slowness(read(transposes(9e3))) == 1.6  # no more than was ever seen


def test_a_trace_may_not_tell_it(read: Read) -> None:
    assert find_slowness(read(op("aten::mm", start=0, dur=5))) is None


def steps(read: Read, host_us: float, device_us: float) -> Trace:
    events = []
    for number in range(3):
        at = number * max(host_us, device_us)
        events += step(number, start=number * host_us, dur=host_us)
        launched = number * host_us + host_us / 2
        events += kernel("k", start=max(at, launched) + 8, dur=device_us - 2, launched_at=launched)
    return read(events)


def test_an_interval_is_wide_where_the_host_decides_and_narrow_where_it_does_not(
    read: Read,
) -> None:
    trace = steps(read, host_us=1000, device_us=100)
    found = correct(typical(trace), trace)
    assert found.low_ns < 0.9 * found.step_ns
    assert found.high_ns > 1.1 * found.step_ns
    busy = steps(read, host_us=300, device_us=1000)
    found = correct(typical(busy), busy)
    assert found.low_ns == pytest.approx(found.high_ns)


def test_steps_measured_on_an_h200_are_met(shared: Path) -> None:
    """Mean error at most 6%, worst 15%, where the traces themselves are off by 29% (mean)."""
    folder = shared / "traces/h200"
    ours, naive = [], []
    for name, truth in json.loads((folder / "truth.json").read_text()).items():
        file = folder / f"{name}.json.gz"
        if file.exists():
            trace = read_trace(file)
            graph = typical(trace)
            kind = "synced" if truth["sync_each"] else "pipelined"
            ms = truth[f"step_ms_{kind}"]
            ours.append(correct(graph, trace).step_ns / 1e6 / ms - 1)
            naive.append(step_ns(graph) / 1e6 / ms - 1)
    assert len(ours) == 17
    assert np.abs(ours).mean() < 0.06
    assert np.abs(ours).max() < 0.15
    assert np.abs(naive).mean() > 0.25


def test_a_step_whose_profilers_cost_is_not_told_is_replayed_as_recorded(read: Read) -> None:
    # Nothing in it only calls another operator: how slow recording was is not known.
    analysis = analyse(steps(read, host_us=1000, device_us=100))
    assert analysis.profiled_ms == 1.0
    assert analysis.corrected is None
    found = as_recorded(analysis.typical.graph, analysis.trace, 1e6)
    assert found.step_ns == pytest.approx(1e6, rel=1e-3)
    assert (found.basis, found.high_ns) == ("profiled", 1e6)


@pytest.mark.parametrize("recorded_ns", [0.5e6, 2e6])
def test_a_replay_of_another_step_is_refused_with_both_figures(
    read: Read, recorded_ns: float
) -> None:
    trace = steps(read, host_us=1000, device_us=100)
    expected = rf"takes {milliseconds(recorded_ns / 1e6)}.* 1.00 ms"
    with pytest.raises(NotCapturedError, match=expected):
        as_recorded(typical(trace), trace, recorded_ns)
