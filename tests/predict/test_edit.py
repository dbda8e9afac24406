"""Edits of a graph: what each changes, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import Call, Task, make
from stepscope.step.edit import Selection, insert, remove, reorder, scale_calls, scale_tasks
from stepscope.step.replay import replay, step_ns

CALLS = (
    Call(10, own=2, tasks=(Task(30, latency=5),)),
    Call(20, own=2, tasks=(Task(40, latency=5), Task(8, stream=1, after=0))),
    Call(5, own=1, waits=(0,), tail=3),
    Call(7, own=2, tasks=(Task(9, latency=5, after=2),)),
)
GRAPH = make(*CALLS, end=11)


def chosen(*calls: int, tasks: tuple[int, ...] = ()) -> Selection:
    return Selection(
        calls=np.isin(np.arange(len(GRAPH.calls)), calls),
        tasks=np.isin(np.arange(len(GRAPH.tasks)), tasks),
    )


def test_scaling_by_one_changes_nothing() -> None:
    everything = np.ones(len(GRAPH.tasks), np.bool_)
    assert step_ns(scale_tasks(GRAPH, everything, 1.0)) == step_ns(GRAPH)
    assert step_ns(scale_calls(GRAPH, np.ones(4, np.bool_), 1.0)) == step_ns(GRAPH)


def test_scaled_tasks_are_longer_and_others_are_not() -> None:
    found = scale_tasks(GRAPH, np.array([True, False, False, False]), 2.0)
    assert found.tasks.dur_ns.tolist() == [60, 40, 8, 9]


def test_a_removed_call_takes_its_gap_its_tasks_and_waits_for_them_along() -> None:
    found = remove(GRAPH, chosen(1))
    assert found.calls.gap_ns.tolist() == [10, 5, 7]
    assert found.tasks.dur_ns.tolist() == [30, 9]
    assert found.tasks.call.tolist() == [0, 2]
    assert found.tasks.after.tolist() == [-1, -1]  # it waited for a task that is gone
    assert found.calls.awaits == ((), (0,), ())


def test_its_gap_may_stay() -> None:
    found = remove(GRAPH, chosen(1), with_gaps=False)
    assert found.calls.gap_ns.tolist() == [10, 25, 7]


def test_a_call_that_loses_one_of_its_tasks_stays() -> None:
    found = remove(GRAPH, chosen(tasks=(2,)))
    assert len(found.calls) == 4
    assert found.tasks.dur_ns.tolist() == [30, 40, 9]


def test_inserted_launches_come_before_the_calls_they_were_put_before() -> None:
    found = insert(
        GRAPH, np.array([4, 1], np.int32), gap_ns=np.array([70.0, 60.0]), call_ns=1, dur_ns=2.0
    )
    assert found.calls.gap_ns.tolist() == [10, 60, 20, 5, 7, 70]
    assert found.tasks.call.tolist() == [0, 1, 2, 2, 4, 5]
    assert found.tasks.dur_ns.tolist() == [30, 2, 40, 8, 9, 2]
    assert found.tasks.after.tolist() == [-1, -1, -1, 0, 3, -1]  # moved with what they mean
    assert found.calls.awaits == ((), (), (), (0,), (), ())


def test_an_inserted_wait_has_no_task_and_keeps_its_place_among_launches() -> None:
    found = insert(
        GRAPH,
        np.array([1, 1, 1], np.int32),
        gap_ns=np.array([1.0, 2.0, 3.0]),
        call_ns=0.0,
        dur_ns=np.array([50.0, 0.0, 60.0]),
        awaits=[(), (0,), ()],
        tail_ns=np.array([0.0, 4.0, 0.0]),
    )
    assert found.calls.gap_ns.tolist() == [10, 1, 2, 3, 20, 5, 7]
    assert found.calls.awaits == ((), (), (0,), (), (), (0,), ())
    assert found.calls.tail_ns.tolist() == [0, 0, 4, 0, 0, 3, 0]
    assert found.tasks.call.tolist() == [0, 1, 3, 4, 4, 6]
    assert found.tasks.dur_ns.tolist() == [30, 50, 60, 40, 8, 9]


@given(st.lists(st.integers(0, 4), max_size=6))
def test_what_is_inserted_and_removed_again_leaves_the_graph_as_it_was(places: list[int]) -> None:
    more = insert(GRAPH, np.array(places, np.int32), gap_ns=50.0, call_ns=3.0, dur_ns=20.0)
    new = np.zeros(len(more.calls), np.bool_)
    for rank, place in enumerate(sorted(places)):
        new[place + rank] = True
    back = remove(more, Selection(calls=new, tasks=np.zeros(len(more.tasks), np.bool_)))
    assert replay(back).ends_ns.tolist() == replay(GRAPH).ends_ns.tolist()
    assert back.tasks.after.tolist() == GRAPH.tasks.after.tolist()


def test_reordered_calls_take_their_gaps_and_tasks_along() -> None:
    found = reorder(GRAPH, np.array([3, 0, 1, 2], np.int32))
    assert found.calls.gap_ns.tolist() == [7, 10, 20, 5]
    assert found.tasks.dur_ns.tolist() == [9, 30, 40, 8]
    assert found.tasks.after[0] == -1  # nothing waits for what comes later


def test_the_same_order_changes_nothing() -> None:
    assert step_ns(reorder(GRAPH, np.arange(4, dtype=np.int32))) == pytest.approx(step_ns(GRAPH))
