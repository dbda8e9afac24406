"""Damaged pieces: keep every event that can be kept, count the rest, remember where.

In order, each step only for what the one before could not read: the piece as it is, odd types
coerced; its events with the profiler's known slips mended; ever smaller runs of them, down to
single events; a single event ended where the list of events, or the piece, ends. Strings that are
longer than any name are cut, and arguments that are longer than most events are left out.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from stepscope.records.trace import ABSENT
from stepscope.trace.events import NO_ARGS, NOTHING, Args, Event, ExactEvent
from stepscope.trace.json_pieces import ANY_BOUNDARY, DECODE_ERRORS, boundaries, outline
from stepscope.trace.limits import MOST_ELEMENTS, NAME_CHARACTERS, Limits

if TYPE_CHECKING:
    from stepscope.trace.json_pieces import Piece

_BETWEEN = b" \r\n\t,"
_OBJECT = b"{"[0]
_STRING = b'"'[0]
_SHOWN_BYTES = 40
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_USUAL = Limits()


class Losses(msgspec.Struct):
    """What was wrong with a file's events, and where it began."""

    mended: int = 0
    coerced: int = 0
    unreadable: int = 0
    not_events: int = 0
    cut_at: int | None = None
    shortened: int = 0  # events with a text that is too long to keep
    first_shortened: tuple[int, str] | None = None  # its place, and how the text begins
    first_unreadable: int | None = None
    malformed: dict[str, int] = msgspec.field(default_factory=dict)

    def lose(self, offset: int) -> None:
        self.unreadable += 1
        if self.first_unreadable is None:
            self.first_unreadable = offset

    def shorten(self, offset: int, text: str) -> None:
        self.shortened += 1
        self.first_shortened = self.first_shortened or (offset, text)

    def count(self, reason: str, rows: int = 1) -> None:
        if rows:
            self.malformed[reason] = self.malformed.get(reason, 0) + rows

    def add(self, later: Losses) -> None:
        """Take in the losses of text behind this one's."""
        self.mended += later.mended
        self.coerced += later.coerced
        self.unreadable += later.unreadable
        self.shortened += later.shortened
        self.first_shortened = self.first_shortened or later.first_shortened
        self.not_events += later.not_events
        self.cut_at = later.cut_at if self.cut_at is None else self.cut_at
        if self.first_unreadable is None:
            self.first_unreadable = later.first_unreadable
        for reason, rows in later.malformed.items():
            self.count(reason, rows)


class Batch(msgspec.Struct):
    """The events of a piece, what they cost, and how far into the piece they reach."""

    events: list[Any]
    losses: Losses = msgspec.field(default_factory=Losses)
    closed_at: int | None = None  # the list of events ends at this byte of the piece
    resume: int | None = None  # from this byte on, read the piece again with what follows


@cache
def _decoder(kind: type[Event | ExactEvent]) -> msgspec.json.Decoder[list[Any]]:
    return msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]


def decode(piece: Piece, kind: type[Event | ExactEvent], limits: Limits = _USUAL) -> Batch:
    """All events that can be had from a piece."""
    text = piece.text if piece.end is None else piece.text[: piece.end]
    try:
        if not piece.single:
            events = _decoder(kind).decode(b"".join((b"[", text, b"]")))
            return Batch(events, closed_at=piece.end)
    except DECODE_ERRORS:
        pass
    return _Recovery(piece, kind, limits.large_bytes).run()


