"""A Kineto JSON file -> a Trace: what torch.profiler's export_chrome_trace and Kineto write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT, Device
from stepscope.trace.assemble import Facts, assemble
from stepscope.trace.columns import Collector
from stepscope.trace.events import Event, ExactEvent, platform_of
from stepscope.trace.files import ByteSource
from stepscope.trace.recover import Losses, decode_list, recover
from stepscope.trace.text import EventText, array_ends, boundaries
from stepscope.trace.times import NeedsTextError

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.trace import Trace
    from stepscope.trace.files import Progress
    from stepscope.trace.text import Piece

NAME = "kineto"
_TRY_CUTS = 8
_TRY_ENDS = 64
_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {
    Event: msgspec.json.Decoder(list[Event]),
    ExactEvent: msgspec.json.Decoder(list[ExactEvent]),
}


def recognises(head: bytes) -> bool:
    """Anything that is not another reader's: the text itself decides, with a clear error."""
    return not head.startswith(b"SQLite format 3\x00")


def read_kineto(path: Path, progress: Progress | None = None) -> Trace:
    """Read, link and describe one file. Raises UnreadableInputError when it holds no events."""
    source, text, losses, collector = _collect(path, progress, launch_flows=False)
    if collector.lacks_correlations():
        source, text, losses, collector = _collect(path, progress, launch_flows=True)
    if not collector.events:
        _refuse_empty(path, text, losses)
    _refuse_foreign(path, collector)
    return assemble(
        path=str(path),
        format=NAME,
        columns=collector,
        facts=_facts(text.outside, collector),
        quality=_notes(source, text, losses, collector),
    )


def _collect(
    path: Path, progress: Progress | None, *, launch_flows: bool
) -> tuple[ByteSource, EventText, Losses, Collector]:
    source, losses = ByteSource(path, progress), Losses()
    text = EventText(source, str(path))
    collector = Collector(losses, launch_flows=launch_flows)
    kind: type[Any] = Event
    while (piece := text.next_piece()) is not None:
        events = _decode(text, piece, kind, losses)
        try:
            collector.add(events)
        except NeedsTextError:
            kind = ExactEvent
            collector.add(_decode_again(piece, kind, losses))
    return source, text, losses, collector


def _decode(text: EventText, piece: Piece, kind: type[Any], losses: Losses) -> list[Any]:
    decoder = _DECODERS[kind]
    try:
        return decode_list(decoder, piece.text)
    except msgspec.ValidationError:
        pass  # valid JSON, odd types: no cut would help
    except (msgspec.DecodeError, UnicodeDecodeError):
        events = _decode_part(text, piece, decoder)
        if events is not None:
            return events
    cut = piece.last and not text.finished
    return recover(decoder, kind, piece.text, piece.offset, losses, cut=cut)


def _decode_again(piece: Piece, kind: type[Any], losses: Losses) -> list[Any]:
    try:
        return decode_list(_DECODERS[kind], piece.text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        scratch = Losses()  # already counted the first time
        events = recover(
            _DECODERS[kind], kind, piece.text, piece.offset, scratch, cut=piece.last
        )
        losses.malformed |= scratch.malformed
        return events


def _decode_part(
    text: EventText, piece: Piece, decoder: msgspec.json.Decoder[Any]
) -> list[Any] | None:
    """The piece was cut in the wrong place, or the list of events ended inside it."""
    if piece.last and text.finished:
        return None
    for count, end in enumerate(array_ends(piece.text)):
        if count == _TRY_ENDS:
            break
        try:
            events = decode_list(decoder, piece.text[:end])
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        text.close(piece, end)
        return events
    if piece.last:
        return None
    for end, resume in reversed(boundaries(piece.text)[-_TRY_CUTS:]):
        try:
            events = decode_list(decoder, piece.text[:end])
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        text.give_back(piece, resume)
        return events
    return None


def _refuse_empty(path: Path, text: EventText, losses: Losses) -> None:
    if losses.unreadable or losses.cut_at is not None:
        at = losses.first_unreadable if losses.first_unreadable is not None else losses.cut_at
        raise UnreadableInputError(f"{path}: none of its events could be read (first at byte {at})")
    if not text.finished:
        raise UnreadableInputError(f"{path} ends before its first event: nothing was written")
    raise UnreadableInputError(
        f"{path} holds no events: was the profiler started, and stopped before the export?"
    )


def _refuse_foreign(path: Path, collector: Collector) -> None:
    if collector.known_rows() or collector.events == 0:
        return
    seen = ", ".join(sorted(collector.categories)[:6])
    raise UnreadableInputError(
        f"{path} is a trace of another tool: no PyTorch events among its {collector.events} "
        f"(categories: {seen or 'none'})"
    )


def _facts(outside: dict[str, Any], collector: Collector) -> Facts:
    distributed = outside.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    groups = distributed.get("pg_config")
    return Facts(
        kind=_platform(outside, collector),
        rank=_whole(distributed.get("rank")),
        world_size=_whole(distributed.get("world_size")),
        backend=str(distributed["backend"]) if "backend" in distributed else None,
        groups=tuple(g for g in groups if isinstance(g, dict)) if isinstance(groups, list) else (),
        devices=_devices(outside.get("deviceProperties")),
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
    names = " ".join(d.name for d in _devices(outside.get("deviceProperties"))).lower()
    if any(key.startswith(("roctracer", "hip_", "rocprofiler")) for key in outside):
        return "rocm"
    if "amd" in names or "instinct" in names or any(n.startswith("hip") for n in collector.names):
        return "rocm"
    touched = {"cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset", "cuda_sync"}
    seen = {category.lower() for category in collector.categories}
    return "cuda" if seen & (touched | {"runtime", "memcpy", "memset"}) else "cpu"


def _devices(rows: Any) -> tuple[Device, ...]:
    if not isinstance(rows, list):
        return ()
    return tuple(
        Device(
            id=_or_absent(row.get("id")),
            name=str(row.get("name") or ""),
            memory_bytes=_or_absent(row.get("totalGlobalMem")),
            multiprocessors=_or_absent(row.get("numSms")),
        )
        for row in rows
        if isinstance(row, dict)
    )


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    usable = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62
    return value if usable else None


def _or_absent(value: Any) -> int:
    number = _whole(value)
    return ABSENT if number is None else number


def _notes(
    source: ByteSource, text: EventText, losses: Losses, collector: Collector
) -> tuple[Note, ...]:
    notes = []
    if source.ended_early or losses.cut_at is not None or not text.finished:
        why = source.ended_early or "the list of events is not closed"
        where = f" at byte {losses.cut_at}" if losses.cut_at is not None else ""
        notes.append(
            Note(
                id="truncated",
                detail=f"the file is cut off{where}: {why}; "
                f"{collector.events} events before that were read",
                count=int(losses.cut_at is not None),
                byte_offset=losses.cut_at,
            )
        )
    if losses.unreadable:
        notes.append(
            Note(
                id="unreadable-events",
                detail=f"{losses.unreadable} events could not be read, the first at byte "
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
    if losses.not_events:
        notes.append(
            Note(
                id="not-events",
                detail=f"{losses.not_events} elements of traceEvents are not objects",
                count=losses.not_events,
            )
        )
    notes += [
        Note(id="malformed", detail=f"{count} events {reason} were left out", count=count)
        for reason, count in losses.malformed.items()
    ]
    notes += [
        Note(id="metadata-lost", detail=f"{part} could not be read")
        for part in text.outside_lost
    ]
    return tuple(notes)
