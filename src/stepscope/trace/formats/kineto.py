"""Read a Kineto JSON file (torch.profiler's export_chrome_trace) into a Trace, and copy one
with events added.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stepscope.errors import UnreadableInputError
from stepscope.records.quality import MAX_EVENT_BYTES, MAX_RANKS, Note
from stepscope.records.trace import ABSENT, Device, Trace
from stepscope.text import figures
from stepscope.text.words import counted, plural
from stepscope.trace.files import NAME_CHARACTERS, ByteSource, Limits, Progress, read_head
from stepscope.trace.formats.columns import Collector, Facts, assemble
from stepscope.trace.formats.decode_events import Losses, decode_events
from stepscope.trace.formats.events import Event, ExactEvent, accelerator_family
from stepscope.trace.formats.json_brackets import SEARCH_BACK_BYTES, last_boundary
from stepscope.trace.formats.json_pieces import EventText, OutsideKeys
from stepscope.trace.formats.plausible_values import (
    NeedsTextError,
    OddValues,
    is_whole,
    plausible_groups,
)

NAME = "kineto"
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_HIP_CALL = re.compile(r"hip[A-Z]")
_CUDA_CATEGORIES = {
    *("cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset", "cuda_sync"),
    *("runtime", "memcpy", "memset"),
}


def read_kineto(
    path: Path, progress: Progress | None = None, limits: Limits | None = None
) -> Trace:
    """Read, link and describe one file. Raises UnreadableInputError when it holds no events."""
    limits = limits or Limits.chosen()
    source, text, losses, collector = _collect(path, progress, limits, launch_flows=False)
    if collector.lacks_correlations():
        source, text, losses, collector = _collect(path, progress, limits, launch_flows=True)
    if not collector.events:
        _refuse_empty(path, text, losses)
    _refuse_useless(path, text, losses, collector)
    return assemble(
        path=str(path),
        source=NAME,
        columns=collector,
        facts=_describe(text.outside.keys, collector),
        quality=(
            *_text_notes(source, text, losses, collector.events, limits),
            *_loss_notes(losses, limits),
            *(
                Note(id="metadata-lost", detail=f"{part} could not be read")
                for part in text.outside.lost
            ),
        ),
    )


def check_start(path: Path) -> None:
    """Raise UnreadableInputError if the file does not begin like a trace."""
    source = ByteSource(path)
    _open_text(source, str(path), source.limits)


def _collect(
    path: Path, progress: Progress | None, limits: Limits, *, launch_flows: bool
) -> tuple[ByteSource, EventText, Losses, Collector]:
    source, losses = ByteSource(path, progress, limits), Losses()
    text = _open_text(source, str(path), limits)
    guard = _UselessTextGuard(source, text, limits)
    collector = Collector(losses, launch_flows=launch_flows)
    kind: type[Event | ExactEvent] = Event
    while (piece := text.next_piece()) is not None:
        batch = decode_events(piece, kind, limits)
        try:
            collector.add(batch.events)
        except NeedsTextError:
            kind = ExactEvent
            batch = decode_events(piece, kind, limits)
            collector.add(batch.events)
        losses.merge(batch.losses)
        if batch.events:
            text.mark_used()
        guard.check(collector.rows, losses.unreadable + losses.not_events)
        if batch.closed_at is not None:
            text.close(piece, batch.closed_at)
        elif batch.resume is not None:
            text.give_back(piece, batch.resume)
    return source, text, losses, collector


class _UselessTextGuard:
    """Ends the reading if events that say nothing, or cannot be read, go on for too long."""

    def __init__(self, source: ByteSource, text: EventText, limits: Limits) -> None:
        self._source, self._text, self._limits = source, text, limits
        self._rows = self._damaged = 0  # up to the last event that said something
        self._text_bytes = self._file_bytes = self._seen_bytes = 0

    def check(self, rows: int, damaged: int) -> None:
        source = self._source
        if rows > self._rows:
            self._rows, self._damaged = rows, damaged
            self._text_bytes, self._file_bytes = source.text_bytes, self._seen_bytes
        self._seen_bytes = source.file_bytes
        text_bytes = source.text_bytes - self._text_bytes
        if text_bytes > self._limits.useless_from_bytes:
            source.check_expansion(text_bytes, source.file_bytes - self._file_bytes)
        if damaged - self._damaged > self._limits.damaged:
            self._text.stop(f"{damaged - self._damaged:,} events in a row could not be read")


def _open_text(source: ByteSource, name: str, limits: Limits) -> EventText:
    try:
        return EventText(source, name, limits)
    except UnreadableInputError as error:
        if source.ended_early:  # this is why no event was found
            raise UnreadableInputError(f"{name}: {source.ended_early}; {error}") from None
        raise


def _refuse_empty(path: Path, text: EventText, losses: Losses) -> None:
    if losses.unreadable:
        raise UnreadableInputError(
            f"{path}: none of its events could be read (first at byte {losses.first_unreadable})"
        )
    if losses.not_events:
        raise UnreadableInputError(
            f"{path} is JSON but not a PyTorch trace: none of the {losses.not_events} elements of "
            "its list is an event"
        )
    if text.stopped or text.first_too_long:
        raise UnreadableInputError(f"{path} holds no event that can be read: {_why_none(text)}")
    if not text.finished:
        raise UnreadableInputError(
            f"{path} ends at byte {text.size}, before its first event is complete"
        )
    raise UnreadableInputError(
        f"{path} holds no events: was the profiler started, and stopped before the export?"
    )


def _why_none(text: EventText) -> str:
    if text.stopped is None and text.first_too_long:
        return f"the first is too long (at byte {text.first_too_long[0]})"
    return f"{text.stopped} (read up to byte {text.size})"


def _refuse_useless(path: Path, text: EventText, losses: Losses, collector: Collector) -> None:
    if collector.known_rows():
        return
    if losses.malformed:
        raise UnreadableInputError(
            f"{path}: none of its events ({collector.events:,}) can be used ({losses.reasons})"
        )
    if "Trace" in collector.categories or "schemaVersion" in text.outside.keys:
        raise UnreadableInputError(
            f"{path} is a PyTorch trace without a recorded operator or kernel: was the profiler "
            "stopped before its first active step?"
        )
    categories = ", ".join(sorted(filter(None, collector.categories))[:6])
    raise UnreadableInputError(
        f"{path} is a trace of another tool: no PyTorch events among its {collector.events} "
        f"(categories: {categories or 'none'})"
    )


def _describe(outside: dict[str, Any], collector: Collector) -> Facts:
    distributed = outside.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    return Facts(
        kind=_platform(outside, collector),
        rank=_plausible_whole(distributed, "rank", MAX_RANKS, collector.odd),
        world_size=_plausible_whole(distributed, "world_size", MAX_RANKS, collector.odd),
        backend=_text(distributed.get("backend")),
        groups=plausible_groups(distributed.get("pg_config"), collector.odd),
        devices=_devices(outside.get("deviceProperties"), collector.odd),
        base_ns=_whole(outside.get("baseTimeNanoseconds")) or 0,
        others={
            key: value
            for key, value in outside.items()
            if isinstance(value, str | int | float) and key != "baseTimeNanoseconds"
        },
    )


def _platform(outside: dict[str, Any], collector: Collector) -> str:
    family = accelerator_family(collector.categories)
    if family:
        return family
    names = str(outside.get("deviceProperties")).lower()
    if any(key.startswith(("roctracer", "hip_", "rocprofiler")) for key in outside):
        return "rocm"
    if "amd" in names or "instinct" in names or any(map(_HIP_CALL.match, collector.names)):
        return "rocm"
    categories = {category.lower() for category in collector.categories}
    return "cuda" if categories & _CUDA_CATEGORIES else "cpu"


def _devices(rows: Any, odd: OddValues) -> tuple[Device, ...]:
    if not isinstance(rows, list):
        return ()

    def number(row: dict[str, Any], name: str, limit: int) -> int:
        value = _plausible_whole(row, name, limit, odd)
        return ABSENT if value is None else value

    return tuple(
        Device(
            id=number(row, "id", MAX_RANKS),
            name=_text(row.get("name")) or "",
            memory_bytes=number(row, "totalGlobalMem", MAX_EVENT_BYTES),
            multiprocessors=number(row, "numSms", MAX_RANKS),
        )
        for row in rows
        if isinstance(row, dict)
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    usable = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62
    return value if usable else None


def _plausible_whole(row: dict[str, Any], name: str, limit: int, odd: OddValues) -> int | None:
    number = _whole(row.get(name))
    if is_whole(number, limit):
        return number
    if row.get(name) not in (None, ABSENT):
        odd.add(name, 1, row[name])
    return None


def _text_notes(
    source: ByteSource, text: EventText, losses: Losses, events: int, limits: Limits
) -> Iterator[Note]:
    """Parts of the text that were not read as events."""
    if source.ended_early or losses.cut_at is not None or not text.finished:
        why = source.ended_early or text.stopped or "the list of events is not closed"
        cut_at = text.size if losses.cut_at is None else losses.cut_at
        yield Note(
            id="truncated",
            detail=f"the file is cut off at byte {cut_at}: {why}; {counted(events, 'event')} "
            f"before that {plural(events, 'was', 'were')} read",
            count=int(losses.cut_at is not None),
            byte_offset=cut_at,
        )
    if losses.unreadable:
        yield Note(
            id="unreadable-events",
            detail=f"{counted(losses.unreadable, 'event')} could not be read, the first at byte "
            f"{losses.first_unreadable}",
            count=losses.unreadable,
            byte_offset=losses.first_unreadable,
        )
    if text.first_too_long:
        offset, begin = text.first_too_long
        yield Note(
            id="oversized-events",
            detail=f"left out: {counted(text.too_long, 'event')} longer than "
            f"{figures.size(limits.event_bytes)} or without an end, the first at byte {offset}: "
            f"{begin}; {limits.raise_event}",
            count=text.too_long,
            byte_offset=offset,
        )


def _loss_notes(losses: Losses, limits: Limits) -> Iterator[Note]:
    """Events that were read, but not as they stand."""
    if losses.first_shortened:
        offset, begin = losses.first_shortened
        yield Note(
            id="shortened",
            detail=f"{counted(losses.shortened, 'event')} with a name of over "
            f"{NAME_CHARACTERS:,} characters, which was cut, or an argument of over "
            f"{figures.size(limits.large_bytes)}, which was left out; the first at about byte "
            f"{offset}: {begin!r}",
            count=losses.shortened,
            byte_offset=offset,
        )
    if losses.repaired:
        yield Note(
            id="mended",
            detail="parts of the file are not valid JSON (bare nan or inf, unescaped quotes or "
            "backslashes) and were repaired",
            count=losses.repaired,
        )
    if losses.coerced:
        yield Note(
            id="odd-types",
            detail=f"{counted(losses.coerced, 'event')} with values of unexpected types; those "
            "that make sense were read",
            count=losses.coerced,
        )
    if losses.not_events:
        yield Note(
            id="not-events",
            detail=f"{counted(losses.not_events, 'element')} of traceEvents "
            f"{plural(losses.not_events, 'is not an object', 'are not objects')}",
            count=losses.not_events,
        )
    yield from losses.malformed_notes()


# Copy a trace with events added at the beginning of its list; its own text stays as it is.
#
# Nothing is decoded: the text passes through in pieces, so memory does not follow the file's size.
# A file that ends early is closed after its last whole event.

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
        base = keys[_BASE] if _BASE in keys else self._tail_keys().get(_BASE)
        self.base_ns = base if isinstance(base, int) and not isinstance(base, bool) else 0

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
        """Yield the text up to the last whole event that has another one after it."""
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
