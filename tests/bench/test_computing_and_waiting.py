"""A step's time taken apart: what it computes, queues for a core, and waits of its own accord."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stepscope.bench import catalogue
from stepscope.bench.steps import StepMarks, StepParts, mean_parts, split_steps
from stepscope.bench.task import BenchTask
from stepscope.measure import machine
from stepscope.measure.machine import ThreadCounters
from stepscope.ui.bench.results import plain_steps

MS = 1_000_000
linux_only = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the system does not count"
)


def marks_of(*steps: tuple[float, float, float, float, int]) -> list[ThreadCounters]:
    """Steps of (wall, computing, queue, other threads) ms, and how often each gave up its core."""
    marks = [ThreadCounters(0, 0, 0, 0, 0)]
    for wall, computing, queue, others, switches in steps:
        grown = (wall, computing, queue, computing + others)
        last = marks[-1]
        counts = [before + int(ms * MS) for before, ms in zip(last[:4], grown, strict=True)]
        marks.append(ThreadCounters(*counts, last.switches + switches))
    return marks


def test_what_is_neither_computing_nor_queue_is_waiting() -> None:
    parts = split_steps(marks_of((10, 8, 0.5, 0, 1), (10, 8, 0, 1, 2)))
    assert parts.wall == (10, 10)
    assert parts.computing == (8, 8)
    assert parts.queue == (0.5, 0)
    assert parts.waiting == (1.5, 2)
    assert parts.other_threads == (0, 1)


def test_a_thread_that_kept_its_core_did_not_wait_but_was_stopped_by_the_hypervisor() -> None:
    parts = split_steps(marks_of((10, 8, 0.5, 0, 0)))
    assert parts.waiting == (0,)


def test_a_loaded_machine_makes_a_step_queue_and_not_wait() -> None:
    calm = mean_parts(split_steps(marks_of(*[(10, 9.5, 0, 0, 1)] * 40)), 40)
    loaded = mean_parts(split_steps(marks_of(*[(18, 9.5, 8, 0, 1)] * 40)), 40)
    assert calm is not None
    assert loaded is not None
    assert (calm.queue_ms, loaded.queue_ms) == (0, 8)
    assert calm.waiting_ms == pytest.approx(0.5)
    assert loaded.waiting_ms == pytest.approx(0.5)


def test_warm_up_the_window_and_a_single_pause_do_not_count() -> None:
    steady = [(10, 9.5, 0, 0, 1)] * 40
    steady[20] = (110, 9.5, 0, 0, 1)
    warm_up, window = [(500, 100, 0, 0, 1)], [(40, 20, 0, 30, 1)] * 9
    parts = mean_parts(split_steps(marks_of(*warm_up, *steady, *window)), 41)
    assert parts is not None
    assert parts.computing_ms == pytest.approx(9.5)
    assert parts.waiting_ms == pytest.approx(0.5)


def test_a_wait_in_every_tenth_step_counts() -> None:
    steps = [(20, 10, 0, 0, 1) if number % 10 == 9 else (10, 10, 0, 0, 0) for number in range(60)]
    parts = mean_parts(split_steps(marks_of(*steps)), 60)
    assert parts is not None
    assert parts.waiting_ms == pytest.approx(6 * 10 / 55)  # five steps warm up


def test_a_step_that_may_wait_for_other_threads_is_not_taken_apart() -> None:
    assert mean_parts(split_steps(marks_of(*[(10, 8, 0, 6, 5)] * 40)), 40) is None
    assert mean_parts(split_steps(marks_of(*[(10, 8, 0, 0.4, 5)] * 40)), 40) is not None


def test_a_step_that_capture_sees_as_five_has_its_window_five_times_as_early() -> None:
    task = BenchTask(workload=catalogue.load("wgan-gp"), size="tiny", steps=59)
    assert plain_steps(task, 1, 1.0) == 50  # the window and what follows it take nine
    assert plain_steps(task, 1, 5.0) == 10
    assert plain_steps(task, 2, 5.0) == 59


def test_no_step_is_no_parts() -> None:
    assert mean_parts(split_steps([ThreadCounters(0, 0, 0, 0, 0)]), 40) is None
    assert mean_parts(StepParts(), 40) is None


@linux_only
def test_a_sleep_is_waiting_and_work_is_computing() -> None:
    marks = StepMarks.here()
    assert marks is not None
    time.sleep(0.03)
    marks.step_ended()
    end = time.thread_time() + 0.03
    while time.thread_time() < end:
        pass
    marks.step_ended()
    parts = marks.parts()
    assert parts is not None
    assert parts.waiting[0] > 25
    assert parts.computing[0] < 5
    assert parts.computing[1] >= 30
    assert parts.waiting[1] < 5


@linux_only
def test_work_of_other_threads_is_seen() -> None:
    marks = StepMarks.here()
    assert marks is not None

    def work() -> None:
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    marks.step_ended()
    parts = marks.parts()
    assert parts is not None
    assert parts.other_threads[0] >= 25


def test_a_process_that_others_work_for_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = StepMarks(lambda: ThreadCounters(0, 0, 0, 0, 0))
    assert marks.parts() is not None
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [object()])
    assert marks.parts() is None


def test_a_system_that_does_not_count_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SCHEDULER", "/no/such/file")
    assert StepMarks.here() is None
    monkeypatch.setattr(machine, "_SCHEDULER", "/dev/null")
    assert StepMarks.here() is None


@linux_only
def test_a_training_writes_the_parts_of_each_step(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    command = [sys.executable, "-m", "stepscope.bench.train", "ncf", "--steps=24"]
    subprocess.run([*command, f"--losses={file}", "--device=cpu"], check=True, timeout=120)
    parts = json.loads(file.read_text())["parts"]
    assert {len(values) for values in parts.values()} == {24}
    for wall, computing, waiting in zip(
        parts["wall"], parts["computing"], parts["waiting"], strict=True
    ):
        assert 0 < computing < wall + 0.1
        assert 0 <= waiting < wall
