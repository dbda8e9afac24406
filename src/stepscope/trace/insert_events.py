"""Copy a trace with events added at the beginning of its list; its own text stays as it is.

Nothing is decoded: the text passes through in pieces, so memory does not follow the file's size. A
file that ends early is closed after its last whole event.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from stepscope.errors import UnreadableInputError
from stepscope.trace.files import ByteSource
from stepscope.trace.json_brackets import SEARCH_BACK_BYTES, last_boundary
from stepscope.trace.json_pieces import EventText
from stepscope.trace.limits import Limits
from stepscope.trace.outside_keys import OutsideKeys
from stepscope.trace.regular_files import read_head

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_BASE = "baseTimeNanoseconds"
_NOT_JSON = (b"SQLite", b"\x80")


class EventList:
    """Where a trace's list of events begins, and the time that its events count from."""

    def __init__(self, path: Path) -> None:
        """Raises UnreadableInputError for a file that is no JSON trace."""
        if read_head(path).startswith(_NOT_JSON):
            raise UnreadableInputError(f"{path} is not a PyTorch profiler trace in JSON")
        self._path = path
        text = EventText(ByteSource(path), str(path), Limits.chosen())
        self._begins_at = text.begins_at
        self._is_bare_list = text.outside.is_bare_list
        keys = text.outside.keys
        self.base_ns = _whole(keys[_BASE] if _BASE in keys else self._tail_keys().get(_BASE))

    def with_events(self, events: Iterable[bytes], *, ends_early: bool) -> Iterator[bytes]:
        """The trace's text with these events first; each is a JSON object."""
        at = 0
        pieces = iter(ByteSource(self._path))
        for piece in pieces:
            if at + len(piece) < self._begins_at:
                yield piece
                at += len(piece)
                continue
            cut = self._begins_at - at
            yield piece[:cut]
            for event in events:
                yield b"\n"
                yield event
                yield b","
            rest = _chained(piece[cut:], pieces)
            yield from self._closed(rest) if ends_early else rest
            return

    def _closed(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Up to the last whole event that has another one after it."""
        last = b""
        for piece in pieces:
            last += piece
            if len(last) > 2 * SEARCH_BACK_BYTES:
                yield last[:-SEARCH_BACK_BYTES]
                last = last[-SEARCH_BACK_BYTES:]
        boundary = last_boundary(last, everywhere=True)
        yield last[: boundary[0]] if boundary else last
        yield b"]" if self._is_bare_list else b"]}"

    def _tail_keys(self) -> dict[str, object]:
        """The keys after the list; none where they cannot be found in the last megabyte."""
        if self._is_bare_list:
            return {}
        kept: deque[bytes] = deque()
        size = 0
        for piece in ByteSource(self._path):
            kept.append(piece)
            size += len(piece)
            while size - len(kept[0]) >= SEARCH_BACK_BYTES:
                size -= len(kept.popleft())
        tail = b"".join(kept)
        keys = OutsideKeys(Limits.chosen())
        end = keys.find_list_end(tail)
        if end is not None:
            keys.read_tail(tail[end + 1 :])
        return keys.keys


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
