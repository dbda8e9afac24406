"""A folded graph takes the very steps that the whole one takes, whatever is put between."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from graphs import Call, Task, make
from scaled_step import advance_times
from stepscope.explain.replay.graph import CallKind, StepGraph
from stepscope.explain.replay.schedule import replay
from stepscope.predict.max_plus import StepTables, split_launch, tabulate_step
from stepscope.predict.slowest_worker import slow_down

STEPS = 4


def steps_of(shape: StepTables, lasting: list[float] | None = None) -> list[float]:
    """By its tables; marked tasks last so long."""
    now, ends = np.zeros(shape.tables.shape[1]), []
    for _ in range(STEPS):
        for number, table in enumerate(shape.tables):
            now = advance_times(table, now)
            if lasting is not None and number < len(lasting):
                now[list(shape.marked[number])] += lasting[number]
        ends.append(float(now.max()))
    return ends


@st.composite
def graphs(draw: st.DrawFn) -> StepGraph:
    """Up to three streams; some tasks wait for one of another stream, some calls for all."""
    number = st.integers(0, 900).map(float)
    calls: list[Call] = []
    streams: list[int] = []
    for _ in range(draw(st.integers(1, 25))):
        if draw(st.integers(0, 9)) == 0:
            waits = tuple(sorted(set(streams)))
            calls.append(Call(draw(number), draw(number), waits=waits, tail=draw(number) / 20))
            continue
        tasks = []
        for _ in range(draw(st.integers(0, 2))):
            stream = draw(st.integers(0, 2))
            others = [task for task, other in enumerate(streams) if other != stream]
            after = draw(st.sampled_from(others)) if others and draw(st.booleans()) else -1
            tasks.append(
                Task(draw(number), stream, draw(number) / 10, draw(number) / 90, after, 3.0)
            )
            streams.append(stream)
        calls.append(Call(draw(number), draw(number), tuple(tasks)))
    return make(*calls, end=draw(number))


@settings(max_examples=60, deadline=None)
@given(graph=graphs(), data=st.data())
def test_tables_between_any_calls_give_the_replayed_steps(
    graph: StepGraph, data: st.DataObject
) -> None:
    place = st.integers(0, len(graph.calls))
    cuts = sorted(data.draw(st.lists(place, max_size=5)))
    shape = tabulate_step(graph, cuts)
    assert len(shape.tables) == len(cuts) + 1
    np.testing.assert_allclose(steps_of(shape), replay(graph, STEPS).step_ends_ns)


@settings(max_examples=60, deadline=None)
@given(graph=graphs(), data=st.data())
def test_marked_tasks_may_last_as_long_as_they_like(graph: StepGraph, data: st.DataObject) -> None:
    count = len(graph.tasks)
    chosen = data.draw(st.lists(st.integers(0, max(0, count - 1)), max_size=4, unique=True))
    marked = sorted(chosen) if count else []
    lasting = [float(data.draw(st.integers(0, 5000))) for _ in marked]
    durations = graph.tasks.dur_ns.copy()
    durations[marked] = lasting
    longer = replace(graph, tasks=replace(graph.tasks, dur_ns=durations))
    shape = tabulate_step(graph, (), marked)
    np.testing.assert_allclose(steps_of(shape, lasting), replay(longer, STEPS).step_ends_ns)


def test_one_streams_table_by_hand() -> None:
    """The host calls at 10 and at 40; kernels of 100 and 5, 2 apart, 1 behind their call."""
    graph = make(
        Call(10, 20, (Task(100, latency=1),)), Call(10, 5, (Task(5, latency=1, spacing=2),)), end=7
    )
    (table,) = tabulate_step(graph).tables
    assert table[0].tolist() == [52, -np.inf]  # the host waits for nobody
    # Behind a free stream: 10 + 1 + 100 + 2 + 5. Behind a busy one: 100 + 2 + 5.
    assert table[1].tolist() == [118, 107]


def test_a_slower_workers_host_and_kernels_take_longer() -> None:
    graph = make(Call(10, 20, (Task(90, spacing=10),)), Call(5, 5, (Task(90, spacing=10),)))
    shape = tabulate_step(graph)
    assert shape.own == (1.0, 0.9)  # of the stream's time a tenth lies between kernels
    whole = tabulate_step(slow_down(graph, 2.0)).tables[0]
    assert whole[0, 0] == 2 * shape.tables[0][0, 0]
    assert whole[1, 1] == shape.tables[0][1, 1] * (1 + 0.9)


def test_one_launch_taken_apart_runs_as_before() -> None:
    graph = make(Call(30, 12, tuple(Task(10 * (1 + i), latency=5) for i in range(6))))
    parts = split_launch(graph, [2, 2, 5])
    assert len(parts.calls) == 4
    assert parts.host_ns == graph.host_ns
    assert (parts.calls.kind == CallKind.LAUNCH).all()
    found = replay(parts, STEPS).step_ends_ns
    np.testing.assert_allclose(found, replay(graph, STEPS).step_ends_ns)
