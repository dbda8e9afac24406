"""A Kineto JSON file -> a Trace: what torch.profiler's export_chrome_trace and Kineto write."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from stepscope.errors import UnreadableInputError
from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT, Device
from stepscope.records.words import counted, plural
from stepscope.trace.assemble import Facts, assemble
from stepscope.trace.columns import Collector
from stepscope.trace.events import Event, ExactEvent, platform_of
from stepscope.trace.files import ByteSource
from stepscope.trace.plausible import (
    MOST_BYTES,
    MOST_RANKS,
    OddValues,
    is_whole,
    plausible_groups,
)
from stepscope.trace.recover import Losses, decode
from stepscope.trace.text import EventText
from stepscope.trace.times import NeedsTextError

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.trace import Trace
    from stepscope.trace.files import Progress

NAME = "kineto"
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_HIP_CALL = re.compile(r"hip[A-Z]")


def read_kineto(path: Path, progress: Progress | None = None) -> Trace:
    """Read, link and describe one file. Raises UnreadableInputError when it holds no events."""
    source, text, losses, collector = _collect(path, progress, launch_flows=False)
    if collector.lacks_correlations():
        source, text, losses, collector = _collect(path, progress, launch_flows=True)
    if not collector.events:
        _refuse_empty(path, text, losses)
    _refuse_useless(path, text, losses, collector)
    return assemble(
        path=str(path),
        source=NAME,
        columns=collector,
        facts=_facts(text.outside, collector),
        quality=_notes(source, text, losses, collector),
    )


def _collect(
    path: Path, progress: Progress | None, *, launch_flows: bool
) -> tuple[ByteSource, EventText, Losses, Collector]:
    source, losses = ByteSource(path, progress), Losses()
    text = _open_text(source, str(path))
    collector = Collector(losses, launch_flows=launch_flows)
    kind: type[Event | ExactEvent] = Event
    while (piece := text.next_piece()) is not None:
        batch = decode(piece, kind)
        try:
            collector.add(batch.events)
        except NeedsTextError:
            kind = ExactEvent
            batch = decode(piece, kind)
            collector.add(batch.events)
        losses.add(batch.losses)
        if batch.closed_at is not None:
            text.close(piece, batch.closed_at)
        elif batch.resume is not None:
            text.give_back(piece, batch.resume)
    return source, text, losses, collector


def _open_text(source: ByteSource, name: str) -> EventText:
    try:
        return EventText(source, name)
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
    if not text.finished:
        raise UnreadableInputError(
            f"{path} ends at byte {text.size}, before its first event is complete"
        )
    raise UnreadableInputError(
        f"{path} holds no events: was the profiler started, and stopped before the export?"
    )


def _refuse_useless(path: Path, text: EventText, losses: Losses, collector: Collector) -> None:
    if collector.known_rows():
        return
    if losses.malformed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in losses.malformed.items())
        raise UnreadableInputError(
            f"{path}: none of its events ({collector.events:,}) can be used ({reasons})"
        )
    if "Trace" in collector.categories or "schemaVersion" in text.outside:
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
        rank=_whole_to(MOST_RANKS, distributed, "rank", collector.odd),
        world_size=_whole_to(MOST_RANKS, distributed, "world_size", collector.odd),
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
    family = platform_of(collector.categories)
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
            id=number(row, "id", MOST_RANKS),
            name=_words(row.get("name")) or "",
            memory_bytes=number(row, "totalGlobalMem", MOST_BYTES),
            multiprocessors=number(row, "numSms", MOST_RANKS),
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
    source: ByteSource, text: EventText, losses: Losses, collector: Collector
) -> tuple[Note, ...]:
    notes = []
    if source.ended_early or losses.cut_at is not None or not text.finished:
        why = source.ended_early or "the list of events is not closed"
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
    if losses.mended:
        notes.append(
            Note(
                id="mended",
                detail="parts of the file are not valid JSON (bare nan or inf, unescaped quotes "
                "or backslashes) and were mended",
                count=losses.mended,
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
        Note(id="metadata-lost", detail=f"{part} could not be read") for part in text.outside_lost
    ]
    return tuple(notes)
