"""Damaged pieces: keep every event that can be kept, count the rest, remember where.

In order, each step only for what the one before could not read: the piece as it is, odd types
coerced; its events with the profiler's known slips mended; ever smaller runs of them, down to
single events; a single event ended where the list of events, or the piece, ends.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.trace import ABSENT
from stepscope.trace.events import NO_ARGS, Args, Event, ExactEvent
from stepscope.trace.text import ANY_BOUNDARY, DECODE_ERRORS, boundaries, outline

if TYPE_CHECKING:
    from stepscope.trace.text import Piece

_BETWEEN = b" \r\n\t,"
_OBJECT = b"{"[0]
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Losses(msgspec.Struct):
    """What was wrong with a file's events, and where it began."""

    mended: int = 0
    coerced: int = 0
    unreadable: int = 0
    not_events: int = 0
    cut_at: int | None = None
    first_unreadable: int | None = None
    malformed: dict[str, int] = msgspec.field(default_factory=dict)

    def lose(self, offset: int) -> None:
        self.unreadable += 1
        if self.first_unreadable is None:
            self.first_unreadable = offset

    def count(self, reason: str, rows: int = 1) -> None:
        if rows:
            self.malformed[reason] = self.malformed.get(reason, 0) + rows

    def add(self, later: Losses) -> None:
        """Take in the losses of text behind this one's."""
        self.mended += later.mended
        self.coerced += later.coerced
        self.unreadable += later.unreadable
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


def decode(piece: Piece, kind: type[Event | ExactEvent]) -> Batch:
    """All events that can be had from a piece."""
    text = piece.text if piece.end is None else piece.text[: piece.end]
    try:
        events = _decoder(kind).decode(b"".join((b"[", text, b"]")))
    except DECODE_ERRORS:
        return _Recovery(piece, kind).run()
    return Batch(events, closed_at=piece.end)


class _Recovery:
    """Decode ever smaller runs of events until what fails is a single one."""

    def __init__(self, piece: Piece, kind: type[Event | ExactEvent]) -> None:
        self.piece, self.kind = piece, kind
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
        from stepscope.trace.mend import escape_quotes, mend

        self._split()
        self.mended = [mend(escape_quotes(row)) for row in self.rows]
        changed = (old != new for old, new in zip(self.rows, self.mended, strict=True))
        self.changes = [0, *accumulate(changed)]
        pending = [(0, len(self.rows))] if self.rows else []
        while pending and self.batch.closed_at is None and self.batch.resume is None:
            low, high = pending.pop()
            events = self._decoded(b",".join(self.mended[low:high]))
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
        bounds = boundaries(text)
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
        from stepscope.trace.mend import escape_quotes, mend

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
        elif goes_on:
            self.batch.resume = self.starts[row]
        else:
            self.losses.lose(self.piece.offset + self.starts[row])
        return []

    def _decoded(self, text: bytes) -> list[Any] | None:
        """Events of text that is valid JSON, whatever its types; None where it is not."""
        try:
            return _decoder(self.kind).decode(b"[" + text + b"]")
        except msgspec.ValidationError:
            pass
        except DECODE_ERRORS:
            return None
        odd = Losses()
        try:
            events = [_coerce(self.kind, raw, odd) for raw in _RAWS.decode(b"[" + text + b"]")]
        except DECODE_ERRORS:
            return None
        self.losses.add(odd)
        return [event for event in events if event is not None]


def _is_plain(segment: bytes) -> bool:
    """Certainly one event at most: what most segments are, found out without a walk."""
    pairs = segment.count(b"{") == segment.count(b"}") and segment.count(b"[") == segment.count(
        b"]"
    )
    return pairs and not ANY_BOUNDARY.search(segment)


def _moved(cuts: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(end + by, resume + by) for end, resume in cuts]


def _coerce(kind: type[Any], raw: msgspec.Raw, losses: Losses) -> Any:
    """One element whose types may not be the expected ones: take what can be taken."""
    if memoryview(raw)[0] != _OBJECT:
        losses.not_events += 1
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        pass
    row = _FIELDS.decode(raw)
    losses.coerced += 1
    time = row.get("ts")
    return kind(
        ph=_text(_value(row.get("ph"))),
        cat=_text(_value(row.get("cat"))),
        name=_text(_value(row.get("name"))),
        pid=_lane(_value(row.get("pid"))),
        tid=_lane(_value(row.get("tid"))),
        ts=(time or msgspec.Raw()) if kind is ExactEvent else _number(_value(time)),
        dur=_number(_value(row.get("dur"))),
        id=_lane(_value(row.get("id"))),
        args=_coerce_args(row["args"]) if "args" in row else NO_ARGS,
    )


def _coerce_args(raw: msgspec.Raw) -> Args:
    try:
        return msgspec.json.decode(raw, type=Args)
    except msgspec.ValidationError:
        pass
    try:
        row = _FIELDS.decode(raw)
    except msgspec.ValidationError:
        return NO_ARGS
    fields = _arg_fields()
    known = [(fields[key], raw) for key, raw in row.items() if key in fields]
    return Args(
        **{info.name: raw if info.type is msgspec.Raw else _value(raw) for info, raw in known}
    )


@cache
def _arg_fields() -> dict[str, msgspec.structs.FieldInfo]:
    return {info.encode_name: info for info in msgspec.structs.fields(Args)}


def _value(raw: msgspec.Raw | None) -> Any:
    """What the text says, or None where that is no value (a number that nothing can hold)."""
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except msgspec.ValidationError:
        return None


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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _lane(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return ABSENT if value is None else str(value)
    return value
