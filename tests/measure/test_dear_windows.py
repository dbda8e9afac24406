"""A step of very many operators is recorded once: recording must not take longer than training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.measure import never_raise
from stepscope.measure.profiler import windows as profiler_windows
from stepscope.measure.profiler.schedule import PlannedWindow, Schedule
from stepscope.measure.profiler.windows import ProfilerWindows
from stepscope.measure.settings import Settings


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its first entry is now; the second is what saving a window takes."""
    times = [0.0, 0.0]

    class FakeWindow:
        over = False
        file = type("File", (), {"is_busy": False})

        def __init__(self, _: object, planned: PlannedWindow, *__: object, **___: object) -> None:
            self.planned = planned

        def start(self) -> None: ...

        def let_go(self) -> None: ...

        def finish(self) -> bool:
            times[0] += times[1]
            return True

    monkeypatch.setattr(profiler_windows, "Window", FakeWindow)
    monkeypatch.setattr(profiler_windows, "perf_counter", lambda: times[0])
    return times


def recorded(windows: ProfilerWindows, planned: tuple[PlannedWindow, ...]) -> list[int]:
    """The first steps of windows that were opened and saved."""
    opened = []
    for one in planned:
        if windows.open(one, Path(), one_thread_trains=True):
            opened.append(one.first_active)
            windows.finish(windows.running)  # type: ignore[arg-type]
    return opened


def test_after_a_step_that_took_long_to_save_no_other_is_recorded(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(never_raise, "note", lambda *words: said.append(words))
    monkeypatch.setattr(profiler_windows, "note", lambda *words: said.append(words))
    plan = Schedule.plan(Settings(folder="x")).windows
    assert len(recorded(ProfilerWindows(Settings(folder="x")), plan)) == 3
    assert said == []
    clock[1] = 5.0
    assert recorded(ProfilerWindows(Settings(folder="x")), plan) == [2]
    ((_, words),) = said
    assert "saving one recorded step took 5.00 s" in words


def test_windows_that_were_asked_for_are_recorded_however_long_they_take(
    clock: list[float],
) -> None:
    clock[1] = 5.0
    plan = Schedule.plan(Settings(folder="x", wait=10)).windows
    assert len(recorded(ProfilerWindows(Settings(folder="x")), plan)) == len(plan) == 1
    windows = ProfilerWindows(Settings(folder="x"))
    early = Schedule.plan(Settings(folder="x")).windows[0]
    asked = PlannedWindow(first=50, warmup=1, active=3, kind="asked")
    assert recorded(windows, (early, asked)) == [2, 51]
