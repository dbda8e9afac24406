"""JSON text cut into pieces that hold whole events, so that memory never follows the file's size.

A trace is `{"key": .., "traceEvents": [event, event, ...], "key": ..}` with the keys in any order,
or a bare list of events. The text is never parsed as a whole: it is cut where one event seems to
end and the next to begin. A cut in the wrong place leaves text that does not decode, so a wrong
guess is always noticed; the reader then gives the end of the piece back, to be cut elsewhere.
An event of which a large piece holds no end is followed by its brackets instead; one that is longer
than `Limits` allow is passed over.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.trace.events import NOTHING
from stepscope.trace.limits import Limits, megabytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# All that a decoder may raise on damaged, oddly typed or too deeply nested text.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'

_EVENT_KEYS = rb"(?:ph|cat|name|pid|tid|ts|dur|id|args|bp|s|tts|cname)"
_BOUNDARY = lazy_pattern(rb'\}[\s,]*+(?=\{\s*+"' + _EVENT_KEYS + rb'"\s*:)')
_KINETO_BOUNDARY = b"\n  },\n  {"
ANY_BOUNDARY = lazy_pattern(rb"\}\s*+,\s*+(?=\{)")
_EVENTS_KEY = lazy_pattern(rb'"traceEvents"\s*:\s*\[')
_ARRAY_END = re.compile(rb"\}\s*+\](?=\s*(?:,|\}|\Z))")
_PLAIN = rb'[^"{}\[\]]++'
_KEY = b'"traceEvents"'
_TOKEN = lazy_pattern(
    rb"(?:" + _PLAIN + rb"|(?!" + _KEY + rb")" + STRING + rb")*+([{\[]++|[}\]]++|" + _KEY + rb'|")',
    re.DOTALL,
)
_RUN = rb'(\{++|\[++|\}++|\]++|")'
_STRUCTURE = lazy_pattern(rb"(?:" + _PLAIN + rb"|" + STRING + rb")*+" + _RUN, re.DOTALL)
_INNER = lazy_pattern(
    rb"(?:" + _PLAIN + rb"|" + STRING + rb"|\[(?:" + _PLAIN + rb"|" + STRING + rb")*+\]"
    rb"|\{(?:" + _PLAIN + rb"|" + STRING + rb")*+\})*+" + _RUN,
    re.DOTALL,
)  # where a bracket is open: the innermost lists and objects are passed over as well
_REST_OF_STRING = lazy_pattern(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_AFTER_ARRAY = re.compile(rb'\s*+(?:,\s*+"|\}|\Z)')
_QUOTE, _ARRAY_CLOSES, _OPENING = b'"'[0], b"]"[0], b"{["
_OPENER_OF = {b"}"[0]: b"{", b"]"[0]: b"["}
_BLANK = re.compile(rb"\s*+(?=\S)")
_BOM = b"\xef\xbb\xbf"
_SEARCH_BACK = 1 << 20
_SHOWN_BYTES = 12
_MAX_TAIL_GUESSES = 256
_MOST_DEPTH = 1 << 20  # of brackets that are followed
_BETWEEN = b" \r\n\t,"
_BOUNDARY_BYTES = 64 << 10  # at the most, blanks included
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
_KNOWN_KEYS = ("schemaVersion", "distributedInfo", "deviceProperties", "baseTimeNanoseconds")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"[\0", b"\0[")


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Comma-separated event objects and where they begin in the (decompressed) text.

    The last piece is all the rest of the text; `end` is where the list of events seems to close. A
    `single` event is long and ends where its brackets do.
    """

    text: bytes | memoryview
    offset: int
    last: bool = False
    end: int | None = None
    single: bool = False


