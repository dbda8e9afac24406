"""However many threads begin to train at the same time, one is the rank."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from threading import Barrier, Thread
from typing import NoReturn

import pytest

from stepscope.measure.folder import captured_parts
from stepscope.measure.processes import TrainingThread
from stepscope.measure.session import trial
from stepscope.measure.session.session import TrainingClaim


def test_one_of_many_threads_has_it() -> None:
    for _ in range(50):
        claim, together, winners = TrainingClaim(), Barrier(8), []

        def ask(claim: TrainingClaim = claim, together: Barrier = together) -> None:
            together.wait()
            if claim.take():
                winners.append(claim.take())  # noqa: B023

        threads = [Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert winners == [True]


def test_what_was_no_training_gives_it_back() -> None:
    claim = TrainingClaim()
    other = Thread(target=claim.take)
    other.start()
    other.join()
    assert not claim.take()
    claim.release()
    assert claim.take()


# A trial ends when it has seen enough, whatever its disk says.


class ProcessEndedError(Exception):
    """Instead of the test's own process."""


def end(code: int) -> NoReturn:
    raise ProcessEndedError(code)


def test_a_disk_that_refuses_does_not_keep_a_trial_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(trial, "_WAIT_S", 0.0)
    with pytest.raises(ProcessEndedError, match="0"):
        trial.end_process(tmp_path / "gone" / "rank-00000", 2)


# Which files of a rank count as captured.


def test_packed_steps_and_further_windows_are_listed(tmp_path: Path) -> None:
    names = (
        "trace-step-500.json.gz", "trace-stall.json.gz", "trace.json.gz", "steps-00002.json.gz",
        "steps-00001.json.gz", "steps.jsonl", "collectives-00001.json.gz", "samples.json",
    )  # fmt: skip
    for name in (*names, "rank.json", ".trace.json.gz@host.7.tmp", "notes.txt"):
        (tmp_path / name).touch()
    assert captured_parts(tmp_path) == [
        "trace.json.gz", "steps.jsonl", "samples.json", "collectives-00001.json.gz",
        "steps-00001.json.gz", "steps-00002.json.gz", "trace-stall.json.gz",
        "trace-step-500.json.gz",
    ]  # fmt: skip


def test_a_folder_that_was_removed_has_none(tmp_path: Path) -> None:
    assert captured_parts(tmp_path / "gone") == []


# A rank in a Ray worker closes when the thread that trains has ended.

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
