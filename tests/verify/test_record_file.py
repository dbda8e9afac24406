"""The track record on disk: many writers, torn lines, strangers."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from promises import delivery, promise

from stepscope.errors import UsageError
from stepscope.records.prediction import Promise
from stepscope.verify.track_record import (
    Line,
    append,
    count_unread,
    node_name,
    read_lines,
    record_folder,
)

_WRITERS, _LINES = 4, 25


def _write_many(writer: int) -> None:
    for number in range(_LINES):
        append(promise(id=f"{writer}-{number}", path="x" * 5000))


def test_lines_of_several_writers_are_all_whole() -> None:
    with multiprocessing.get_context("spawn").Pool(_WRITERS) as pool:
        pool.map(_write_many, range(_WRITERS))
    lines = read_lines()
    expected = {f"{writer}-{number}" for writer in range(_WRITERS) for number in range(_LINES)}
    assert len(lines) == _WRITERS * _LINES
    assert {line.id for line in lines} == expected  # type: ignore[union-attr]


def the_file() -> Path:
    (file,) = record_folder().glob("*.jsonl")
    return file


def test_a_torn_last_line_costs_only_itself() -> None:
    append(promise(id="one"))
    append(promise(id="two"))
    file = the_file()
    file.write_bytes(file.read_bytes()[:-20])
    assert [line.id for line in read_lines()] == ["one"]  # type: ignore[union-attr]
    append(promise(id="three"))
    assert [line.id for line in read_lines()] == ["one", "three"]  # type: ignore[union-attr]


def test_what_is_not_ours_is_left_out() -> None:
    append(promise(id="one"))
    file = the_file()
    with file.open("ab") as handle:
        handle.write(b'hello\n{"kind": "else"}\n\xff\xfe\n{"kind": "promise", "id": 3}\n')
    newer = file.read_bytes().splitlines()[0].replace(b'"schema":1', b'"schema":2')
    with file.open("ab") as handle:
        handle.write(newer + b"\n")
    assert len(read_lines()) == 1


def test_nothing_written_is_nothing_read() -> None:
    assert read_lines() == []


def test_each_host_has_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    append(promise(id="one"))
    monkeypatch.setattr("platform.node", lambda: "node/7")
    append(promise(id="two", host=node_name()))
    assert len([*record_folder().glob("*.jsonl")]) == 2
    assert (record_folder() / "node_7.jsonl").exists()
    assert len(read_lines()) == 2


def test_folder_is_the_variable_else_the_users_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert record_folder() == tmp_path / "stepscope-record"
    monkeypatch.delenv("STEPSCOPE_RECORD")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert record_folder() == tmp_path / "config/stepscope/record"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_said_with_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Set STEPSCOPE_RECORD"):
        append(promise())


def test_a_file_in_the_folders_place_is_said_too(tmp_path: Path) -> None:
    (tmp_path / "stepscope-record").write_text("")
    with pytest.raises(UsageError, match="the track record cannot be written"):
        append(promise())


@pytest.mark.parametrize(
    "line",
    [
        delivery(a_ms=0.0),
        delivery(b_ms=0.0),
        delivery(b_ms=-3.0),
        promise(predicted_ms=0.0, low_ms=0.0),
        promise(baseline_ms=-1.0),
        promise(low_ms=18.0),
    ],
)
def test_numbers_that_no_step_has_are_left_out_counted_and_kept(line: Line) -> None:
    """Somebody edited the file: nothing can be reckoned with such a line, and it stays there."""
    append(promise(id="good"))
    append(line)
    before = the_file().read_bytes()
    assert [each.id for each in read_lines()] == ["good"]  # type: ignore[union-attr]
    assert count_unread() == 1
    append(promise(id="later"))
    assert the_file().read_bytes().startswith(before)


@pytest.mark.parametrize("how", ["pipe", "device"])
def test_a_record_that_is_no_file_is_neither_read_nor_written(how: str) -> None:
    append(promise())
    (file,) = record_folder().glob("*.jsonl")
    file.unlink()
    if how == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    assert (read_lines(), count_unread()) == ([], 1)
    with pytest.raises(UsageError, match="not a regular file"):
        append(promise())


@pytest.mark.parametrize("when", [-1.0, 1e300])
def test_a_promise_of_no_calendar_is_left_out(when: float) -> None:
    append(promise(when_unix=when))
    assert (read_lines(), count_unread()) == ([], 1)


def test_a_path_that_is_no_text_can_be_kept() -> None:
    append(promise(path=os.fsdecode(b"/runs/\xff")))
    (line,) = read_lines()
    assert isinstance(line, Promise)
    assert line.path == "/runs/?"