class EventText:
    """Hands out pieces of events; afterwards `outside` holds the keys around them."""

    def __init__(self, source: Iterable[bytes], name: str, limits: Limits | None = None) -> None:
        self.outside: dict[str, Any] = {}
        self.outside_lost: list[str] = []
        self.finished = False  # whether the list of events was closed
        self.stopped: str | None = None  # why the rest of the text was not read
        self.size = 0  # bytes of text read so far
        self.too_long = 0  # events that were passed over
        self.first_too_long: tuple[int, str] | None = None  # its place, and how it begins
        self._limits = limits or Limits()
        self._chunks: Iterator[bytes] = iter(source)
        self._name = name
        self._buffer = b""
        self._offset = 0  # of the buffer's first byte
        self._separator = b""  # between the last piece and the buffer
        self._searched = 0  # bytes of the buffer that hold no boundary
        self._used = 0  # bytes of text up to the last event that was read
        self._exhausted = False
        self._done = False
        self._bare = False
        self._after_long = False  # whether separators come before the next event
        self._long = False  # whether the buffer's first event is known to be long
        self._find_events()

    def next_piece(self) -> Piece | None:
        """The next piece, or None at the end."""
        while not self._done:
            self._fill()
            if self._exhausted and len(self._buffer) <= self._limits.large_bytes:
                return self._last_piece()
            piece = (None if self._long else self._cut()) or self._long_event()
            if piece is not None:
                return piece
        return None

    def used(self) -> None:
        """An event was read: what comes next may again be far away."""
        self._used = self.size

    def stop(self, why: str) -> None:
        """Read no further."""
        self._done, self.stopped = True, why

    def give_back(self, piece: Piece, resume: int) -> None:
        """Only what lies before `piece.text[resume]` was taken: read on from there."""
        self._searched = len(piece.text) - resume
        self._long = resume == 0 and (
            self._exhausted or 2 * len(piece.text) >= self._limits.large_bytes
        )
        self._buffer = b"".join((piece.text[resume:], self._separator, self._buffer))
        self._offset = piece.offset + resume

    def close(self, piece: Piece, end: int) -> None:
        """The list of events ends at `piece.text[end]` (its bracket): the rest are other keys."""
        tail = [piece.text[end + 1 :], self._separator, self._buffer]
        size = sum(map(len, tail))
        self._done = self.finished = True
        for chunk in self._chunks:
            tail.append(chunk)
            size += len(chunk)
            if size > self._limits.outside_bytes:
                self.outside_lost.append(f"what follows the events (over {megabytes(size)})")
                return
        self._read_tail(b"".join(tail))

    def _cut(self) -> Piece | None:
        """A piece that ends where a later event seems to begin, or the list to close."""
        large = len(self._buffer) > self._limits.large_bytes
        window = self._buffer[: self._limits.large_bytes] if large else self._buffer
        if cut := _last_boundary(window, everywhere=large):
            return self._take(*cut)
        if not large and (end := outline(self._buffer).closed_at) is not None:
            return self._take(len(self._buffer), len(self._buffer), end)
        return None

    def _long_event(self) -> Piece | None:
        """The buffer's first event where its brackets end, once so much was read in vain.

        None where there is to be read more, or where it was passed over.
        """
        if not self._long and len(self._buffer) <= self._limits.large_bytes:
            return None
        self._long = False
        self._strip()
        walk = Walk()
        while not walk.settled(self._buffer) and len(self._buffer) <= self._limits.event_bytes:
            if not self._fill():
                return self._last_piece(single=True)
        if walk.closed_at is not None:
            return self._take(len(self._buffer), len(self._buffer), walk.closed_at)
        if walk.end is None or walk.end > self._limits.event_bytes:
            self._pass_over(walk)
            return None
        self._after_long = True
        return self._take(walk.end, walk.end, single=True)

    def _pass_over(self, walk: Walk) -> None:
        """Drop the buffer's first event, as far as its brackets or the next event's keys say."""
        self.too_long += 1
        self.first_too_long = self.first_too_long or (self._offset, _shown(self._buffer[:60]))
        follow_until = self._offset + 2 * self._limits.event_bytes
        at = 1
        while True:
            walk.lost = walk.lost or self._offset > follow_until
            if not walk.lost and walk.settled(self._buffer) and not walk.lost:
                return self._read_on(walk.resume)
            if walk.lost and (boundary := _BOUNDARY.search(self._buffer, at)):
                return self._read_on(boundary.end())
            if self._exhausted:
                return self._read_on(len(self._buffer))
            dropped = max(0, len(self._buffer) - _BOUNDARY_BYTES) if walk.lost else walk.position
            self._drop(dropped)
            walk.position -= dropped
            at = 0
            self._fill()

    def _read_on(self, until: int) -> None:
        """An event, or nothing but a separator, comes next."""
        self._drop(until)
        self._after_long = True

    def _drop(self, until: int) -> None:
        self._offset += until
        self._buffer = self._buffer[until:]
        self._searched = 0

    def _strip(self) -> None:
        """Separators may be many and say nothing."""
        self._drop(len(self._buffer) - len(self._buffer.lstrip(_BETWEEN)))

    def _last_piece(self, *, single: bool = False) -> Piece:
        self._done = True
        text, self._buffer, self._separator = self._buffer, b"", b""
        end = None if self.stopped else self._array_end(text)
        return Piece(text=text, offset=self._offset, last=True, end=end, single=single)

    def _find_events(self) -> None:
        skipped = self._first_byte()
        first = self._buffer[skipped : skipped + 1]
        if first == b"[":
            self._bare = True
            self._begin(skipped + 1)
            return self._check_first_element()
        if first != b"{" or self._buffer.startswith(_UTF_16, skipped):
            begin = self._buffer[skipped : skipped + _SHOWN_BYTES]
            raise UnreadableInputError(
                f"{self._name} is not JSON: it begins with {_shown(begin)} at byte {skipped}"
                + _advice(begin)
            )
        opens = self._plain_events_key(skipped)
        if opens is None:
            opens = self._searched_events_key(skipped)
            self._read_head(skipped, opens)
        return self._begin(opens)

    def _plain_events_key(self, begin: int) -> int | None:
        """Where all before the first such key is valid, it is one of the outermost keys."""
        key = _EVENTS_KEY.search(self._buffer, begin)
        keys = self._keys(self._buffer[begin : key.start()] + b'"":0}') if key else None
        if key is None or keys is None:
            return None
        self._keep(keys)
        return key.end()

    def _searched_events_key(self, begin: int) -> int:
        key = _KeySearch(begin)
        opens = key.look(self._buffer)
        while opens is None and not key.lost and self._fill_outside():
            opens = key.look(self._buffer)
        return self._likely_events_key() if opens is None else opens

    def _check_first_element(self) -> None:
        """Lists of numbers can be long: do not read them all to find that there is no event."""
        while not (begins := _BLANK.match(self._buffer)) and self._fill_outside():
            pass
        if begins and self._buffer[begins.end()] not in b"{],":
            shown = _shown(self._buffer[begins.end() : begins.end() + _SHOWN_BYTES])
            raise UnreadableInputError(
                f"{self._name} is not a PyTorch trace: its list begins with {shown} at byte "
                f"{self._offset + begins.end()}, which is no event"
            )

    def _first_byte(self) -> int:
        """Where the text begins, behind a byte order mark and blanks."""
        more = True
        while more:
            more = self._fill_outside()
            if more and len(self._buffer) < _SHOWN_BYTES:
                continue
            begin = len(_BOM) if self._buffer.startswith(_BOM) else 0
            if blank := _BLANK.match(self._buffer, begin):
                return blank.end()
        raise UnreadableInputError(f"{self._name} is empty")

    def _read_head(self, begin: int, opens: int) -> None:
        head = self._buffer[begin : self._buffer.rindex(b'"traceEvents"', 0, opens)]
        keys = self._keys(head + b'"":0}') or self._keys(self._mended(head) + b'"":0}')
        if keys is None:
            self.outside_lost.append("the keys before the events")
        self._keep(keys or {})

    def _likely_events_key(self) -> int:
        """Brackets or quotes before the events do not add up: take what looks like their key."""
        if found := self._keys(self._buffer.removeprefix(_BOM)):
            raise UnreadableInputError(
                f"{self._name} is JSON but not a PyTorch trace: it has no traceEvents (found: "
                f"{', '.join(list(found)[:6])})"
            )
        if match := _EVENTS_KEY.search(self._buffer):
            return match.end()
        raise UnreadableInputError(
            f"{self._name} is not a readable trace: no list of events before byte "
            f"{len(self._buffer)}, where the text ends or stops being JSON"
        )

    def _begin(self, position: int) -> None:
        self._searched = 0
        self._buffer = self._buffer[position:]
        self._offset = position

    def _fill_outside(self) -> bool:
        """The same before the list of events was found."""
        if len(self._buffer) > self._limits.outside_bytes:
            raise UnreadableInputError(
                f"{self._name} is not a readable trace: no list of events in the first "
                f"{megabytes(len(self._buffer))} of its text (byte {self.size}); "
                f"{self._limits.raise_event}"
            )
        return self._fill()

    def _fill(self) -> bool:
        """Read on: a piece, or as much again as was searched in vain, which keeps that linear."""
        if self.size - self._used > self._limits.gap_bytes:
            self._exhausted = True
            self.stopped = (
                f"no event follows in the next {megabytes(self.size - self._used)} of text; "
                f"{self._limits.raise_event}"
            )
        chunks, size = [self._buffer], 0
        most = min(self._searched, self._limits.event_bytes)
        while not self._exhausted and size <= most:
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

    def _take(
        self, until: int, resume: int, end: int | None = None, *, single: bool = False
    ) -> Piece:
        text = memoryview(self._buffer)[:until]
        piece = Piece(text=text, offset=self._offset, end=end, single=single)
        self._searched = 0
        self._separator = self._buffer[until:resume]
        self._buffer = self._buffer[resume:]
        self._offset += resume
        return piece

    def _array_end(self, text: bytes) -> int | None:
        """The bracket that closes the events: the earliest one behind which all is valid keys."""
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
        return self._keys(b'{"":0' + tail) if tail.startswith(b",") else None

    def _read_tail(self, tail: bytes) -> None:
        keys = self._tail_keys(tail)
        if keys is None:
            keys = self._tail_keys(self._mended(tail))
        if keys is None:
            self.outside_lost.append("what follows the events")
        self._keep(keys or {})

    def _keep(self, keys: dict[str, Any]) -> None:
        keys.pop("", None)
        if keys.pop("traceEvents", None):
            self.outside_lost.append("another list of events (the key is there twice)")
        self.outside |= keys

    def _keys(self, text: bytes) -> dict[str, Any] | None:
        """The text as one object, or None where it is none."""
        most = self._limits.values
        try:
            if _most_values(text) <= most:
                return msgspec.json.decode(text, type=dict[str, Any])
            known = _known_keys(text, most)
        except DECODE_ERRORS:
            return None
        lost = f"all but the best known keys around the events (over {most:,} values)"
        if lost not in self.outside_lost:
            self.outside_lost.append(lost)
        return known

    def _mended(self, text: bytes) -> bytes:
        from stepscope.trace.repair_json import mend

        return mend(text) if len(text) <= self._limits.event_bytes else text


