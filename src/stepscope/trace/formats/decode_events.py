"""Pieces of text -> events. Of damaged pieces, keep every event that can be read, count the rest.

Each step is only for what the one before could not read: the piece as it is; with odd types
coerced; with the profiler's known slips repaired; ever smaller runs of events, down to single ones;
a single event that ends where the list or the piece ends. Strings longer than any name are cut;
arguments longer than most events are left out.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT
from stepscope.text.words import counted
from stepscope.trace.decode import DECODE_ERRORS
from stepscope.trace.files import MAX_HELD_ELEMENTS, NAME_CHARACTERS, Limits
from stepscope.trace.formats.events import NO_ARGS, NOTHING, Args, Event, ExactEvent
from stepscope.trace.formats.json_brackets import (
    ANY_BOUNDARY,
    SEPARATORS,
    event_boundaries,
    scan_brackets,
)

if TYPE_CHECKING:
    from stepscope.trace.formats.json_pieces import EventPiece

_OBJECT = b"{"[0]
_STRING = b'"'[0]
_SHOWN_BYTES = 40
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_USUAL = Limits()


class Losses(msgspec.Struct):
    """What was wrong with a file's events, and the first place of each problem."""

    repaired: int = 0
    coerced: int = 0
    unreadable: int = 0
    not_events: int = 0
    cut_at: int | None = None
    shortened: int = 0  # events with a text that is too long to keep
    first_shortened: tuple[int, str] | None = None  # its byte, and how the text begins
    first_unreadable: int | None = None
    malformed: dict[str, int] = msgspec.field(default_factory=dict)

    def add_unreadable(self, offset: int) -> None:
        self.unreadable += 1
        if self.first_unreadable is None:
            self.first_unreadable = offset

    def add_shortened(self, offset: int, text: str) -> None:
        self.shortened += 1
        self.first_shortened = self.first_shortened or (offset, text)

    def add_malformed(self, reason: str, rows: int = 1) -> None:
        if rows:
            self.malformed[reason] = self.malformed.get(reason, 0) + rows

    @property
    def reasons(self) -> str:
        return ", ".join(f"{rows} {reason}" for reason, rows in self.malformed.items())

    def malformed_notes(self) -> list[Note]:
        return [
            Note(id="malformed", detail=f"left out: {counted(rows, 'event')} {reason}", count=rows)
            for reason, rows in self.malformed.items()
        ]

    def merge(self, later: Losses) -> None:
        """Add the losses of later text."""
        self.repaired += later.repaired
        self.coerced += later.coerced
        self.unreadable += later.unreadable
        self.shortened += later.shortened
        self.first_shortened = self.first_shortened or later.first_shortened
        self.not_events += later.not_events
        self.cut_at = later.cut_at if self.cut_at is None else self.cut_at
        if self.first_unreadable is None:
            self.first_unreadable = later.first_unreadable
        for reason, rows in later.malformed.items():
            self.add_malformed(reason, rows)


class DecodedPiece(msgspec.Struct):
    """The events of a piece, what was lost, and how far into the piece they reach."""

    events: list[Any]
    losses: Losses = msgspec.field(default_factory=Losses)
    closed_at: int | None = None  # the list of events ends at this byte of the piece
    resume: int | None = None  # from this byte on, read the piece again with what follows


@cache
def _decoder(kind: type[Event | ExactEvent]) -> msgspec.json.Decoder[list[Any]]:
    return msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]


def decode_events(
    piece: EventPiece, kind: type[Event | ExactEvent], limits: Limits = _USUAL
) -> DecodedPiece:
    """All events of a piece that can be read."""
    text = piece.text if piece.end is None else piece.text[: piece.end]
    try:
        if not piece.single:
            events = _decoder(kind).decode(b"".join((b"[", text, b"]")))
            return DecodedPiece(events, closed_at=piece.end)
    except DECODE_ERRORS:
        pass
    return _Recovery(piece, kind, limits.large_bytes).run()


