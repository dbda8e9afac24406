"""A rank in a Ray worker closes when the thread that trains has ended."""

from __future__ import annotations

import sys
import threading

import pytest

from stepscope.measure.processes import TrainingThread

WORKER = "/site-packages/ray/_private/workers/default_worker.py"


def _train_in_a_thread(closed: threading.Event) -> TrainingThread:
    made: list[TrainingThread] = []
    thread = threading.Thread(target=lambda: made.append(TrainingThread(closed.set)))
    thread.start()
    thread.join()
    return made[0]


def test_the_end_of_the_thread_closes_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [WORKER, "--node-ip-address=1"])
    closed = threading.Event()
    _train_in_a_thread(closed).wait_until_closed()
    assert closed.is_set()


def test_nothing_closes_while_the_thread_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [WORKER])
    closed, ends = threading.Event(), threading.Event()

    def train() -> None:
        training = TrainingThread(closed.set)
        training.wait_until_closed()  # a process group of the script's own is destroyed
        ends.wait(60)

    thread = threading.Thread(target=train)
    thread.start()
    assert not closed.wait(0.2)
    ends.set()
    thread.join()
    assert closed.wait(60)


def test_outside_ray_and_in_the_main_thread_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = threading.Event()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    _train_in_a_thread(closed).wait_until_closed()
    monkeypatch.setattr(sys, "argv", [WORKER])
    TrainingThread(closed.set).wait_until_closed()
    assert not closed.wait(0.1)
    assert "stepscope-end" not in {thread.name for thread in threading.enumerate()}
