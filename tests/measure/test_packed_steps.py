"""Old steps move into packed parts: nothing is lost, nothing counts twice."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from stepscope.measure import writer as packed_steps
from stepscope.measure.never_raise import problems
from stepscope.measure.writer import FLUSH_S, LineWriter, StepPacking
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.step_files import read_step_columns


def line(step: int) -> str:
    return json.dumps({"step": step, "wall_ns": 1000 + step, "other_ns": 1000 + step})


def as_lines(rows: list[int], *, last: bool) -> list[str]:
    return list(map(line, rows))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_steps, "BLOCK", 100)
    monkeypatch.setattr(packed_steps, "KEPT", 10)


def packed(folder: Path, steps: int) -> StepPacking:
    """After so many lines were written and all that is due was packed."""
    packing = StepPacking(folder / "steps.jsonl")
    for step in range(steps):
        with (folder / "steps.jsonl").open("a") as file:
            file.write(f"{line(step)}\n")
        packing.wrote(1)
        finish(packing)
    return packing


def finish(packing: StepPacking) -> None:
    while packing.is_busy:
        packing.go_on()


def steps_in(folder: Path) -> tuple[list[int], tuple[Any, ...]]:
    oddities = Oddities("steps.jsonl")
    columns = read_step_columns(folder, oddities)
    assert columns is not None
    assert columns.wall_ns.tolist() == [1000 + step for step in columns.number.tolist()]
    return columns.number.tolist(), oddities.notes


def test_blocks_move_out_and_the_latest_steps_stay(tmp_path: Path) -> None:
    packed(tmp_path, 225)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "steps-00001.json.gz",
        "steps-00002.json.gz",
        "steps.jsonl",
    ]
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 25
    assert steps_in(tmp_path) == (list(range(225)), ())
    with gzip.open(tmp_path / "steps-00001.json.gz") as file:  # any tool can read it
        assert json.load(file)["steps"] == 100


def test_lines_that_come_while_a_block_is_packed_stay(tmp_path: Path) -> None:
    packing = packed(tmp_path, 109)
    for step in range(109, 130):
        with (tmp_path / "steps.jsonl").open("a") as file:
            file.write(f"{line(step)}\n")
        packing.wrote(1)
        packing.go_on()
    finish(packing)
    assert (tmp_path / "steps-00001.json.gz").exists()
    assert steps_in(tmp_path) == (list(range(130)), ())


def test_a_stop_at_any_piece_loses_nothing(tmp_path: Path) -> None:
    for pieces in range(12):
        folder = tmp_path / str(pieces)
        folder.mkdir()
        packing = StepPacking(folder / "steps.jsonl")
        (folder / "steps.jsonl").write_text("".join(f"{line(step)}\n" for step in range(110)))
        packing.wrote(110)
        for _ in range(pieces):
            packing.go_on()
        packing.close()
        assert steps_in(folder) == (list(range(110)), ())
        assert not list(folder.glob("*.tmp"))


def test_a_full_disk_leaves_all_lines_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_steps.os, "fsync", refuse)
    packing = packed(tmp_path, 115)
    assert [file.name for file in tmp_path.iterdir()] == ["steps.jsonl"]
    monkeypatch.undo()
    monkeypatch.setattr(packed_steps, "BLOCK", 100)
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.writelines(f"{line(step)}\n" for step in range(115, 140))
    packing.wrote(25)
    finish(packing)
    assert (tmp_path / "steps-00001.json.gz").exists()
    assert steps_in(tmp_path) == (list(range(140)), ())


def test_lines_that_cannot_be_packed_stay_and_are_noted(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": "one"}\n' * 110)
    packing = StepPacking(tmp_path / "steps.jsonl")
    packing.wrote(110)
    finish(packing)
    assert [file.name for file in tmp_path.iterdir()] == ["steps.jsonl"]
    assert any(problem.startswith("packing steps: ") for problem in problems())


def test_the_writer_packs_in_the_background(tmp_path: Path) -> None:
    tail = tmp_path / "steps.jsonl"
    queue: deque[Any] = deque(range(250))
    writer = LineWriter(tail, queue, as_lines, StepPacking(tail))
    gives_up = time.monotonic() + 20
    while not (tmp_path / "steps-00001.json.gz").exists() and time.monotonic() < gives_up:
        time.sleep(FLUSH_S / 5)
    queue.extend(range(250, 300))
    writer.close()
    assert (tmp_path / "steps-00001.json.gz").exists()
    assert steps_in(tmp_path) == (list(range(300)), ())


KILLED = """
import sys, time
from collections import deque
from pathlib import Path
from stepscope.measure import writer as packed_steps
from stepscope.measure.writer import LineWriter
packed_steps.BLOCK, packed_steps.KEPT = 300, 10
queue = deque()
tail = Path(sys.argv[1]) / "steps.jsonl"
as_lines = lambda rows, last: ['{"step": %d, "wall_ns": %d, "other_ns": 0}' % r for r in rows]
LineWriter(tail, queue, as_lines, packed_steps.StepPacking(tail))
for step in range(10 ** 9):
    queue.append((step, 1000 + step))
    print(step, flush=True)
    time.sleep(0.001)
"""


def test_a_kill_keeps_all_but_the_last_second(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        began = time.monotonic()
        last = before = 0
        for text in process.stdout:
            last = int(text)
            if time.monotonic() - began < 2:
                before = last  # these were noted a second before the end
            if time.monotonic() - began > 3:
                break
        os.kill(process.pid, signal.SIGKILL)
    steps, notes = steps_in(tmp_path)
    assert notes == ()
    assert steps == list(range(len(steps)))
    assert len(steps) > before > 300
    assert (tmp_path / "steps-00001.json.gz").exists()
