"""Lines reach the disk whole and in order, whatever happens around them."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from stepscope.measure.folder import KeptJson
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


# A file that is written again when nothing else can be.


@pytest.fixture
def kept(tmp_path: Path) -> KeptJson:
    file = KeptJson(tmp_path / "a.json")
    file.write({"status": "running"})
    return file


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refused)


def content(file: KeptJson) -> Any:
    return json.loads(file.path.read_text())


def test_it_takes_a_block_until_its_last_writing(kept: KeptJson) -> None:
    assert kept.path.stat().st_size == 4096
    kept.write({"status": "finished"}, last=True)
    assert kept.path.read_text() == '{"status": "finished"}'
    assert [file.name for file in kept.path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EROFS])
def test_where_no_other_file_can_be_made_it_is_written_over(
    kept: KeptJson, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, number)
    kept.write({"long": "x" * 5000}, {"short": "y"}, last=True)
    monkeypatch.undo()
    assert content(kept) == {"short": "y"}


def test_what_fits_in_no_version_is_an_error_and_leaves_the_last(
    kept: KeptJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        kept.write({"long": "x" * 5000})
    monkeypatch.undo()
    assert content(kept) == {"status": "running"}


def test_a_number_that_belongs_to_another_file_by_now_is_left_alone(
    kept: KeptJson, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert kept._file is not None
    os.close(kept._file)
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    assert theirs == kept._file
    refuse(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        kept.write({"status": "finished"}, last=True)
    assert os.fstat(theirs).st_size == 0
    os.close(theirs)


def test_anothers_file_is_never_taken(kept: KeptJson) -> None:
    with pytest.raises(FileExistsError):
        KeptJson(kept.path).write({"status": "mine"})
    assert content(kept) == {"status": "running"}