class _Recovery:
    """Decode ever smaller runs of events until what fails is a single one."""

    def __init__(self, piece: EventPiece, kind: type[Event | ExactEvent], large_bytes: int) -> None:
        self.piece, self.kind, self.large_bytes = piece, kind, large_bytes
        self.text = bytes(piece.text)
        self.result = DecodedPiece([])
        self.losses = self.result.losses
        self.rows: list[bytes] = []
        self.starts: list[int] = []
        self.scan_budget_bytes = len(self.text)  # hopeless scans must not take quadratic time

    def run(self) -> DecodedPiece:
        events = self._decoded(self.text[: self.piece.end])
        if events is not None:
            self.result.events, self.result.closed_at = events, self.piece.end
            return self.result
        from stepscope.trace.formats.json_brackets import escape_quotes, repair

        self._split()
        repaired = [repair(escape_quotes(row)) for row in self.rows]
        changed = (old != new for old, new in zip(self.rows, repaired, strict=True))
        repaired_before = [0, *accumulate(changed)]
        pending = [(0, len(self.rows))] if self.rows else []
        while pending and self.result.closed_at is None and self.result.resume is None:
            low, high = pending.pop()
            events = self._decoded(b",".join(repaired[low:high]), self.starts[low])
            if events is not None:
                self.losses.repaired += repaired_before[high] - repaired_before[low]
                self.result.events += events
            elif high - low == 1:
                self.result.events += self._single(low)
            else:
                middle = (low + high) // 2
                pending += [(middle, high), (low, middle)]
        explained = self.result.closed_at is not None or self.result.resume is not None
        if not explained and self.rows and self.losses == Losses():
            self.losses.repaired = 1  # too many or too few commas
        return self.result

    def _split(self) -> None:
        """Rows of one event each, as far as damaged text shows them."""
        text, end = self.text, self.piece.end
        bounds = [] if self.piece.single else event_boundaries(text)
        if end is not None:
            bounds = sorted([*bounds, (end, end)])
        starts = [0, *(resume for _, resume in bounds)]
        segments = list(zip(starts, [*(until for until, _ in bounds), len(text)], strict=True))
        first = 0
        while first < len(segments):
            last, cuts = self._grow(segments, first)
            begin = segments[first][0]
            for until, resume in [*cuts, (segments[last][1], 0)]:
                row = text[begin:until].lstrip(SEPARATORS)
                if row:
                    self.starts.append(until - len(row))
                    self.rows.append(row.rstrip(SEPARATORS))
                begin = resume
            first = last + 1

    def _grow(
        self, segments: list[tuple[int, int]], first: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """The segment in which the event of segment `first` ends, and the cuts found on the way.

        A list of objects inside an event spreads it over several segments, if that list ends.
        """
        text = self.text
        # Certainly no more than one event: true of most segments, and found without a scan.
        segment = text[slice(*segments[first])]
        opened, closed = map(segment.count, (b"{", b"[")), map(segment.count, (b"}", b"]"))
        if [*opened] == [*closed] and not ANY_BOUNDARY.search(segment):
            return first, []
        scan = scan_brackets(text[slice(*segments[first])])
        own = cuts = _shifted(scan.cuts, segments[first][0])
        last, final = first, len(segments) - 1
        while scan.in_inner_list and last < final and self.scan_budget_bytes > 0:
            last += 1
            start, end = segments[last]
            self.scan_budget_bytes -= end - start
            scan = scan_brackets(text[start:end], scan.open_brackets)
            cuts = cuts + _shifted(scan.cuts, start) if scan.cuts else cuts
        ended = scan.complete or scan.closed_at is not None or cuts is not own
        if last == first or ended:
            return last, cuts
        to_come = last == final and not self.piece.last
        if scan.unfinished and (to_come or b'"ph"' not in text[slice(*segments[first + 1])]):
            return last, cuts
        return first, own  # a bracket is missing: the next segment is an event of its own

    def _single(self, row: int) -> list[Any]:
        """The event of a row that did not decode: the list or the piece may end inside it."""
        from stepscope.trace.formats.json_brackets import escape_quotes, repair

        text = escape_quotes(self.rows[row])
        scan = scan_brackets(text)
        if scan.closed_at is not None:
            events = self._decoded(repair(text[: scan.closed_at].rstrip(SEPARATORS)))
            if events is not None:  # counted from the end, where nothing was escaped
                rest = len(text) - scan.closed_at
                self.result.closed_at = self.starts[row] + len(self.rows[row]) - rest
                self.losses.repaired += text != self.rows[row]
                return events
        goes_on = row == len(self.rows) - 1 and scan.unfinished
        if goes_on and self.piece.last:
            self.losses.cut_at = self.piece.offset + self.starts[row]
        elif goes_on and not self.piece.single:
            self.result.resume = self.starts[row]
        else:
            self.losses.add_unreadable(self.piece.offset + self.starts[row])
        return []

    def _decoded(self, text: bytes, start: int = 0) -> list[Any] | None:
        """The events of valid JSON, whatever its types; None for anything else."""
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
        self.losses.merge(odd)
        return [event for event in events if event is not None]


def _elements(text: bytes) -> list[msgspec.Raw]:
    """The elements of a list. Text that may hold too many must be a single event."""
    if text.count(b",") > MAX_HELD_ELEMENTS:
        return [msgspec.json.decode(text, type=msgspec.Raw)]
    return _RAWS.decode(b"[" + text + b"]")


def _shifted(cuts: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(end + by, resume + by) for end, resume in cuts]


def _coerce(kind: type[Any], raw: msgspec.Raw, losses: Losses, large_bytes: int) -> Any:
    """One element with unexpected types: keep the fields that make sense."""
    if memoryview(raw)[0] != _OBJECT:
        losses.not_events += 1
        return None
    large = len(memoryview(raw)) > large_bytes
    try:
        if not large:  # the arguments of a large one could be a million objects
            return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        pass
    reader = _FieldReader(large_bytes)
    event = reader.read(kind, raw)
    if reader.shortened is not None:
        losses.add_shortened(0, reader.shortened)
    elif not large:
        losses.coerced += 1
    return event


class _FieldReader:
    """Reads one event field by field; fields that are not used never become objects."""

    def __init__(self, large_bytes: int) -> None:
        self.large_bytes = large_bytes
        self.shortened: str | None = None  # how the first text that was too long begins

    def read(self, kind: type[Any], raw: msgspec.Raw) -> Any:
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
                info.name: self._unless_long(value)
                if info.type is msgspec.Raw
                else self._value(value)
                for info, value in given
                if value
            }
        )

    def _unless_long(self, raw: msgspec.Raw) -> msgspec.Raw:
        """The text as it is, unless it is too long to keep."""
        view = memoryview(raw)
        if len(view) <= self.large_bytes:
            return raw
        self._shorten(bytes(view[:_SHOWN_BYTES]).decode("utf-8", "replace"))
        return NOTHING

    def _value(self, raw: msgspec.Raw) -> Any:
        """The decoded value, or None for a number that nothing can hold."""
        if not raw:
            return None
        try:
            text = self._unless_long(raw)
            return msgspec.json.decode(text) if text else None
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
        """A value; a string is cut to the longest length of a name."""
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
    """The same record with every field as undecoded text."""
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