class _KeySearch:
    """Looks for the list of events among the outermost keys only, over a growing buffer."""

    def __init__(self, position: int) -> None:
        self._position, self._depth = position, 0
        self.lost = False  # nested deeper than anything is

    def look(self, text: bytes) -> int | None:
        """Where the first event begins, or None: look again when there is more text."""
        while token := _TOKEN.match(text, self._position):
            run, self._position = token[1], token.start(1)
            if run == b'"':
                return None  # a string that goes on in text to come
            if run != _KEY:
                self._depth += len(run) if run[0] in _OPENING else -len(run)
                self.lost = self._depth > _MOST_DEPTH
                if self.lost:
                    return None
            elif self._depth == 1:
                if opens := _EVENTS_KEY.match(text, self._position):
                    return opens.end()
                if not text[token.end() :].strip(b" \r\n\t:"):
                    return None
            self._position = token.end()
        return None


class Walk:
    """Follows the brackets and quotes of one event over a growing buffer; keeps no text."""

    def __init__(self) -> None:
        self.position = 0  # up to which the buffer was followed
        self.end: int | None = None  # just after the event
        self.closed_at: int | None = None  # the bracket that ends the list, where no event is
        self.lost = False  # the brackets do not pair
        self._stack = bytearray()
        self._in_string = False

    @property
    def resume(self) -> int:
        """Where to read on: after the event, or at the bracket that closes the list."""
        return (self.closed_at if self.end is None else self.end) or 0

    def settled(self, text: bytes) -> bool:
        """Whether it is known where the event ends, or that nobody can tell."""
        while not self.lost and self.end is None and self.closed_at is None:
            if self._in_string and not self._leave_string(text):
                return False
            found = (_INNER if self._stack else _STRUCTURE).match(text, self.position)
            if found is None:
                self.position = len(text)
                return False
            self.position = found.end()
            self._step(found[1])
        return True

    def _leave_string(self, text: bytes) -> bool:
        rest = _REST_OF_STRING.match(text, self.position)
        self.position = rest.end() if rest else self.position
        if text[self.position : self.position + 1] != b'"':
            return False  # where a backslash is last, it is looked at again with what follows
        self.position += 1
        self._in_string = False
        return True

    def _step(self, run: bytes) -> None:
        if run[0] == _QUOTE:
            self._in_string = True
        elif run[0] in _OPENING:
            self._stack += run
            self.lost = len(self._stack) > _MOST_DEPTH
        elif not self._stack and run[0] == _ARRAY_CLOSES:
            self.closed_at = self.position - len(run)
        else:
            self._close(run)

    def _close(self, run: bytes) -> None:
        known = min(len(run), len(self._stack))
        opened = self._stack[len(self._stack) - known :]
        del self._stack[len(self._stack) - known :]
        if not known or opened != _OPENER_OF[run[0]] * known:
            self.lost = True
        elif not self._stack:
            self.end = self.position - len(run) + known


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """What brackets and quotes alone say about comma-separated events."""

    cuts: list[tuple[int, int]]  # between events: where one ends, where the next begins
    closed_at: int | None = None  # the bracket that ends the list of events
    open_brackets: bytes = b""
    in_string: bool = False
    mismatched: bool = False

    @property
    def complete(self) -> bool:
        """Neither goes on behind the text nor ends before it."""
        return self.closed_at is None and not self.unfinished and not self.mismatched

    @property
    def unfinished(self) -> bool:
        """Text to come may complete it."""
        return not self.mismatched and (self.in_string or bool(self.open_brackets))

    @property
    def in_inner_list(self) -> bool:
        """Ends between elements of a list that an event holds."""
        return self.unfinished and not self.in_string and self.open_brackets[1:].endswith(b"[")


