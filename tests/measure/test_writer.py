"""Lines reach the disk whole and in order, whatever happens around them."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

from stepscope.measure.never_raise import problems
from stepscope.measure.writer import FLUSH_S, LineWriter


def as_lines(rows: list[Any], *, last: bool) -> list[str]:
    return [str(row) for row in rows]


def test_lines_are_on_disk_before_the_end(tmp_path: Path) -> None:
    queue: deque[Any] = deque([1])
    writer = LineWriter(tmp_path / "a", queue, as_lines)
    time.sleep(4 * FLUSH_S)
    assert (tmp_path / "a").read_text() == "1\n"
    queue.extend((2, 3))
    writer.close()
    assert (tmp_path / "a").read_text() == "1\n2\n3\n"


def test_what_was_kept_back_is_asked_for_at_the_end(tmp_path: Path) -> None:
    kept: list[str] = []

    def patient(rows: list[Any], *, last: bool) -> list[str]:
        kept.extend(map(str, rows))
        return kept if last else []

    writer = LineWriter(tmp_path / "a", deque([1, 2]), patient)
    time.sleep(2 * FLUSH_S)
    assert not (tmp_path / "a").exists()
    writer.close()
    assert (tmp_path / "a").read_text() == "1\n2\n"


def test_rows_that_cannot_be_read_are_noted_and_the_rest_is_written(tmp_path: Path) -> None:
    def strict(rows: list[Any], *, last: bool) -> list[str]:
        return [f"{row:d}" for row in rows]

    queue: deque[Any] = deque(["odd"])
    writer = LineWriter(tmp_path / "a", queue, strict)
    time.sleep(2 * FLUSH_S)
    queue.append(1)
    writer.close()
    assert (tmp_path / "a").read_text() == "1\n"
    assert any(problem.startswith("writer: ValueError") for problem in problems())


def test_a_disk_that_refuses_is_noted_and_the_training_goes_on(tmp_path: Path) -> None:
    queue: deque[Any] = deque([1])
    writer = LineWriter(tmp_path / "no-such-folder" / "a", queue, as_lines)
    writer.close()
    assert any("writing a" in problem for problem in problems())
    assert not queue
