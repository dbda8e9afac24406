"""A CPU's steps: communication beside the host's lane, and what the profiler cost."""

from __future__ import annotations

import numpy as np
import pytest

from graphs import measured
from stepscope.records.trace import Trace
from stepscope.step.correct import (
    FRAME_NS,
    OPERATOR_NS,
    correct,
    runs_on_host,
    without_profiler_on_cpu,
)
from stepscope.step.edit import scale_tasks
from stepscope.step.graph import CallKind, StepGraph, build_graph, typical_step
from stepscope.step.replay import replay, step_ns
from stepscope.step.steps import find_steps
from stepscope.step.work import find_work

from ..build import WORKER, frame, kernel, note, op, step
from ..conftest import Read

REDUCE = {"shapes": [[[100]]], "dtypes": ["TensorList"]}


def exchange(at: float = 0) -> list[dict]:
    """Compute, a call that starts an all-reduce, compute beside it, a wait, compute: 100 µs."""
    return [
        *op("aten::mm", start=at, dur=10),
        *op("c10d::allreduce_", start=at + 10, dur=2, **REDUCE),
        *note("gloo:all_reduce", start=at + 15, dur=60, thread=WORKER, shapes=[[100]],
              dtypes=["float"]),
        *op("aten::mm", start=at + 12, dur=30),
        *op("aten::add_", start=at + 80, dur=20),
    ]  # fmt: skip


def graph_of(trace: Trace) -> StepGraph:
    return build_graph(trace, find_work(trace))


def test_an_all_reduce_is_started_by_its_call(read: Read) -> None:
    graph = graph_of(read(*[exchange()]))
    assert graph.tasks.call.tolist() == [1]
    assert graph.tasks.latency_ns.tolist() == [5_000]
    assert graph.tasks.dur_ns.tolist() == [60_000]


def test_a_gap_in_which_it_ends_is_a_wait_for_it(read: Read) -> None:
    graph = graph_of(read(*[exchange()]))
    kinds = graph.calls.kind.tolist()
    assert kinds == [CallKind.PLAIN, CallKind.LAUNCH, CallKind.PLAIN, CallKind.WAIT, CallKind.PLAIN]
    assert graph.calls.awaits == ((), (), (), (0,), ())
    # It ends at 75; five of the 38 µs before the last operator are the host's own.
    assert graph.calls.gap_ns.tolist() == [0, 0, 0, 0, 5_000]


def test_replayed_it_takes_as_long_as_it_took(read: Read) -> None:
    graph = graph_of(read(*[exchange()]))
    assert replay(graph).host_ends_ns[-1] == pytest.approx(100_000)


def test_a_shorter_all_reduce_shortens_the_step_until_compute_decides(read: Read) -> None:
    graph = graph_of(read(*[exchange()]))
    every = np.ones(1, np.bool_)
    assert step_ns(scale_tasks(graph, every, 0.5)) == pytest.approx(70_000)
    assert step_ns(scale_tasks(graph, every, 0.0)) == pytest.approx(67_000)


def test_a_span_that_ends_after_the_host_went_on_had_ended_before(read: Read) -> None:
    """The thread that ends it got its turn late: the host waited from 42 to 380 for it."""
    graph = graph_of(
        read(
            op("c10d::allreduce_", start=10, dur=2, **REDUCE),
            note("gloo:all_reduce", start=15, dur=600, thread=WORKER, shapes=[[100]],
                 dtypes=["float"]),
            op("aten::mm", start=12, dur=30),
            op("aten::add_", start=380, dur=20),
        )
    )  # fmt: skip
    assert graph.tasks.dur_ns.tolist() == [365_000]
    assert graph.calls.kind.tolist()[2] == CallKind.WAIT
    assert replay(graph).host_ends_ns[-1] == pytest.approx(390_000)


def test_the_host_waits_for_each_of_two_at_once_in_turn(read: Read) -> None:
    """The first ends as the host continues, so the second is not over yet."""
    other = {"shapes": [[[300]]], "dtypes": ["TensorList"]}
    trace = read(
        op("c10d::allreduce_", start=0, dur=2, **REDUCE),
        op("c10d::allreduce_", start=2, dur=2, **other),
        note("gloo:all_reduce", start=5, dur=600, thread=WORKER, shapes=[[100]], dtypes=["float"]),
        note("gloo:all_reduce", start=6, dur=990, thread=WORKER + 1, shapes=[[300]],
             dtypes=["float"]),
        op("aten::mul_", start=610, dur=10),
        op("aten::mul_", start=1000, dur=10),
    )  # fmt: skip
    graph = graph_of(trace)
    assert sorted(graph.tasks.dur_ns.tolist()) == [600_000, 990_000]
    assert (graph.calls.kind == CallKind.WAIT).sum() == 2
    assert step_ns(graph) == pytest.approx(1_010_000)
    assert step_ns(scale_tasks(graph, graph.tasks.dur_ns > 0, 0.0)) < 50_000