def outline(text: bytes, open_brackets: bytes = b"") -> Outline:
    """Walk over brackets and strings; `open_brackets` are those open where the text begins."""
    cuts: list[tuple[int, int]] = []
    stack = bytearray(open_brackets)
    position = 0
    while found := (_INNER if stack else _STRUCTURE).match(text, position):
        position = found.end()
        run = found[1]
        if run[0] in _OPENING:
            stack += run
        elif run[0] == _QUOTE:
            return Outline(cuts=cuts, open_brackets=bytes(stack), in_string=True)
        else:
            known = min(len(run), len(stack))
            if stack[len(stack) - known :] != _OPENER_OF[run[0]] * known:
                return Outline(cuts=cuts, mismatched=True)
            if known < len(run):
                end = position - len(run) + known
                closes = run[0] == _ARRAY_CLOSES and _AFTER_ARRAY.match(text, end + 1)
                return Outline(cuts=cuts, closed_at=end if closes else None, mismatched=not closes)
            del stack[len(stack) - known :]
            if not stack and (cut := ANY_BOUNDARY.match(text, position - 1)):
                cuts.append((position, cut.end()))
    return Outline(cuts=cuts, open_brackets=bytes(stack))


def boundaries(text: bytes) -> list[tuple[int, int]]:
    """Where one event ends and the next begins.

    By the keys that events begin with, which survives damage; else by counting brackets.
    """
    found = [(match.start() + 1, match.end()) for match in _BOUNDARY.finditer(text)]
    return found or outline(text).cuts


