"""When tasks run, worked out by hand."""

from __future__ import annotations

from graphs import Call, Task, make
from stepscope.step.replay import replay, step_ns


def test_a_task_on_a_free_stream_starts_its_latency_after_its_call() -> None:
    found = replay(make(Call(10, own=4, tasks=(Task(7, latency=5),)), end=3))
    assert found.starts_ns.tolist() == [15]  # called at 10
    assert found.ends_ns.tolist() == [22]
    assert found.host_ends_ns == (17,)  # 10 + 4 + 3
    assert found.step_ends_ns == (22,)  # the device is last


def test_a_task_behind_another_starts_its_spacing_after_it() -> None:
    found = replay(
        make(Call(0, tasks=(Task(100, latency=5),)), Call(10, tasks=(Task(7, spacing=2),)))
    )
    assert found.starts_ns.tolist() == [5, 107]


def test_streams_run_side_by_side() -> None:
    found = replay(make(Call(0, tasks=(Task(100),)), Call(10, tasks=(Task(7, stream=1),))))
    assert found.starts_ns.tolist() == [0, 10]


def test_a_task_waits_for_another_stream_where_an_edge_says_so() -> None:
    found = replay(
        make(
            Call(0, tasks=(Task(100),)),
            Call(10, tasks=(Task(7, stream=1, after=0, delay=3),)),
        )
    )
    assert found.starts_ns.tolist() == [0, 103]


def test_a_blocking_call_returns_when_its_streams_have_run_dry() -> None:
    waiting = Call(0, own=1, waits=(0,), tail=4)
    found = replay(make(Call(0, own=2, tasks=(Task(50),)), waiting, end=6))
    assert found.host_ends_ns == (60,)  # 50 + 4 + 6
    late = replay(make(Call(0, own=2, tasks=(Task(1),)), Call(90, own=5, waits=(0,), tail=4)))
    assert late.host_ends_ns == (97,)  # 2 + 90 + 5: nothing was left to wait for


def test_a_full_queue_holds_the_host_back() -> None:
    calls = [Call(1, tasks=(Task(100),)) for _ in range(4)]
    # Two may be queued: the third launch waits until the first task has started, at 1; the fourth
    # until the second has, at 101.
    found = replay(make(*calls, depth=2))
    assert found.called_ns.tolist() == [1, 2, 3, 101]
    assert replay(make(*calls)).called_ns.tolist() == [1, 2, 3, 4]


def test_a_host_bound_step_takes_what_the_host_takes() -> None:
    graph = make(Call(30, own=10, tasks=(Task(5, latency=2),)), end=20)
    assert step_ns(graph) == 60


def test_a_device_bound_step_takes_what_the_device_takes() -> None:
    graph = make(Call(1, own=1, tasks=(Task(500, latency=2, spacing=3),)), end=1)
    assert step_ns(graph) == 503


def test_a_step_that_synchronises_takes_both() -> None:
    graph = make(Call(30, own=10, tasks=(Task(500, latency=2),)), Call(5, own=1, waits=(0,)))
    assert step_ns(graph) == 532  # 30 + 2 + 500, then the next step begins


def test_nothing_takes_no_time() -> None:
    found = replay(make())
    assert (found.span_ns, found.step_ns) == (0, 0)


def test_host_and_device_alone_bound_the_step() -> None:
    graph = make(Call(30, own=10, tasks=(Task(5), Task(6, stream=1))), end=20)
    assert graph.host_ns == 60
    assert graph.device_ns == 6
    assert graph.size == 3