def test_compute_that_hides_it_is_no_wait(read: Read) -> None:
    graph = graph_of(
        read(
            op("c10d::allreduce_", start=0, dur=2, **REDUCE),
            note("gloo:all_reduce", start=5, dur=20, thread=WORKER, shapes=[[100]],
                 dtypes=["float"]),
            op("aten::mm", start=3, dur=50),
            op("aten::add_", start=60, dur=20),
        )
    )  # fmt: skip
    assert CallKind.WAIT not in graph.calls.kind.tolist()


def test_steps_whose_threads_wake_up_at_different_times_are_still_alike(read: Read) -> None:
    """The second step's all-reduce begins one operator later; its call is the same."""
    late = exchange(at=100)
    late[2] = late[2] | {"ts": late[2]["ts"] + 30, "dur": 30}
    trace = read(step(1, start=0, dur=100), exchange(), step(2, start=100, dur=100), late)
    work = find_work(trace)
    found = typical_step(trace, work, find_steps(trace, work))
    assert (found.steps, found.alike) == (2, True)


# What recording cost


def nested(count: int, *, start: float, dur: float) -> list[dict]:
    """An operator with others inside it."""
    out = [*op("aten::outer", start=start, dur=dur)]
    for number in range(count - 1):
        out += op("aten::inner", start=start + 1 + number, dur=0.5)
    return out


def test_every_operator_costs_as_much(read: Read) -> None:
    trace = read(nested(10, start=0, dur=1000), nested(4, start=1000, dur=500))
    lighter, spread = without_profiler_on_cpu(graph_of(trace), trace, 1.0)
    assert lighter.calls.call_ns.tolist() == pytest.approx(
        [1_000_000 - 10 * OPERATOR_NS, 500_000 - 4 * OPERATOR_NS]
    )
    assert 0 < spread < 0.01


def test_slow_recording_costs_in_proportion(read: Read) -> None:
    trace = read(nested(10, start=0, dur=1000))
    lighter, _ = without_profiler_on_cpu(graph_of(trace), trace, 1.5)
    assert lighter.host_ns == pytest.approx(1_000_000 - 15 * OPERATOR_NS)


def test_python_functions_cost_too(read: Read) -> None:
    trace = read(
        frame("train.py(1): f", start=0, dur=1500),
        op("aten::mm", start=0, dur=500),
        frame("train.py(2): g", start=600, dur=300),
        op("aten::mm", start=1000, dur=500),
    )
    lighter, _ = without_profiler_on_cpu(graph_of(trace), trace, 1.0)
    assert 1_500_000 - lighter.host_ns == pytest.approx(2 * OPERATOR_NS + 2 * FRAME_NS)


def test_no_operator_loses_more_than_most_of_its_time(read: Read) -> None:
    trace = read(nested(100, start=0, dur=120))
    lighter, _ = without_profiler_on_cpu(graph_of(trace), trace, 1.0)
    assert lighter.host_ns == pytest.approx(0.2 * 120_000)


def test_a_bare_cpu_trace_is_corrected_with_an_interval(read: Read) -> None:
    trace = read(nested(10, start=0, dur=1000))
    found = correct(graph_of(trace), trace)
    assert found.basis == "calibrated"
    assert found.low_ns < found.step_ns < found.high_ns
    assert found.step_ns < 1_000_000


def test_a_measured_step_decides_over_the_constants(read: Read) -> None:
    trace = read(nested(10, start=0, dur=1000))
    found = correct(graph_of(trace), trace, truth=measured(900_000))
    assert found.step_ns == pytest.approx(900_000, rel=0.001)


def test_waiting_for_others_is_not_shortened_with_the_hosts_time(read: Read) -> None:
    trace = read(*[exchange()])
    found = correct(graph_of(trace), trace)
    # The all-reduce lasts as long as before, started a little earlier.
    assert 80_000 < found.step_ns < 100_000


def test_a_trace_with_kernels_is_none_of_a_cpu(read: Read) -> None:
    assert runs_on_host(read(op("aten::mm", start=0, dur=10)))
    assert not runs_on_host(read(kernel("gemm", start=5, dur=10, launched_at=0)))
