"""Running maxima give the very steps that the loop over all tasks gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from stepscope.step.graph import CallKind, Calls, StepGraph, Tasks
from stepscope.step.replay import replay, step_ends, step_ns


def made_graph(
    rng: np.random.Generator, *, calls: int, streams: int, waits: int, depth: int, crossing: int
) -> StepGraph:
    """Random calls, tasks on random streams, some waiting for an earlier one elsewhere."""
    kinds = np.full(calls, CallKind.LAUNCH, np.int8)
    kinds[rng.random(calls) < 0.1] = CallKind.PLAIN
    kinds[rng.choice(calls, min(waits, calls), replace=False)] = CallKind.WAIT
    per_call = np.where(kinds == CallKind.LAUNCH, rng.integers(0, 3, calls), 0)
    call = np.repeat(np.arange(calls, dtype=np.int32), per_call)
    count = len(call)
    stream = rng.integers(0, streams, count).astype(np.int32)
    after = np.full(count, -1, np.int32)
    for task in rng.choice(count, min(crossing, count), replace=False) if count else ():
        earlier = np.flatnonzero(stream[:task] != stream[task])
        if len(earlier):
            after[task] = rng.choice(earlier)

    def times(size: int, most: int) -> np.ndarray:
        return rng.integers(0, most, size).astype(float)

    return StepGraph(
        calls=Calls(
            kind=kinds,
            gap_ns=times(calls, 900),
            call_ns=times(calls, 300),
            tail_ns=times(calls, 50),
            phase=np.zeros(calls, np.int8),
            row=np.arange(calls, dtype=np.int32),
            operator=np.full(calls, -1, np.int32),
            frames=np.zeros(calls),
            awaits=tuple(
                tuple(range(streams)) if kind == CallKind.WAIT else () for kind in kinds.tolist()
            ),
        ),
        tasks=Tasks(
            call=call,
            stream=stream,
            dur_ns=times(count, 1500),
            spacing_ns=times(count, 20),
            latency_ns=times(count, 200),
            kind=np.zeros(count, np.int8),
            row=np.arange(count, dtype=np.int32),
            after=after,
            after_ns=times(count, 30),
        ),
        streams=streams,
        end_ns=100.0,
        queue_depth=depth,
    )


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    calls=st.integers(1, 300),
    streams=st.integers(1, 3),
    waits=st.integers(0, 2),
    depth=st.integers(8, 600),
    crossing=st.integers(0, 6),
)
def test_steps_end_when_the_loop_says_they_do(
    seed: int, calls: int, streams: int, waits: int, depth: int, crossing: int
) -> None:
    graph = made_graph(
        np.random.default_rng(seed),
        calls=calls,
        streams=streams,
        waits=waits,
        depth=depth,
        crossing=crossing,
    )
    ends = step_ends(graph, 4)
    if ends is not None:  # whole numbers of nanoseconds: not even rounding may differ
        assert ends == list(replay(graph, 4).step_ends_ns)
    assert step_ns(graph) == replay(graph, 4).step_ns


def test_a_long_lane_without_waits_is_not_left_to_the_loop() -> None:
    graph = made_graph(
        np.random.default_rng(0), calls=500, streams=2, waits=1, depth=1024, crossing=3
    )
    assert step_ends(graph, 4) is not None


@pytest.mark.parametrize("depth", [16, 1024])
def test_a_full_queue_holds_the_host_back_but_not_the_device(depth: int) -> None:
    """A fast host before a slow device: the device decides, however long the queue."""
    graph = made_graph(
        np.random.default_rng(1), calls=200, streams=1, waits=0, depth=depth, crossing=0
    )
    slow = replace(graph, tasks=replace(graph.tasks, dur_ns=graph.tasks.dur_ns * 10))
    assert step_ns(slow) == pytest.approx(slow.device_ns)