def _last_boundary(text: bytes, *, everywhere: bool = False) -> tuple[int, int] | None:
    position = text.rfind(_KINETO_BOUNDARY)
    if position >= 0:
        return position + 4, position + len(_KINETO_BOUNDARY) - 1
    for pattern in (_BOUNDARY, ANY_BOUNDARY):
        for reach in (8 << 10, _SEARCH_BACK, *([len(text)] if everywhere else [])):
            matches = list(pattern.finditer(text, max(0, len(text) - reach)))
            if matches:
                return matches[-1].start() + 1, matches[-1].end()
    return None


def _known_keys(text: bytes, most_values: int) -> dict[str, Any]:
    """Those that matter, without making an object of any other."""
    found = msgspec.json.decode(text, type=_known())
    raws = {key: getattr(found, key) for key in _KNOWN_KEYS}
    return {
        key: msgspec.json.decode(raw)
        for key, raw in raws.items()
        if raw and _most_values(bytes(raw)) <= most_values
    }


@cache
def _known() -> Any:
    return msgspec.defstruct("Known", [(key, msgspec.Raw, NOTHING) for key in _KNOWN_KEYS])


def _most_values(text: bytes) -> int:
    """No JSON text holds more."""
    return sum(map(text.count, (b",", b"[", b"{"))) + 1


def _advice(begin: bytes) -> str:
    if begin.startswith(_COMPRESSED):
        return ": it is compressed twice; decompress it once"
    return ": is it UTF-16? save it as UTF-8" if begin.startswith(_UTF_16) else ""


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace"))
