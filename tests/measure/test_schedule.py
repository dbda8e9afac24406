"""Which step does what follows from its number alone."""

from __future__ import annotations

from stepscope.measure.schedule import Schedule


def roles(schedule: Schedule, steps: int) -> dict[str, list[int]]:
    return {
        "opens": [n for n in range(steps) if schedule.opens(n) is not None],
        "closes": [n for n in range(steps) if schedule.closes(n)],
        "memory": [n for n in range(steps) if schedule.measures_memory(n)],
    }


def test_one_window_then_one_step_for_memory() -> None:
    schedule = Schedule(wait=4, warmup=1, active=2, repeat=1, memory=True)
    assert roles(schedule, 40) == {"opens": [4], "closes": [7], "memory": [8]}


def test_windows_repeat_and_memory_waits_for_the_last() -> None:
    schedule = Schedule(wait=3, warmup=1, active=1, repeat=3, memory=True)
    assert roles(schedule, 40) == {"opens": [3, 8, 13], "closes": [5, 10, 15], "memory": [16]}


def test_memory_can_be_left_out() -> None:
    schedule = Schedule(wait=3, warmup=0, active=1, repeat=1, memory=False)
    assert roles(schedule, 20)["memory"] == []
