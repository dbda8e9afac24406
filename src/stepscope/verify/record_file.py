"""The track record on disk: JSON lines, one file per host, only ever appended to.

Several processes may write at once: each line is one write, under a lock. If a kill cut a line
short, the next writer closes it and readers skip it.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.encode_json import encode_json
from stepscope.records.promise import RECORD_SCHEMA, Delivery, Forgotten, Promise
from stepscope.records.user_folders import this_host, user_folder
from stepscope.trace.regular_files import LineFile, open_to_append

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: each line is still one write
    fcntl = None  # type: ignore[assignment]

Line = Promise | Delivery | Forgotten
_LINES: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def record_folder() -> Path:
    """$STEPSCOPE_RECORD, or a folder in the user's configuration."""
    return user_folder("STEPSCOPE_RECORD", "record")


def append(line: Line) -> None:
    """Add one whole line to this host's file."""
    path = record_folder() / f"{_file_name(this_host())}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open_to_append(path)
        try:
            _lock(handle)
            _write(handle, encode_json(line) + b"\n")
        finally:
            os.close(handle)
    except (OSError, UnreadableInputError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a regular file"
        raise UsageError(
            f"the track record cannot be written: {path}: {why}. Set STEPSCOPE_RECORD to a "
            "folder that you can write"
        ) from None


def read_lines() -> list[Line]:
    """The lines of every host that shares the folder, each file's in the order written.

    Lines that are not ours, or of an unknown schema, are left out: see `count_unread`.
    """
    return [line for line in map(_parse, _rows()) if line is not None]


def count_unread() -> int:
    """How many lines are left out. They stay in the file: nothing is ever overwritten."""
    return sum(_parse(row) is None for row in _rows())


def _rows() -> Iterator[bytes]:
    """An unreadable file, and a line too long to be ours, count as an empty line."""
    for path in sorted(record_folder().glob("*.jsonl")):
        lines = LineFile(path)
        try:
            yield from (line.text for line in lines)
        except UnreadableInputError:
            yield b""
        yield from [b""] * lines.too_long


def _parse(row: bytes) -> Line | None:
    try:
        line = _LINES.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return line if line.schema == RECORD_SCHEMA and _is_sound(line) else None


def _is_sound(line: Line) -> bool:
    """A prediction lies in its interval, unless somebody edited the file."""
    return not isinstance(line, Promise) or line.low_ms <= line.predicted_ms <= line.high_ms


def _write(handle: int, line: bytes) -> None:
    size = os.lseek(handle, 0, os.SEEK_END)
    if size:
        os.lseek(handle, size - 1, os.SEEK_SET)
        if os.read(handle, 1) != b"\n":
            line = b"\n" + line
    if os.write(handle, line) != len(line):
        raise OSError(28, "No space left on device")


def _lock(handle: int) -> None:
    """Until the handle is closed. Some network disks have no locks: a single write must do."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)


def _file_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", host) or "host"
