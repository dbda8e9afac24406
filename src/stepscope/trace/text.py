"""JSON text cut into pieces that hold whole events, so that memory never follows the file's size.

A trace is `{"key": .., "traceEvents": [event, event, ...], "key": ..}` with the keys in any order,
or a bare list of events. The text is never parsed as a whole: it is cut where one event ends and
the next begins. A cut in the wrong place (inside a nested object) leaves text that does not
decode, so a wrong guess is always noticed; the reader then gives the piece back for another cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import UnreadableInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

EVENT_KEYS = rb"(?:ph|cat|name|pid|tid|ts|dur|id|args|bp|s|tts|cname)"
BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"' + EVENT_KEYS + rb'"\s*:)')
_KINETO_BOUNDARY = b"\n  },\n  {"
_ANY_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_ARRAY_END = re.compile(rb"\}\s*\](?=\s*(?:,|\}|\Z))")
_BOM = b"\xef\xbb\xbf"
_SEARCH_BACK = 1 << 20
_MAX_TAIL_GUESSES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Comma-separated event objects and where they begin in the (decompressed) text."""

    text: bytes
    offset: int
    last: bool


class EventText:
    """Hands out pieces of events; afterwards `outside` holds the keys around them."""

    def __init__(self, source: Iterable[bytes], name: str) -> None:
        self.outside: dict[str, Any] = {}
        self.outside_lost: list[str] = []
        self.finished = False  # whether the list of events was closed
        self._chunks: Iterator[bytes] = iter(source)
        self._name = name
        self._buffer = b""
        self._offset = 0  # of the buffer's first byte
        self._exhausted = False
        self._done = False
        self._bare = False
        self._find_events()

    def next_piece(self) -> Piece | None:
        """The next piece, or None at the end."""
        while not self._done:
            self._fill()
            if self._exhausted:
                return self._last_piece()
            if cut := _last_boundary(self._buffer):
                return self._take(*cut)
        return None

    def give_back(self, piece: Piece, resume: int) -> None:
        """Only what lies before `piece.text[resume]` was good: read on from there."""
        self._buffer = piece.text[resume:] + b"," + self._buffer
        self._offset = piece.offset + resume

    def close(self, piece: Piece, end: int) -> None:
        """The list of events ends at `piece.text[end]` (its bracket): the rest are other keys."""
        tail = [piece.text[end + 1 :], b"" if piece.last else b",", self._buffer, *self._chunks]
        self._done = self.finished = True
        self._read_tail(b"".join(tail))

    def _find_events(self) -> None:
        searched = 0
        while True:
            more = self._fill()
            text = self._buffer.removeprefix(_BOM) if self._offset == 0 else self._buffer
            if not text.lstrip():
                if more:
                    continue
                raise UnreadableInputError(f"{self._name} is empty")
            first = text.lstrip()[:1]
            if first == b"[":
                self._bare = True
                return self._begin(self._buffer.index(b"[") + 1)
            if first != b"{":
                raise UnreadableInputError(
                    f"{self._name} is not JSON: it begins with {_shown(text.lstrip()[:12])} at "
                    f"byte {self._buffer.index(first)}"
                )
            if found := self._events_key(max(0, searched - 64)):
                return self._begin(found)
            searched = len(self._buffer)
            if not more:
                self._explain_missing_events()

    def _events_key(self, since: int) -> int | None:
        for match in _EVENTS_KEY.finditer(self._buffer, since):
            head = self._buffer[: match.start()].removeprefix(_BOM)
            try:
                self.outside |= msgspec.json.decode(head + b'"":0}', type=dict[str, Any])
            except msgspec.DecodeError:
                continue
            self.outside.pop("", None)
            return match.end()
        match = _EVENTS_KEY.search(self._buffer, since) if self._exhausted else None
        if match:
            self.outside_lost.append("the keys before the events")
            return match.end()
        return None

    def _explain_missing_events(self) -> None:
        try:
            found = msgspec.json.decode(self._buffer.removeprefix(_BOM))
        except msgspec.DecodeError:
            raise UnreadableInputError(
                f"{self._name} is not a readable trace: no list of events before byte "
                f"{self._offset + len(self._buffer)}, where the text ends or stops being JSON"
            ) from None
        keys = ", ".join(list(found)[:6]) or "no keys"
        raise UnreadableInputError(
            f"{self._name} is JSON but not a PyTorch trace: it has no traceEvents (found: {keys})"
        )

    def _begin(self, position: int) -> None:
        self._buffer = self._buffer[position:]
        self._offset = position

    def _fill(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            self._exhausted = True
            return False
        self._buffer += chunk
        return True

    def _take(self, end: int, resume: int) -> Piece:
        piece = Piece(text=self._buffer[:end], offset=self._offset, last=False)
        self._buffer = self._buffer[resume:]
        self._offset += resume
        return piece

    def _last_piece(self) -> Piece:
        self._done = True
        text, self._buffer = self._buffer, b""
        end = self._array_end(text)
        if end is not None:
            self.finished = True
            self._read_tail(text[end + 1 :])
            text = text[:end]
        return Piece(text=text, offset=self._offset, last=True)

    def _array_end(self, text: bytes) -> int | None:
        """The bracket that closes the events: the earliest one behind which all is valid keys."""
        if text.lstrip()[:1] == b"]":
            return text.index(b"]")
        since = max(0, len(text) - _SEARCH_BACK)
        guesses = [match.end() - 1 for match in _ARRAY_END.finditer(text, since)]
        best = None
        for guess in reversed(guesses[-_MAX_TAIL_GUESSES:]):
            if self._tail_keys(text[guess + 1 :]) is not None:
                best = guess
        return best

    def _tail_keys(self, tail: bytes) -> dict[str, Any] | None:
        tail = tail.strip()
        if self._bare:
            return {} if not tail else None
        if tail == b"}":
            return {}
        if not tail.startswith(b","):
            return None
        try:
            return msgspec.json.decode(b'{"":0' + tail, type=dict[str, Any])
        except msgspec.DecodeError:
            return None

    def _read_tail(self, tail: bytes) -> None:
        keys = self._tail_keys(tail)
        if keys is None:
            self.outside_lost.append("the keys behind the events")
        else:
            keys.pop("", None)
            self.outside |= keys


def boundaries(text: bytes) -> list[tuple[int, int]]:
    """Where one event ends and the next begins, as well as it can be told without parsing."""
    found = [(match.start() + 1, match.end()) for match in BOUNDARY.finditer(text)]
    return found or [(match.start() + 1, match.end()) for match in _ANY_BOUNDARY.finditer(text)]


def array_ends(text: bytes) -> Iterator[int]:
    """Brackets that may close the list of events, first one first."""
    if text.lstrip()[:1] == b"]":
        yield text.index(b"]")
    for match in _ARRAY_END.finditer(text):
        yield match.end() - 1


def _last_boundary(text: bytes) -> tuple[int, int] | None:
    position = text.rfind(_KINETO_BOUNDARY)
    if position >= 0:
        return position + 4, position + len(_KINETO_BOUNDARY) - 1
    for pattern in (BOUNDARY, _ANY_BOUNDARY):
        for reach in (8 << 10, _SEARCH_BACK):
            matches = list(pattern.finditer(text, max(0, len(text) - reach)))
            if matches:
                return matches[-1].start() + 1, matches[-1].end()
    return None


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace"))
