"""One way to open files: regular ones only, whatever lies in their place, and within limits."""

from __future__ import annotations

import os
import socket
import time
import tracemalloc
from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.trace import files
from stepscope.trace.files import (
    LineFile,
    MissingFileError,
    is_folder,
    list_folder,
    open_file,
    open_to_append,
    read_start,
    read_tail,
    read_whole,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.json"


def refused(path: Path) -> str:
    began = time.monotonic()
    with pytest.raises(UnreadableInputError) as caught:
        read_whole(path)
    assert time.monotonic() - began < 2
    return str(caught.value)


def test_a_pipe_is_refused_at_once(path: Path) -> None:
    os.mkfifo(path)
    assert "not a regular file" in refused(path)


def test_a_socket_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)  # its whole name may be too long for one
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    assert "not a regular file" in refused(path)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full", "/dev/tty"])
def test_a_device_is_refused(path: Path, device: str) -> None:
    if not Path(device).exists():
        pytest.skip(f"no {device} here")
    path.symlink_to(device)
    assert "not a regular file" in refused(path)


@pytest.mark.parametrize("name", ["/proc/kmsg", "/proc/kcore", "/proc/self/pagemap"])
def test_a_file_of_the_system_neither_waits_nor_fills_the_memory(path: Path, name: str) -> None:
    if not Path(name).exists():
        pytest.skip(f"no {name} here")
    path.symlink_to(name)
    assert str(path) in refused(path)


def test_a_folder_a_dangling_link_and_a_loop_are_told_apart(path: Path) -> None:
    path.mkdir()
    assert "is a folder" in refused(path)
    path.rmdir()
    path.symlink_to("nowhere")
    assert "does not exist" in refused(path)
    path.unlink()
    path.symlink_to(path.name)
    assert "symbolic links" in refused(path)
    assert not is_folder(path)  # beside a run it keeps nobody from reading the run


def test_a_missing_file_is_an_error_of_its_own(path: Path) -> None:
    with pytest.raises(MissingFileError):
        open_file(path)


def test_a_pipe_that_takes_the_place_of_a_file_after_the_look_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"{}")
    before = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: before)
    assert "not a regular file" in refused(path)


def test_file_names_that_are_not_utf_8_can_be_reported(tmp_path: Path) -> None:
    message = refused(tmp_path / os.fsdecode(b"\xff\xfe.json"))
    assert "does not exist" in message
    message.encode("utf-8", "surrogateescape")
    assert "null" in refused(tmp_path / "a\0b")


def test_a_file_is_read_whole_up_to_its_limit(path: Path) -> None:
    path.write_bytes(b"x" * 100)
    assert read_whole(path, 100) == b"x" * 100
    with pytest.raises(UnreadableInputError, match="larger than"):
        read_whole(path, 99)


def test_head_and_tail(path: Path) -> None:
    path.write_bytes(b"0123456789")
    assert (read_start(path, 3), read_tail(path, 3), read_tail(path, 30)) == (
        b"012",
        b"789",
        b"0123456789",
    )


def test_the_descriptor_is_not_handed_on_to_programs(path: Path) -> None:
    path.write_bytes(b"")
    with open_file(path) as file:
        assert not os.get_inheritable(file.fileno())


def test_appending_needs_a_regular_file_too(path: Path) -> None:
    os.close(open_to_append(path))
    assert path.read_bytes() == b""
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UnreadableInputError, match="not a regular file"):
        open_to_append(path)


def test_a_folder_that_cannot_be_listed_is_an_error_of_ours(path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="does not exist"):
        list_folder(path)


# Lines.


def lines_of(path: Path, **limits: int) -> tuple[list[tuple[int, bytes, bool]], LineFile]:
    file = LineFile(path, **limits)
    return [tuple(line) for line in file], file


def test_lines_have_their_numbers_and_blank_ones_are_left_out(path: Path) -> None:
    path.write_bytes(b"one\n\n \r\nfour\r\nfive")
    found, file = lines_of(path)
    assert found == [(1, b"one", True), (4, b"four\r", True), (5, b"five", False)]
    assert (file.too_long, file.is_cut) == (0, False)


def test_lines_that_are_too_long_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", 7)
    path.write_bytes(b"a\n" + b"x" * 50 + b"\nb\n" + b"y" * 30)
    found, file = lines_of(path, max_line_bytes=10)
    assert [text for _, text, _ in found] == [b"a", b"b"]
    assert [number for number, _, _ in found] == [1, 3]
    assert file.too_long == 2


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 1000])
def test_pieces_of_any_size_give_the_same_lines(
    path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", piece)
    path.write_bytes(b"ab\nc\n\nlonger line\nlast")
    found, _ = lines_of(path)
    assert [text for _, text, _ in found] == [b"ab", b"c", b"longer line", b"last"]


def test_more_lines_than_the_limit_are_reported(path: Path) -> None:
    path.write_bytes(b"x\n" * 10)
    assert not lines_of(path, max_lines=10)[1].is_cut
    found, file = lines_of(path, max_lines=9)
    assert (len(found), file.is_cut) == (9, True)


def test_bytes_beyond_the_limit_are_not_read_and_give_no_line(path: Path) -> None:
    path.write_bytes(b"one\ntwo\nthree\n")
    found, file = lines_of(path, max_bytes=10)
    assert ([text for _, text, _ in found], file.is_cut) == ([b"one", b"two"], True)


def test_an_endless_line_takes_no_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)  # a gigabyte of zeros that no disk holds
    tracemalloc.start()
    found, lines = lines_of(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found, lines.too_long, lines.is_cut) == ([], 1, True)
    assert peak < 16 << 20


def test_nothing_is_read_after_a_line_without_end(path: Path) -> None:
    path.write_bytes(b"a\n" + b"x" * 100 + b"\nb\n" + b"x" * 3_000_000 + b"\nc\n")
    found, file = lines_of(path, max_line_bytes=100_000)
    assert ([text for _, text, _ in found], file.is_cut) == ([b"a", b"x" * 100, b"b"], True)


def test_a_pipe_has_no_lines(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(UnreadableInputError, match="not a regular file"):
        list(LineFile(path))