class _Recovery:
    """Decode ever smaller runs of events until what fails is a single one."""

    def __init__(self, piece: Piece, kind: type[Event | ExactEvent], large_bytes: int) -> None:
        self.piece, self.kind, self.large_bytes = piece, kind, large_bytes
        self.text = bytes(piece.text)
        self.batch = Batch([])
        self.losses = self.batch.losses
        self.rows: list[bytes] = []
        self.starts: list[int] = []
        self.may_walk_bytes = len(self.text)  # keeps hopeless walks from costing squares

    def run(self) -> Batch:
        events = self._decoded(self.text[: self.piece.end])
        if events is not None:
            self.batch.events, self.batch.closed_at = events, self.piece.end
            return self.batch
        from stepscope.trace.repair_json import escape_quotes, mend

        self._split()
        self.mended = [mend(escape_quotes(row)) for row in self.rows]
        changed = (old != new for old, new in zip(self.rows, self.mended, strict=True))
        self.changes = [0, *accumulate(changed)]
        pending = [(0, len(self.rows))] if self.rows else []
        while pending and self.batch.closed_at is None and self.batch.resume is None:
            low, high = pending.pop()
            events = self._decoded(b",".join(self.mended[low:high]), self.starts[low])
            if events is not None:
                self.losses.mended += self.changes[high] - self.changes[low]
                self.batch.events += events
            elif high - low == 1:
                self.batch.events += self._single(low)
            else:
                middle = (low + high) // 2
                pending += [(middle, high), (low, middle)]
        explained = self.batch.closed_at is not None or self.batch.resume is not None
        if not explained and self.rows and self.losses == Losses():
            self.losses.mended = 1  # commas too many or too few
        return self.batch

    def _split(self) -> None:
        """Rows of one event each, as far as that can be told from damaged text."""
        text, end = self.text, self.piece.end
        bounds = [] if self.piece.single else boundaries(text)
        if end is not None:
            bounds = sorted([*bounds, (end, end)])
        starts = [0, *(resume for _, resume in bounds)]
        segments = list(zip(starts, [*(until for until, _ in bounds), len(text)], strict=True))
        first = 0
        while first < len(segments):
            last, cuts = self._grow(segments, first)
            begin = segments[first][0]
            for until, resume in [*cuts, (segments[last][1], 0)]:
                row = text[begin:until].lstrip(_BETWEEN)
                if row:
                    self.starts.append(until - len(row))
                    self.rows.append(row.rstrip(_BETWEEN))
                begin = resume
            first = last + 1

    def _grow(
        self, segments: list[tuple[int, int]], first: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """The segment where what begins in `first` ends, and the cuts between events on the way.

        An event goes on in the next segment where it holds a list of objects, if that list ends.
        """
        text = self.text
        if _is_plain(text[slice(*segments[first])]):
            return first, []
        shape = outline(text[slice(*segments[first])])
        own = cuts = _moved(shape.cuts, segments[first][0])
        last, final = first, len(segments) - 1
        while shape.in_inner_list and last < final and self.may_walk_bytes > 0:
            last += 1
            start, end = segments[last]
            self.may_walk_bytes -= end - start
            shape = outline(text[start:end], shape.open_brackets)
            cuts = cuts + _moved(shape.cuts, start) if shape.cuts else cuts
        ended = shape.complete or shape.closed_at is not None or cuts is not own
        if last == first or ended:
            return last, cuts
        to_come = last == final and not self.piece.last
        if shape.unfinished and (to_come or not self._is_event(segments[first + 1])):
            return last, cuts
        return first, own  # a bracket is missing: the next segment is an event of its own

    def _is_event(self, segment: tuple[int, int]) -> bool:
        return b'"ph"' in self.text[slice(*segment)]

    def _single(self, row: int) -> list[Any]:
        """The end of the list may lie inside this row, or the end of the piece."""
        from stepscope.trace.repair_json import escape_quotes, mend

        text = escape_quotes(self.rows[row])
        shape = outline(text)
        if shape.closed_at is not None:
            events = self._decoded(mend(text[: shape.closed_at].rstrip(_BETWEEN)))
            if events is not None:  # the place is counted from the end, where nothing was escaped
                behind = len(text) - shape.closed_at
                self.batch.closed_at = self.starts[row] + len(self.rows[row]) - behind
                self.losses.mended += text != self.rows[row]
                return events
        goes_on = row == len(self.rows) - 1 and shape.unfinished
        if goes_on and self.piece.last:
            self.losses.cut_at = self.piece.offset + self.starts[row]
        elif goes_on and not self.piece.single:
            self.batch.resume = self.starts[row]
        else:
            self.losses.lose(self.piece.offset + self.starts[row])
        return []

    def _decoded(self, text: bytes, start: int = 0) -> list[Any] | None:
        """Events of text that is valid JSON, whatever its types; None where it is not."""
        try:
            if not self.piece.single:
                return _decoder(self.kind).decode(b"[" + text + b"]")
        except msgspec.ValidationError:
            pass
        except DECODE_ERRORS:
            return None
        odd = Losses()
        try:
            events = [_coerce(self.kind, raw, odd, self.large_bytes) for raw in _elements(text)]
        except DECODE_ERRORS:
            return None
        if odd.first_shortened:
            place, begin = odd.first_shortened
            odd.first_shortened = self.piece.offset + start + place, begin
        self.losses.add(odd)
        return [event for event in events if event is not None]


def _elements(text: bytes) -> list[msgspec.Raw]:
    """Of a list; where they could be too many to hold, the text must be one event alone."""
    if text.count(b",") > MOST_ELEMENTS:
        return [msgspec.json.decode(text, type=msgspec.Raw)]
    return _RAWS.decode(b"[" + text + b"]")


def _is_plain(segment: bytes) -> bool:
    """Certainly one event at most: what most segments are, found out without a walk."""
    pairs = segment.count(b"{") == segment.count(b"}") and segment.count(b"[") == segment.count(
        b"]"
    )
    return pairs and not ANY_BOUNDARY.search(segment)


def _moved(cuts: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(end + by, resume + by) for end, resume in cuts]


def _coerce(kind: type[Any], raw: msgspec.Raw, losses: Losses, large_bytes: int) -> Any:
    """One element whose types may not be the expected ones: take what can be taken."""
    if memoryview(raw)[0] != _OBJECT:
        losses.not_events += 1
        return None
    large = len(memoryview(raw)) > large_bytes
    try:
        if not large:  # else its arguments could be a million objects
            return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        pass
    reading = _Reading(large_bytes)
    event = reading.event(kind, raw)
    if reading.shortened is not None:
        losses.shorten(0, reading.shortened)
    elif not large:
        losses.coerced += 1
    return event


class _Reading:
    """One event, field by field; what nobody asks for is never made an object."""

    def __init__(self, large_bytes: int) -> None:
        self.large_bytes = large_bytes
        self.shortened: str | None = None  # the begin of the first text that was too long

    def event(self, kind: type[Any], raw: msgspec.Raw) -> Any:
        row = msgspec.json.decode(raw, type=_raw_fields(Event))
        return kind(
            ph=self._text(row.ph),
            cat=self._text(row.cat),
            name=self._text(row.name),
            pid=self._lane(row.pid),
            tid=self._lane(row.tid),
            ts=row.ts if kind is ExactEvent else _number(self._value(row.ts)),
            dur=_number(self._value(row.dur)),
            id=self._lane(row.id),
            args=self._args(row.args) if row.args else NO_ARGS,
        )

    def _args(self, raw: msgspec.Raw) -> Args:
        try:
            if len(memoryview(raw)) <= self.large_bytes:
                return msgspec.json.decode(raw, type=Args)
        except msgspec.ValidationError:
            pass
        try:
            row = msgspec.json.decode(raw, type=_raw_fields(Args))
        except msgspec.ValidationError:
            return NO_ARGS
        given = ((info, getattr(row, info.name)) for info in msgspec.structs.fields(Args))
        return Args(
            **{
                info.name: self._kept(value) if info.type is msgspec.Raw else self._value(value)
                for info, value in given
                if value
            }
        )

    def _kept(self, raw: msgspec.Raw) -> msgspec.Raw:
        """As it is, unless it is too long to keep."""
        view = memoryview(raw)
        if len(view) <= self.large_bytes:
            return raw
        self._shorten(bytes(view[:_SHOWN_BYTES]).decode("utf-8", "replace"))
        return NOTHING

    def _value(self, raw: msgspec.Raw) -> Any:
        """What the text says, or None where that is no value (a number that nothing can hold)."""
        if not raw:
            return None
        try:
            kept = self._kept(raw)
            return msgspec.json.decode(kept) if kept else None
        except msgspec.ValidationError:
            return None

    def _text(self, raw: msgspec.Raw) -> str:
        value = self._short(raw)
        return value if isinstance(value, str) else "" if value is None else str(value)

    def _lane(self, raw: msgspec.Raw) -> int | str:
        value = self._short(raw)
        if isinstance(value, bool) or not isinstance(value, int | str):
            if isinstance(value, float) and value.is_integer():
                return int(value)
            return ABSENT if value is None else str(value)
        return value

    def _short(self, raw: msgspec.Raw) -> Any:
        """A value; a string no longer than a name may be."""
        if not raw:
            return None
        is_text = memoryview(raw)[0] == _STRING
        value = msgspec.json.decode(raw) if is_text else self._value(raw)
        if not isinstance(value, str) or len(value) <= NAME_CHARACTERS:
            return value
        self._shorten(value[:_SHOWN_BYTES])
        mark = f"… ({len(value):,} characters, {crc32(value.encode()):08x})"
        return value[: NAME_CHARACTERS - len(mark)] + mark

    def _shorten(self, begin: str) -> None:
        self.shortened = begin if self.shortened is None else self.shortened


@cache
def _raw_fields(kind: type[Any]) -> Any:
    """The same record with every field as text."""
    fields = [
        (info.name, msgspec.Raw, msgspec.field(default=NOTHING, name=info.encode_name))
        for info in msgspec.structs.fields(kind)
    ]
    return msgspec.defstruct(f"{kind.__name__}Fields", fields, gc=False)


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        try:
            value = float(value) if not value.strip().lstrip("-").isdigit() else int(value)
        except ValueError:
            return None
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value if isinstance(value, int | float) else None
