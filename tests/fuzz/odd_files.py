"""Files that are damaged byte by byte, and files that are no files."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING, Any

from fuzz.odd_json import damage, odd_value, text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

_INSERTED = [
    *(
        b"\xff",
        b"\x00",
        b"\xed\xa0\x80",
        b"\n",
        b"\r\n",
        b"{",
        b"[",
        b'"',
        b"}",
        b",",
        b"\\u",
        b"-",
    ),
    *(b"NaN", b"Infinity", b"1e999", b"9" * 400, b"9" * 5000, b"null", b'"\\ud800"', b"[" * 2000),
]


def damage_bytes(rng: Random, content: bytes) -> bytes:
    """One of the ways in which disks, editors and kills damage a file."""
    place = rng.randrange(len(content) + 1)
    inserted = rng.choice(_INSERTED)
    return rng.choice(
        (
            content[:place],
            content[place:],
            content[:place] + inserted + content[place:],
            content[:place] + inserted + content[place + len(inserted) :],
            content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :],
            content[:place] + content,
            b"\xef\xbb\xbf" + content,
            content.replace(b"\n", b"\r\n"),
            content.replace(b"\n", b"\r"),
            content.replace(b"\n", b""),
            b"",
            b"\n" * 1000,
            b"\x00" * len(content),
            rng.randbytes(200),
            content.decode("utf-8", "replace").encode("utf-16"),
            b"[" * 100_000,
            b'{"a":' * 50_000,
            b'{"a": ' + b"9" * 5000 + b"}",
            b" " * 100_000 + content,
            content * 20,
        )
    )


def damage_json(rng: Random, content: bytes) -> bytes:
    """The same file with odd values or another structure; NaN and huge numbers among them."""
    value = damage(rng, json.loads(content), rng.choice((1, 1, 1, 2, 3, 8)))
    if rng.random() < 0.05:
        value = odd_value(rng)
    written = text(value)
    if rng.random() < 0.1:  # a key twice: the later one counts
        written = b'{"schema": -1, "step": 2, "peak": 3, ' + written.lstrip(b"{ ")
    return written


def damage_lines(rng: Random, content: bytes) -> bytes:
    """JSON lines with odd rows, rows twice, in another order, gone, or endless."""
    rows: list[Any] = [json.loads(line) for line in content.splitlines() if line.strip()]
    way = rng.randrange(7)
    if way == 0:
        rng.shuffle(rows)
    elif way == 1:
        rows += rng.sample(rows, min(len(rows), 5))
    elif way == 2:
        field, value = rng.choice(list(rows[0])), odd_value(rng)
        for row in rows:
            row[field] = value
    elif way == 3:
        rows = [damage(rng, row, 1) for row in rows]
    elif way == 4:
        rows.insert(rng.randrange(len(rows) + 1), odd_value(rng))
    elif way == 5:
        rows = rng.sample(rows, rng.randrange(len(rows) + 1))
    else:
        rows = damage(rng, rows, rng.choice((1, 2, 5)))
    lines = [text(row) for row in rows] if isinstance(rows, list) else [text(rows)]
    if rng.random() < 0.05:
        lines.insert(rng.randrange(len(lines) + 1), b'{"step": "' + b"x" * 3_000_000 + b'"}')
    return b"\n".join(lines) + rng.choice((b"\n", b"", b"\r\n"))


def make_special(rng: Random, path: Path) -> None:
    """Something that is no regular file in the place of one."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    rng.choice(_SPECIAL)(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.suppress(OSError):
        made.bind(str(path))  # a name that is too long for one is left free


def _looping(path: Path) -> None:
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / path.name).write_text("{}")


def _link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


_SPECIAL: list[Callable[[Path], None]] = [
    os.mkfifo,
    os.mkfifo,
    _socket,
    _looping,
    _folder,
    *map(_link_to, ("/dev/zero", "/dev/full", "/dev/tty", "/dev/stdin", "/proc/kmsg")),
    *map(_link_to, ("/proc/self/environ", "/proc/kcore", "/proc/self/mem", "/sys/kernel/notes")),
    *map(_link_to, ("nowhere", "..", "/proc/self/fd/0", "/proc/self/pagemap")),
]
