"""A trace as a graph: replayed unchanged, it gives the trace back."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope import read_trace
from stepscope.step.graph import CallKind, Phase, build_graph, typical_step
from stepscope.step.replay import replay
from stepscope.step.steps import find_steps
from stepscope.step.work import find_work

from ..build import AUTOGRAD, call, kernel, note, op, step
from ..conftest import Read

GOLDEN = ("cuda_step", "cuda_graph", "cpu_step", "cpu_stack_memory")


def error_of(path: Path) -> float:
    trace = read_trace(path)
    work = find_work(trace)
    found = replay(build_graph(trace, work))
    low, high = work.extent
    ends = [*found.ends_ns, *(found.host_ends_ns if work.on_host else ())]
    begin = min(found.starts_ns, default=0.0) if not work.on_host else 0.0
    return abs((max(ends) - begin) / (high - low) - 1)


def test_the_device_span_comes_back_within_two_percent(shared_trace: Path) -> None:
    assert error_of(shared_trace) < 0.02


@pytest.mark.parametrize("name", GOLDEN)
def test_and_of_traces_of_our_own(name: str, golden: Path) -> None:
    assert error_of(golden / f"{name}.json.gz") < 0.02


def test_calls_tasks_and_gaps_of_a_small_trace(read: Read) -> None:
    trace = read(
        op("aten::mm", start=0, dur=20),
        kernel("gemm", start=30, dur=50, launched_at=10, launch_dur=4),
        op("aten::add", start=22, dur=10),
        kernel("add", start=81, dur=5, launched_at=25, launch_dur=4),
        call("cudaDeviceSynchronize", start=40, dur=50),
    )
    graph = build_graph(trace, find_work(trace))
    assert graph.calls.kind.tolist() == [CallKind.LAUNCH, CallKind.LAUNCH, CallKind.WAIT]
    assert graph.calls.gap_ns.tolist() == [0, 11_000, 11_000]  # 10-14, 25-29, 40
    assert graph.calls.awaits == ((), (), (0,))
    assert graph.calls.tail_ns.tolist() == [0, 0, 4_000]  # the last task ended at 86
    assert graph.tasks.dur_ns.tolist() == [50_000, 5_000]
    assert graph.tasks.latency_ns[0] == 20_000  # launched at 10, started at 30
    assert graph.tasks.spacing_ns[1] == 1_000


def test_a_launch_that_waited_at_a_full_queue_is_no_longer_than_the_others(read: Read) -> None:
    events = []
    for number in range(600):
        slow = number == 599
        events += kernel(
            "k",
            start=1_000 + 100 * number,
            dur=99,
            launched_at=2 * number,
            launch_dur=40_000 if slow else 1,
        )
    graph = build_graph(trace := read(events), find_work(trace))
    assert graph.calls.call_ns[-1] == 1_000
    assert graph.queue_depth == 597  # 599 launched before it, less the two that had started


def test_phases_are_told_by_what_is_around_a_call(read: Read) -> None:
    trace = read(
        kernel("f", start=10, dur=1, launched_at=2),
        op("autograd::engine::evaluate_function: MmBackward0", start=20, dur=20, thread=AUTOGRAD),
        kernel("b", start=30, dur=1, launched_at=25, thread=AUTOGRAD),
        note("Optimizer.step#AdamW.step", start=50, dur=20),
        kernel("o", start=60, dur=1, launched_at=55),
    )
    graph = build_graph(trace, find_work(trace))
    assert graph.calls.phase.tolist() == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


def test_communication_waits_for_the_compute_launched_before_it(read: Read) -> None:
    trace = read(
        kernel("gemm", start=10, dur=50, launched_at=0),
        kernel("ncclKernel_AllReduce", start=62, dur=20, stream=20, launched_at=5),
    )
    graph = build_graph(trace, find_work(trace))
    assert graph.tasks.after.tolist() == [-1, 0]


def test_a_typical_step_is_the_median_of_steps_that_are_alike(read: Read) -> None:
    events = []
    for number, (gap, dur) in enumerate(((10, 30), (14, 33), (90, 31))):
        at = 1_000 * number
        events += step(number, start=at, dur=500)
        events += kernel("k", start=at + gap + 20, dur=dur, launched_at=at + gap, launch_dur=5)
    trace = read(events)
    work = find_work(trace)
    found = typical_step(trace, work, find_steps(trace, work))
    assert (found.steps, found.alike) == (3, True)
    assert found.graph.calls.gap_ns.tolist() == [14_000]
    assert found.graph.tasks.dur_ns.tolist() == [31_000]
    assert found.graph.end_ns == 481_000  # 500 - 14 - 5


def test_where_steps_differ_the_middle_one_stands_for_all(read: Read) -> None:
    events = []
    for number, kernels in enumerate((3, 4, 3)):
        at = 1_000 * number
        events += step(number, start=at, dur=100 + 10 * number)
        for each in range(kernels):
            events += kernel("k", start=at + 20 + 10 * each, dur=5, launched_at=at + 5 * each)
    trace = read(events)
    work = find_work(trace)
    found = typical_step(trace, work, find_steps(trace, work))
    assert not found.alike
    assert len(found.graph.calls) == 4
