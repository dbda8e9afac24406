"""A Kineto JSON file -> a Trace: what torch.profiler's export_chrome_trace and Kineto write."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from stepscope.errors import UnreadableInputError
from stepscope.records.limits import MAX_EVENT_BYTES, MAX_RANKS
from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT, Device
from stepscope.records.words import counted, plural
from stepscope.trace.assemble import Facts, assemble
from stepscope.trace.columns import Collector
from stepscope.trace.events import Event, ExactEvent, accelerator_family
from stepscope.trace.files import ByteSource
from stepscope.trace.json_pieces import EventText
from stepscope.trace.limits import NAME_CHARACTERS, Limits, megabytes
from stepscope.trace.plausible import OddValues, is_whole, plausible_groups
from stepscope.trace.recover import Losses, decode_events
from stepscope.trace.times import NeedsTextError

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.trace import Trace
    from stepscope.trace.files import Progress

NAME = "kineto"
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_HIP_CALL = re.compile(r"hip[A-Z]")


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
        facts=_facts(text.outside.keys, collector),
        quality=_notes(source, text, losses, collector, limits),
    )


def check_begin(path: Path) -> None:
    """Raises UnreadableInputError where the file does not begin as a trace does."""
    source = ByteSource(path)
    _open_text(source, str(path), source.limits)


def _collect(
    path: Path, progress: Progress | None, limits: Limits, *, launch_flows: bool
) -> tuple[ByteSource, EventText, Losses, Collector]:
    source, losses = ByteSource(path, progress, limits), Losses()
    text = _open_text(source, str(path), limits)
    stretch = _UselessTextGuard(source, text, limits)
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
        stretch.check(collector.rows, losses.unreadable + losses.not_events)
        if batch.closed_at is not None:
            text.close(piece, batch.closed_at)
        elif batch.resume is not None:
            text.give_back(piece, batch.resume)
    return source, text, losses, collector


class _UselessTextGuard:
    """The part of a file since an event said something: what does not must not go on for ever."""

    def __init__(self, source: ByteSource, text: EventText, limits: Limits) -> None:
        self._source, self._text, self._limits = source, text, limits
        self._rows = self._damaged = 0
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
        if source.ended_early:  # then that is why there is nothing to find
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
        raise UnreadableInputError(f"{path} holds no event that can be read: {_too_much(text)}")
    if not text.finished:
        raise UnreadableInputError(
            f"{path} ends at byte {text.size}, before its first event is complete"
        )
    raise UnreadableInputError(
        f"{path} holds no events: was the profiler started, and stopped before the export?"
    )


def _too_much(text: EventText) -> str:
    if text.stopped is None and text.first_too_long:
        return f"the first is too long (at byte {text.first_too_long[0]})"
    return f"{text.stopped} (read up to byte {text.size})"


def _refuse_useless(path: Path, text: EventText, losses: Losses, collector: Collector) -> None:
    if collector.known_rows():
        return
    if losses.malformed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in losses.malformed.items())
        raise UnreadableInputError(
            f"{path}: none of its events ({collector.events:,}) can be used ({reasons})"
        )
    if "Trace" in collector.categories or "schemaVersion" in text.outside.keys:
        raise UnreadableInputError(
            f"{path} is a PyTorch trace without a recorded operator or kernel: was the profiler "
            "stopped before its first active step?"
        )
    seen = ", ".join(sorted(filter(None, collector.categories))[:6])
    raise UnreadableInputError(
        f"{path} is a trace of another tool: no PyTorch events among its {collector.events} "
        f"(categories: {seen or 'none'})"
    )


def _facts(outside: dict[str, Any], collector: Collector) -> Facts:
    distributed = outside.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    return Facts(
        kind=_platform(outside, collector),
        rank=_whole_to(MAX_RANKS, distributed, "rank", collector.odd),
        world_size=_whole_to(MAX_RANKS, distributed, "world_size", collector.odd),
        backend=_words(distributed.get("backend")),
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
    touched = {"cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset", "cuda_sync"}
    seen = {category.lower() for category in collector.categories}
    return "cuda" if seen & (touched | {"runtime", "memcpy", "memset"}) else "cpu"


def _devices(rows: Any, odd: OddValues) -> tuple[Device, ...]:
    if not isinstance(rows, list):
        return ()

    def number(row: dict[str, Any], name: str, most: int) -> int:
        value = _whole_to(most, row, name, odd)
        return ABSENT if value is None else value

    return tuple(
        Device(
            id=number(row, "id", MAX_RANKS),
            name=_words(row.get("name")) or "",
            memory_bytes=number(row, "totalGlobalMem", MAX_EVENT_BYTES),
            multiprocessors=number(row, "numSms", MAX_RANKS),
        )
        for row in rows
        if isinstance(row, dict)
    )


def _words(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    usable = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62
    return value if usable else None


def _whole_to(most: int, row: dict[str, Any], name: str, odd: OddValues) -> int | None:
    number = _whole(row.get(name))
    if is_whole(number, most):
        return number
    if row.get(name) not in (None, ABSENT):
        odd.add(name, 1, row[name])
    return None


def _notes(
    source: ByteSource, text: EventText, losses: Losses, collector: Collector, limits: Limits
) -> tuple[Note, ...]:
    notes = []
    if source.ended_early or losses.cut_at is not None or not text.finished:
        why = source.ended_early or text.stopped or "the list of events is not closed"
        where = text.size if losses.cut_at is None else losses.cut_at
        notes.append(
            Note(
                id="truncated",
                detail=f"the file is cut off at byte {where}: {why}; "
                f"{counted(collector.events, 'event')} before that "
                f"{plural(collector.events, 'was', 'were')} read",
                count=int(losses.cut_at is not None),
                byte_offset=where,
            )
        )
    if losses.unreadable:
        notes.append(
            Note(
                id="unreadable-events",
                detail=f"{counted(losses.unreadable, 'event')} could not be read, the first at "
                "byte "
                f"{losses.first_unreadable}",
                count=losses.unreadable,
                byte_offset=losses.first_unreadable,
            )
        )
    if text.first_too_long:
        place, begin = text.first_too_long
        notes.append(
            Note(
                id="oversized-events",
                detail=f"left out: {counted(text.too_long, 'event')} longer than "
                f"{megabytes(limits.event_bytes)} or without an end, the first at byte {place}: "
                f"{begin}; {limits.raise_event}",
                count=text.too_long,
                byte_offset=place,
            )
        )
    if losses.first_shortened:
        place, begin = losses.first_shortened
        notes.append(
            Note(
                id="shortened",
                detail=f"{counted(losses.shortened, 'event')} with a name of over "
                f"{NAME_CHARACTERS:,} characters, which was cut, or an argument of over "
                f"{megabytes(limits.large_bytes)}, which was left out; the first at about byte "
                f"{place}: {begin!r}",
                count=losses.shortened,
                byte_offset=place,
            )
        )
    if losses.repaired:
        notes.append(
            Note(
                id="mended",
                detail="parts of the file are not valid JSON (bare nan or inf, unescaped quotes "
                "or backslashes) and were mended",
                count=losses.repaired,
            )
        )
    if losses.coerced:
        notes.append(
            Note(
                id="odd-types",
                detail=f"unexpected types of values in {counted(losses.coerced, 'event')}; "
                "they were read "
                "as far as these make sense",
                count=losses.coerced,
            )
        )
    if losses.not_events:
        notes.append(
            Note(
                id="not-events",
                detail=f"{counted(losses.not_events, 'element')} of traceEvents "
                f"{plural(losses.not_events, 'is no object', 'are not objects')}",
                count=losses.not_events,
            )
        )
    notes += [
        Note(id="malformed", detail=f"left out: {counted(count, 'event')} {reason}", count=count)
        for reason, count in losses.malformed.items()
    ]
    notes += [
        Note(id="metadata-lost", detail=f"{part} could not be read") for part in text.outside.lost
    ]
    return tuple(notes)
