"""Small graphs that tests write number by number. Times are plain numbers in ns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepscope.records.rank import MeasuredSteps
from stepscope.step.graph import CallKind, Calls, Phase, StepGraph, Tasks


class Task(NamedTuple):
    dur: float
    stream: int = 0
    latency: float = 0.0
    spacing: float = 0.0
    after: int = -1
    delay: float = 0.0


class Call(NamedTuple):
    gap: float
    own: float = 0.0
    tasks: tuple[Task, ...] = ()
    waits: tuple[int, ...] = ()
    tail: float = 0.0
    phase: Phase = Phase.FORWARD


def make(*calls: Call, end: float = 0.0, depth: int = 1024) -> StepGraph:
    kinds = [
        CallKind.WAIT if call.waits else CallKind.LAUNCH if call.tasks else CallKind.PLAIN
        for call in calls
    ]
    tasks = [(number, task) for number, call in enumerate(calls) for task in call.tasks]
    count = len(calls)

    def floats(values: list[float]) -> np.ndarray:
        return np.array(values, np.float64)

    return StepGraph(
        calls=Calls(
            kind=np.array(kinds, np.int8),
            gap_ns=floats([call.gap for call in calls]),
            call_ns=floats([call.own for call in calls]),
            tail_ns=floats([call.tail for call in calls]),
            phase=np.array([call.phase for call in calls], np.int8),
            row=np.full(count, -1, np.int32),
            operator=np.full(count, -1, np.int32),
            frames=np.zeros(count),
            awaits=tuple(call.waits for call in calls),
        ),
        tasks=Tasks(
            call=np.array([number for number, _ in tasks], np.int32),
            stream=np.array([task.stream for _, task in tasks], np.int32),
            dur_ns=floats([task.dur for _, task in tasks]),
            spacing_ns=floats([task.spacing for _, task in tasks]),
            latency_ns=floats([task.latency for _, task in tasks]),
            kind=np.zeros(len(tasks), np.int8),
            row=np.full(len(tasks), -1, np.int32),
            after=np.array([task.after for _, task in tasks], np.int32),
            after_ns=floats([task.delay for _, task in tasks]),
        ),
        streams=max((task.stream for _, task in tasks), default=-1) + 1,
        end_ns=end,
        queue_depth=depth,
    )


def measured(
    step: int, *, host: dict[str, int] | None = None, phases: dict[str, int] | None = None
) -> MeasuredSteps:
    """A run's steps, measured without the profiler."""
    return MeasuredSteps(
        steps=1,
        steps_ns=(step,),
        step_ns=step,
        wall_ns=step,
        device_ns=None,
        phases_ns=phases or {},
        host_ns=host or {},
    )
