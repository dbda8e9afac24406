"""Cut the text of a JSON trace into pieces of whole events, and read the keys around its
list of events. Memory never follows the file's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.text import figures
from stepscope.text.words import lazy_pattern
from stepscope.trace.decode import DECODE_ERRORS
from stepscope.trace.files import GZIP, ZSTD, Limits
from stepscope.trace.formats.events import NOTHING
from stepscope.trace.formats.json_brackets import (
    EVENT_BOUNDARY,
    EVENTS_KEY,
    SEARCH_BACK_BYTES,
    SEPARATORS,
    EventsKeySearch,
    EventWalk,
    last_boundary,
    scan_brackets,
)

# A trace is `{"key": .., "traceEvents": [event, event, ...], "key": ..}` with the keys in any
# order, or a bare list of events. The text is never parsed as a whole: it is cut where one event
# seems to end and the next to begin. A wrong cut leaves text that does not decode, so it is always
# noticed: the reader gives the end of the piece back, to be cut elsewhere. If a large piece holds
# no end of an event, the event's brackets are followed instead. An event longer than `Limits` allow
# is skipped.

_BLANK = lazy_pattern(rb"\s*+(?=\S)")
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"[\0", b"\0[")
_SHOWN_BYTES = 12
_SHOWN_EVENT_BYTES = 60
_BOUNDARY_BYTES = 64 << 10  # no boundary is longer, blanks included


class EventPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Comma-separated event objects and where they begin in the (decompressed) text.

    The last piece is all the rest of the text; `end` is where the list of events seems to close.
    A `single` event is long and ends where its brackets do.
    """

    text: bytes | memoryview
    offset: int
    last: bool = False
    end: int | None = None
    single: bool = False


