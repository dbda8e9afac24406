"""When a session has something to do: never a step late, and not asked about in between."""

from __future__ import annotations

import sys

import pytest

from stepscope.measure.schedule import Schedule
from stepscope.measure.session import _next_due


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize(("wait", "warmup", "active"), [(10, 2, 3), (1, 0, 1), (4, 1, 2)])
def test_the_next_due_step_is_the_first_the_schedule_acts_on(
    wait: int, warmup: int, active: int, repeat: int, memory: bool
) -> None:
    schedule = Schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, memory=memory)
    due = [
        step
        for step in range(200)
        if schedule.opens(step) is not None
        or schedule.closes(step)
        or schedule.measures_memory(step)
    ]
    for step in range(100):
        assert _next_due(schedule, step) == next((n for n in due if n >= step), sys.maxsize)
