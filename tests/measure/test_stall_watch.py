"""A window around a stall that comes again: when it is asked for, and when not."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepscope.measure.profiler.extra_windows import STALL_TRACE, TRIES, StallWatch
from stepscope.measure.profiler.schedule import PlannedWindow, Schedule
from stepscope.measure.settings import Settings

MS = 1_000_000
Wall = Callable[[int], int]


def as_lines(rows: list[Any], *, last: bool) -> list[str]:
    return [json.dumps(row) for row in rows]


def no_json(rows: list[Any], *, last: bool) -> list[str]:
    return ["{"]


class Job:
    """A training whose steps reach the watch a few at a time, as the writer hands them over."""

    def __init__(self, folder: Path, *, every: int = 0) -> None:
        self.settings = Settings(folder=str(folder), wait=4, warmup=1, active=2, every=every)
        self.number = 0
        self.schedule = Schedule.plan(self.settings)
        self.watch = StallWatch(as_lines, self, self.schedule, folder)
        self.asked: list[PlannedWindow] = []
        self.woken: list[int] = []
        self._profiled: set[int] = set()

    def wake(self, step: int) -> None:
        assert self.schedule.extra is not None
        self.asked.append(self.schedule.extra)
        self.woken.append(step)
        window = self.asked[-1]
        self._profiled |= set(range(window.first, window.last + 1))

    def run(self, steps: int, wall: Wall, *, at_once: int = 7, phase: str = "data_ns") -> None:
        for first in range(0, steps, at_once):
            batch = range(first, min(first + at_once, steps))
            self.number = batch[-1] + 1
            self.watch([*self._rows(batch, wall, phase)], last=False)

    def _rows(self, batch: range, wall: Wall, phase: str) -> Iterator[dict[str, Any]]:
        for step in batch:
            ms = wall(step)
            row = {"step": step, "wall_ns": ms * MS, "other_ns": 10 * MS}
            row |= {phase: (ms - 10) * MS, "window": step in self._profiled}
            yield row


def every_20th(step: int) -> int:
    return 50 if step % 20 == 19 else 10


def test_the_window_opens_before_the_next_regular_stall(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(200, every_20th)
    (window,) = job.asked
    assert window.alone
    assert window.file == STALL_TRACE
    assert window.first_active < 79 < window.last  # the third was too near
    assert window.active == 3
    assert job.woken == [window.first]
    assert job.watch.content() == {"windows": 1, "stall": {"step": 79, "wall_ns": 50 * MS}}


def test_a_class_must_be_seen_twice(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(60, lambda step: 80 if step == 30 else 10)
    assert job.asked == []
    assert job.watch.content() == {"windows": 0, "stall": None}


def test_small_stalls_by_chance_do_not_hide_the_regular_ones(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(200, lambda step: 16 if step in (25, 46, 52) else every_20th(step))
    (window,) = job.asked
    assert (window.first_active + 1) % 20 == 19


def test_steps_that_never_stall_open_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(300, lambda step: 10 + step % 3)
    assert job.asked == []


def test_frequent_stalls_lie_in_any_window(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(100, lambda step: 60 if step % 4 == 3 else 10)
    (window,) = job.asked
    assert window.active == 5
    assert job.watch.content()["stall"]


def test_stalls_without_a_rhythm_get_longer_windows_and_a_few_tries(tmp_path: Path) -> None:
    (tmp_path / STALL_TRACE).write_bytes(b"")
    job = Job(tmp_path)
    job.run(600, lambda step: 60 if step in (21, 25, 40, 43) else 10)
    assert [window.active for window in job.asked] == [5, 20, 20, 20]
    assert job.watch.gave_up
    assert not (tmp_path / STALL_TRACE).exists()  # it would show none


def test_a_rhythm_that_ends_is_given_up(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(900, lambda step: every_20th(step) if step < 60 else 10)
    assert [window.active for window in job.asked] == [3] * (TRIES - 1) + [20]
    assert job.watch.gave_up


def test_other_windows_are_not_disturbed(tmp_path: Path) -> None:
    job = Job(tmp_path, every=20)
    job.run(300, lambda step: 50 if step % 20 == 1 else 10)  # inside each regular window
    assert job.asked == []


def test_a_damaged_line_does_not_stop_the_writer(tmp_path: Path) -> None:
    job = Job(tmp_path)
    broken = StallWatch(no_json, job, job.schedule, tmp_path)
    assert broken([1], last=False) == ["{"]


SCRIPT = """
import time, torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(220):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.2 if step % 20 == 19 else 0.01)
"""


def test_the_trace_of_a_stalling_script_shows_a_stall(tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "run"
    path.write_text(SCRIPT)
    options = ["--out", str(out), "--no-explain", "--quiet", "--on-stall"]
    command = [sys.executable, "-m", "stepscope", "run", *options, "--", sys.executable, str(path)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    rank = json.loads((out / "rank-00000/rank.json").read_text())
    assert rank["stall_window"]["stall"]["step"] % 20 == 0  # the sleep follows the step's end
    with gzip.open(out / "rank-00000" / STALL_TRACE) as file:
        events = json.load(file)["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("ProfilerStep#")]
    assert max(event["dur"] for event in steps) > 200_000  # microseconds