class EventText:
    """Hands out pieces of events; at the end `outside` holds the keys around them."""

    def __init__(self, source: Iterable[bytes], name: str, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self.outside = OutsideKeys(self._limits)
        self.finished = False  # whether the list of events was closed
        self.stopped: str | None = None  # why the rest of the text was not read
        self.size = 0  # bytes of text read so far
        self.too_long = 0  # events that were skipped
        self.first_too_long: tuple[int, str] | None = None  # its byte, and how it begins
        self._chunks: Iterator[bytes] = iter(source)
        self._name = name
        self._buffer = b""
        self._offset = 0  # of the buffer's first byte
        self._separator = b""  # between the last piece and the buffer
        self._searched = 0  # bytes of the buffer that hold no boundary
        self._used = 0  # bytes of text up to the last event that was read
        self._exhausted = False
        self._done = False
        self._after_long = False  # whether separators come before the next event
        self._long = False  # whether the buffer's first event is known to be long
        start = self._find_first_byte()
        first = self._buffer[start : start + 1]
        if first == b"[":
            self.outside.is_bare_list = True
            self._drop(start + 1)
            self._check_first_element()
        elif first != b"{" or self._buffer.startswith(_UTF_16, start):
            shown = self._buffer[start : start + _SHOWN_BYTES]
            raise UnreadableInputError(
                f"{self._name} is not JSON: it begins with {_shown(shown)} at byte {start}"
                + _advice(shown)
            )
        else:
            self._drop(self._find_events_key(start))

    @property
    def begins_at(self) -> int:
        """Return where the list's first event begins in the text, before any piece was taken."""
        return self._offset

    def next_piece(self) -> EventPiece | None:
        while not self._done:
            self._fill()
            if self._exhausted and len(self._buffer) <= self._limits.large_bytes:
                return self._last_piece()
            piece = (None if self._long else self._cut()) or self._long_event()
            if piece is not None:
                return piece
        return None

    def mark_used(self) -> None:
        """An event was read: the next one may again be far away."""
        self._used = self.size

    def stop(self, why: str) -> None:
        self._done, self.stopped = True, why

    def give_back(self, piece: EventPiece, resume: int) -> None:
        """Read on from `piece.text[resume]`: only what lies before it was taken."""
        self._searched = len(piece.text) - resume
        self._long = resume == 0 and (
            self._exhausted or 2 * len(piece.text) >= self._limits.large_bytes
        )
        self._buffer = b"".join((piece.text[resume:], self._separator, self._buffer))
        self._offset = piece.offset + resume

    def close(self, piece: EventPiece, end: int) -> None:
        """The bracket at `piece.text[end]` closes the list of events: the rest are other keys."""
        tail = [piece.text[end + 1 :], self._separator, self._buffer]
        size = sum(map(len, tail))
        self._done = self.finished = True
        for chunk in self._chunks:
            tail.append(chunk)
            size += len(chunk)
            if size > self._limits.outside_bytes:
                self.outside.lost.append(f"what follows the events (over {figures.size(size)})")
                return
        self.outside.read_tail(b"".join(tail))

    # Cutting the events

    def _cut(self) -> EventPiece | None:
        """A piece that ends where a later event seems to begin, or the list to close."""
        large = len(self._buffer) > self._limits.large_bytes
        window = self._buffer[: self._limits.large_bytes] if large else self._buffer
        if cut := last_boundary(window, everywhere=large):
            return self._take(*cut)
        if not large and (end := scan_brackets(self._buffer).closed_at) is not None:
            return self._take(len(self._buffer), len(self._buffer), end)
        return None

    def _long_event(self) -> EventPiece | None:
        """The buffer's first event, up to its closing bracket, if it is known to be long.

        None: read more, or the event was skipped.
        """
        if not self._long and len(self._buffer) <= self._limits.large_bytes:
            return None
        self._long = False
        self._strip()
        walk = EventWalk()
        while not walk.is_settled(self._buffer) and len(self._buffer) <= self._limits.event_bytes:
            if not self._fill():
                return self._last_piece(single=True)
        if walk.closed_at is not None:
            return self._take(len(self._buffer), len(self._buffer), walk.closed_at)
        if walk.end is None or walk.end > self._limits.event_bytes:
            self._skip_event(walk)
            return None
        self._after_long = True
        return self._take(walk.end, walk.end, single=True)

    def _skip_event(self, walk: EventWalk) -> None:
        """Drop the buffer's first event, up to where its brackets or the next event's keys say."""
        self.too_long += 1
        if self.first_too_long is None:
            self.first_too_long = self._offset, _shown(self._buffer[:_SHOWN_EVENT_BYTES])
        follow_until = self._offset + 2 * self._limits.event_bytes
        search_from = 1
        while True:
            walk.lost = walk.lost or self._offset > follow_until
            if not walk.lost and walk.is_settled(self._buffer) and not walk.lost:
                return self._read_on(walk.resume)
            if walk.lost and (boundary := EVENT_BOUNDARY.search(self._buffer, search_from)):
                return self._read_on(boundary.end())
            if self._exhausted:
                return self._read_on(len(self._buffer))
            dropped = max(0, len(self._buffer) - _BOUNDARY_BYTES) if walk.lost else walk.position
            self._drop(dropped)
            walk.position -= dropped
            search_from = 0
            self._fill()

    def _read_on(self, start: int) -> None:
        """Read on at `start`, where an event begins or only separators follow."""
        self._drop(start)
        self._after_long = True

    def _drop(self, until: int) -> None:
        self._offset += until
        self._buffer = self._buffer[until:]
        self._searched = 0

    def _strip(self) -> None:
        self._drop(len(self._buffer) - len(self._buffer.lstrip(SEPARATORS)))

    def _take(
        self, until: int, resume: int, end: int | None = None, *, single: bool = False
    ) -> EventPiece:
        text = memoryview(self._buffer)[:until]
        piece = EventPiece(text=text, offset=self._offset, end=end, single=single)
        self._separator = self._buffer[until:resume]
        self._drop(resume)
        return piece

    def _last_piece(self, *, single: bool = False) -> EventPiece:
        self._done = True
        text, self._buffer, self._separator = self._buffer, b"", b""
        end = None if self.stopped else self.outside.find_list_end(text)
        return EventPiece(text=text, offset=self._offset, last=True, end=end, single=single)

    def _fill(self) -> bool:
        """Read a chunk, or as many bytes again as were searched in vain: that keeps it linear."""
        if self.size - self._used > self._limits.gap_bytes:
            self._exhausted = True
            self.stopped = (
                f"no event follows in the next {figures.size(self.size - self._used)} of text; "
                f"{self._limits.raise_event}"
            )
        chunks, size = [self._buffer], 0
        wanted = min(self._searched, self._limits.event_bytes)
        while not self._exhausted and size <= wanted:
            chunk = next(self._chunks, None)
            if chunk is None:
                self._exhausted = True
            else:
                chunks.append(chunk)
                size += len(chunk)
        self._buffer = b"".join(chunks)
        if self._after_long:
            self._strip()
            self._after_long = not self._buffer
        self._searched = len(self._buffer)
        self.size += size
        return size > 0

    # Finding the list of events

    def _find_events_key(self, start: int) -> int:
        """Return where the first event begins; the keys before it are read on the way."""
        key = EVENTS_KEY.search(self._buffer, start)
        # If all before the first match is valid, the match is one of the outermost keys.
        if key and self.outside.add_valid_head(self._buffer[start : key.start()]):
            return key.end()
        search = EventsKeySearch(start)
        opens = search.find(self._buffer)
        while opens is None and not search.lost and self._fill_outside():
            opens = search.find(self._buffer)
        if opens is None:
            opens = self._guess_events_key()
        self.outside.read_head(
            self._buffer[start : self._buffer.rindex(b'"traceEvents"', 0, opens)]
        )
        return opens

    def _guess_events_key(self) -> int:
        """Brackets or quotes before the events do not pair: take what looks like their key."""
        if keys := self.outside.decode_object(self._buffer.removeprefix(_BOM)):
            raise UnreadableInputError(
                f"{self._name} is JSON but not a PyTorch trace: it has no traceEvents (found: "
                f"{', '.join(list(keys)[:6])})"
            )
        if match := EVENTS_KEY.search(self._buffer):
            return match.end()
        raise UnreadableInputError(
            f"{self._name} is not a readable trace: no list of events before byte "
            f"{len(self._buffer)}, where the text ends or stops being JSON"
        )

    def _check_first_element(self) -> None:
        """Refuse a list of anything but events at once: it may be long."""
        while not (blank := _BLANK.match(self._buffer)) and self._fill_outside():
            pass
        if blank and self._buffer[blank.end()] not in b"{],":
            shown = _shown(self._buffer[blank.end() : blank.end() + _SHOWN_BYTES])
            raise UnreadableInputError(
                f"{self._name} is not a PyTorch trace: its list begins with {shown} at byte "
                f"{self._offset + blank.end()}, which is no event"
            )

    def _find_first_byte(self) -> int:
        """Return where the text begins, after a byte order mark and blanks."""
        more = True
        while more:
            more = self._fill_outside()
            if more and len(self._buffer) < _SHOWN_BYTES:
                continue
            begin = len(_BOM) if self._buffer.startswith(_BOM) else 0
            if blank := _BLANK.match(self._buffer, begin):
                return blank.end()
        raise UnreadableInputError(f"{self._name} is empty")

    def _fill_outside(self) -> bool:
        """Read on while the list of events is still to be found."""
        if len(self._buffer) > self._limits.outside_bytes:
            raise UnreadableInputError(
                f"{self._name} is not a readable trace: no list of events in the first "
                f"{figures.size(len(self._buffer))} of its text (byte {self.size}); "
                f"{self._limits.raise_event}"
            )
        return self._fill()


def _advice(begin: bytes) -> str:
    if begin.startswith((GZIP, ZSTD)):
        return ": it is compressed twice; decompress it once"
    return ": is it UTF-16? save it as UTF-8" if begin.startswith(_UTF_16) else ""


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace"))


# The keys of a trace outside its list of events: rank, devices, times, versions.
#
# They are read without decoding the events, and a trace whose keys are damaged keeps its events.

_LIST_END = lazy_pattern(rb"\}\s*+\](?=\s*(?:,|\}|\Z))")
_MAX_GUESSES = 256
_KNOWN_KEYS = ("schemaVersion", "distributedInfo", "deviceProperties", "baseTimeNanoseconds")


class OutsideKeys:
    """The keys before and after the events, and what of them could not be read."""

    def __init__(self, limits: Limits) -> None:
        self.keys: dict[str, Any] = {}
        self.lost: list[str] = []
        self.is_bare_list = False  # the file is a list of events without any key
        self._limits = limits

    def add_valid_head(self, head: bytes) -> bool:
        """Keep the keys before the events if they are valid as they stand."""
        keys = self.decode_object(head + b'"":0}')
        if keys is None:
            return False
        self._keep(keys)
        return True

    def read_head(self, head: bytes) -> None:
        """Keep the keys before the events, repaired if need be."""
        if not (self.add_valid_head(head) or self.add_valid_head(self._repaired(head))):
            self.lost.append("the keys before the events")

    def read_tail(self, tail: bytes) -> None:
        """Keep the keys after the events, repaired if need be."""
        keys = self._tail_keys(tail)
        if keys is None:
            keys = self._tail_keys(self._repaired(tail))
        if keys is None:
            self.lost.append("what follows the events")
        self._keep(keys or {})

    def find_list_end(self, text: bytes) -> int | None:
        """The bracket that closes the events: the earliest one that valid keys follow."""
        since = max(0, len(text) - SEARCH_BACK_BYTES)
        guesses = [match.end() - 1 for match in _LIST_END.finditer(text, since)]
        earliest = None
        for guess in reversed(guesses[-_MAX_GUESSES:]):
            if self._tail_keys(text[guess + 1 :]) is not None:
                earliest = guess
        return earliest

    def decode_object(self, text: bytes) -> dict[str, Any] | None:
        """The text as one object, or None if it is not one."""
        limit = self._limits.values
        try:
            if _max_values(text) <= limit:
                return msgspec.json.decode(text, type=dict[str, Any])
            # The keys that stepscope uses; no other is decoded.
            row = msgspec.json.decode(text, type=_known_keys_type())
            raws = {key: getattr(row, key) for key in _KNOWN_KEYS}
            known = {
                key: msgspec.json.decode(raw)
                for key, raw in raws.items()
                if raw and _max_values(bytes(raw)) <= limit
            }
        except DECODE_ERRORS:
            return None
        lost = f"all but the best known keys around the events (over {limit:,} values)"
        if lost not in self.lost:
            self.lost.append(lost)
        return known

    def _tail_keys(self, tail: bytes) -> dict[str, Any] | None:
        tail = tail.strip()
        if self.is_bare_list:
            return {} if not tail else None
        if tail == b"}":
            return {}
        return self.decode_object(b'{"":0' + tail) if tail.startswith(b",") else None

    def _keep(self, keys: dict[str, Any]) -> None:
        keys.pop("", None)
        if keys.pop("traceEvents", None):
            self.lost.append("another list of events (the key is there twice)")
        self.keys |= keys

    def _repaired(self, text: bytes) -> bytes:
        from stepscope.trace.formats.json_brackets import repair

        return repair(text) if len(text) <= self._limits.event_bytes else text


@cache
def _known_keys_type() -> Any:
    return msgspec.defstruct("KnownKeys", [(key, msgspec.Raw, NOTHING) for key in _KNOWN_KEYS])


def _max_values(text: bytes) -> int:
    """An upper bound of the values in JSON text."""
    return sum(map(text.count, (b",", b"[", b"{"))) + 1
