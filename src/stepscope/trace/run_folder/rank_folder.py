"""Read what capture wrote beside a rank's trace: clock rounds, the job's layout, the flight
recorder, collectives of the whole run, memory, sampled stacks.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, to_builtins
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.records.job import ClockKeeping, LoggedCollectives, RankFolder, Rounds
from stepscope.records.memory import (
    CATEGORIES,
    SAVING_FILE,
    CapturedMemory,
    CapturedPeak,
    Categories,
    SavedMemory,
)
from stepscope.records.quality import (
    MAX_DURATION_NS,
    MAX_STAMP_NS,
    Bytes,
    Count,
    DurationNs,
    Note,
    Ranks,
    StampNs,
    StepNumber,
    UnixOffsetNs,
)
from stepscope.records.rank_facts import RankLinks
from stepscope.records.source_lines import Place, StackSamples
from stepscope.trace.decode import NotJsonError, Oddities, brief, decode, read_record, read_rows
from stepscope.trace.files import MissingFileError, list_folder, may_exist, read_whole
from stepscope.trace.run_folder.rank_facts import (
    RANK,
    CapturedGroup,
    RankFacts,
    decode_facts,
)
from stepscope.trace.run_folder.windows import comms_of

CLOCK, LINKS, MEMORY = "clock.json", "links.json", "memory.json"
_MOST_NOTES = 16


class _Sync(msgspec.Struct, frozen=True):
    rounds: list[tuple[StampNs, StampNs]]
    label: str = ""
    step: StepNumber | None = None
    offset_perf_to_unix_ns: UnixOffsetNs | None = None


class _Keeping(msgspec.Struct, frozen=True):
    host: str | None = None
    synchronised: bool | None = None
    estimated_error_ns: DurationNs | None = None
    maximum_error_ns: DurationNs | None = None
    ptp_devices: list[str] = []


class _Clock(msgspec.Struct, frozen=True):
    syncs: list[_Sync] = []
    host_clock: _Keeping | None = None
    notes: list[str] = []


class _RecorderLine(msgspec.Struct, frozen=True, kw_only=True):
    """A collective as the flight recorder has it."""

    kind: str = ""
    group: str = ""
    group_description: str | None = None
    group_size: Ranks | None = None
    sequence: Count | None = None
    size_bytes: Bytes | None = None
    created_ns: StampNs | None = None
    duration_ns: DurationNs | None = None
    step: StepNumber | None = None


def read_rank_folder(trace: Path) -> RankFolder | None:
    """Return None for a bare trace. What is missing, cut short or makes no sense is left out."""
    folder = trace.parent
    comms = comms_of(trace)
    if not any(map(may_exist, (folder / RANK, folder / CLOCK, folder / comms))):
        return None
    about_rank, about_clock, about_comms = map(Oddities, (RANK, CLOCK, comms))
    about_run, about_links = Oddities(COLLECTIVES), Oddities(LINKS)
    rank: dict[str, Any] = msgspec.structs.asdict(decode_facts(folder, about_rank))
    known = {name: value for name, value in rank.items() if value is not msgspec.UNSET}
    clock = read_record(folder / CLOCK, _Clock, about_clock) or _Clock()
    lines = read_rows(folder / comms, _RecorderLine, about_comms)
    read = (about_rank, about_clock, about_comms, about_run, about_links)
    # Every group with all of its ranks.
    communication = known.get("communication")
    layout: dict[str, Any] = msgspec.to_builtins(communication) or {}
    groups = communication.groups if communication is not None else None
    if isinstance(groups, list):
        layout["groups"] = [
            {**_without_ranges(group), "ranks": group.members()} for group in groups
        ]
    return RankFolder(
        host=known.get("host"),
        network_place=known.get("network_place"),
        pid=known.get("pid"),
        world_size=known.get("world_size"),
        steps=known.get("steps", 0),
        rounds=tuple(_rounds(clock.syncs, about_clock)),
        keeping=_keeping(clock.host_clock),
        clock_notes=tuple(clock.notes[:_MOST_NOTES]),
        layout=layout,
        comms=tuple(map(msgspec.structs.asdict, lines)),
        load=known.get("host_load"),
        data=known.get("data"),
        collectives=read_collective_log(folder, about_run),
        links=read_record(folder / LINKS, RankLinks, about_links),
        notes=tuple(note for about in read for note in about.notes),
    )


class UntracedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What capture wrote about a rank without a trace, apart from its steps."""

    facts: RankFacts
    rounds: tuple[Rounds, ...]
    collectives: LoggedCollectives | None
    links: RankLinks | None
    notes: tuple[Note, ...]


def read_untraced_folder(folder: Path) -> UntracedFolder:
    """Read like `read_rank_folder`, without what only explains a trace: there may be thousands."""
    about = [Oddities(name) for name in (RANK, CLOCK, COLLECTIVES, LINKS)]
    about_rank, about_clock, about_run, about_links = about
    facts = decode_facts(folder, about_rank)
    clock = read_record(folder / CLOCK, _Clock, about_clock) or _Clock()
    return UntracedFolder(
        facts=facts,
        rounds=tuple(_rounds(clock.syncs, about_clock)),
        collectives=read_collective_log(folder, about_run),
        links=read_record(folder / LINKS, RankLinks, about_links),
        notes=tuple(note for oddities in about for note in oddities.notes),
    )


def _without_ranges(group: CapturedGroup) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(group)
    del fields["ranges"]
    return fields


def read_rounds(folder: Path) -> tuple[Rounds, ...]:
    """Read only a rank's clock rounds; empty if it has none."""
    clock = read_record(folder / CLOCK, _Clock) or _Clock()
    return tuple(_rounds(clock.syncs, Oddities(CLOCK)))


def _rounds(syncs: list[_Sync], oddities: Oddities) -> list[Rounds]:
    out = []
    for sync in syncs:
        marks = np.array(sync.rounds, np.int64).reshape(-1, 2)
        if (marks[:, 1] < marks[:, 0]).any():
            oddities.add(f"rounds of {sync.label!r}", "one was left before it was entered")
        elif len(marks):
            out.append(
                Rounds(
                    label=sync.label,
                    step=sync.step,
                    came_ns=marks[:, 0],
                    left_ns=marks[:, 1],
                    perf_to_unix_ns=sync.offset_perf_to_unix_ns,
                )
            )
    return out


def _keeping(facts: _Keeping | None) -> ClockKeeping | None:
    if facts is None:
        return None
    known = msgspec.structs.asdict(facts)
    return ClockKeeping(**{**known, "ptp_devices": tuple(facts.ptp_devices[:_MOST_NOTES])})


# Read a rank's collectives-*.json.gz: gzip members that each hold lines of columns.
#
# A file may end amid a member; what comes before is read. A line that makes no sense is left out.

COLLECTIVES = "collectives-*.json.gz"
_MAX_PACKED_BYTES = 64 << 20
_MAX_TEXT_BYTES = 512 << 20  # of one file
_GZIP = 31
_Change = Annotated[int, Meta(ge=-MAX_STAMP_NS, le=MAX_STAMP_NS)]
_Place = Annotated[int, Meta(ge=0, lt=1 << 20)]


class _Columns(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the recorder. Numbers that grow are differences to the one before."""

    created_ns: list[_Change]
    sequence: list[_Change]
    group: list[_Place]
    name: list[_Place]
    groups: list[str]
    names: list[str]
    duration_ns: list[Annotated[int, Meta(ge=0, le=MAX_DURATION_NS)]] | None = None

    @property
    def fits(self) -> bool:
        """All columns are of one length, and all places exist."""
        lengths = {len(self.created_ns), len(self.sequence), len(self.group), len(self.name)}
        if self.duration_ns is not None:
            lengths.add(len(self.duration_ns))
        if len(lengths) > 1 or not self.group:
            return False
        return max(self.group) < len(self.groups) and max(self.name) < len(self.names)


def read_collective_log(folder: Path, oddities: Oddities) -> LoggedCollectives | None:
    """Return None where no collectives of the whole run were captured."""
    readings = []
    for file in sorted(_parts(folder)):
        for number, line in enumerate(_text(file, oddities).split(b"\n")[:-1], 1):
            try:
                columns = decode(line, _Columns)
            except NotJsonError as error:
                oddities.add(f"{file.name}, line {number}", str(error))
                continue
            if columns.fits:
                readings.append(columns)
            else:
                oddities.add(f"{file.name}, line {number}", "its columns do not fit together")
    return _join(readings) if readings else None


def _parts(folder: Path) -> list[Path]:
    try:
        return [file for file in list_folder(folder) if file.match(COLLECTIVES)]
    except UnreadableInputError:
        return []


def _text(file: Path, oddities: Oddities) -> bytes:
    """All whole lines, up to where the file is damaged or cut."""
    try:
        packed = read_whole(file, _MAX_PACKED_BYTES)
    except MissingFileError:
        return b""
    except UnreadableInputError as error:
        oddities.unread(str(error))
        return b""
    pieces, left = [], _MAX_TEXT_BYTES
    while packed and left > 0:
        member = zlib.decompressobj(_GZIP)
        try:
            piece = member.decompress(packed, left)
        except zlib.error as error:
            oddities.add(file.name, str(error))
            break
        pieces.append(piece)
        left -= len(piece)
        packed = member.unused_data
    if left <= 0:
        oddities.left_out(f"only its first {_MAX_TEXT_BYTES >> 20} MB were read")
    return b"".join(pieces)


def _join(readings: list[_Columns]) -> LoggedCollectives:
    groups = tuple(dict.fromkeys(name for reading in readings for name in reading.groups))
    names = tuple(dict.fromkeys(name for reading in readings for name in reading.names))
    created = _concatenate(readings, "created_ns")
    sequence = _concatenate(readings, "sequence")
    known = all(reading.duration_ns is not None for reading in readings)
    durations = [np.array(reading.duration_ns, np.int64) for reading in readings] if known else []
    possible = (created > 0) & (created <= MAX_STAMP_NS) & (sequence >= 0)
    order = np.argsort(created, kind="stable")
    kept = order[possible[order]]
    return LoggedCollectives(
        groups=groups,
        names=names,
        group=_places(readings, "group", groups)[kept],
        name=_places(readings, "name", names)[kept],
        sequence=sequence[kept],
        created_ns=created[kept],
        duration_ns=np.concatenate(durations)[kept] if durations else None,
    )


def _concatenate(readings: list[_Columns], name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.cumsum(np.array(getattr(one, name), np.int64)) for one in readings])


def _places(
    readings: list[_Columns], name: str, known: tuple[str, ...]
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Each reading has its own list of names; these are places in the common one."""
    place = {text: number for number, text in enumerate(known)}
    pieces = []
    for reading in readings:
        common = np.array([place[text] for text in getattr(reading, f"{name}s")], np.int32)
        pieces.append(common[np.array(getattr(reading, name), np.int64)])
    return np.concatenate(pieces)


# memory.json: what capture wrote about a rank's memory.


def read_captured(folder: Path) -> tuple[CapturedMemory | None, tuple[Note, ...]]:
    """Return None where memory was not captured; notes about what could not be read."""
    oddities = Oddities(MEMORY)
    captured = read_record(folder / MEMORY, CapturedMemory, oddities)
    if captured is not None:
        captured = replace(
            captured,
            peak=_add_up(captured.peak, oddities) if captured.peak else None,
            categories=_known(captured.categories, "categories", oddities),
            phases=[
                replace(end, categories=_known(end.categories, end.phase, oddities))
                for end in captured.phases
            ],
        )
        if oddities.count or (captured.graph and not captured.graph.is_sound):
            captured = replace(captured, graph=None)  # its rows name each other by their numbers
    notes = tuple(
        replace(note, id="memory-unreadable") if note.id == "side-file-unreadable" else note
        for note in oddities.notes
    )
    return captured, notes


def read_saving(folder: Path) -> tuple[SavedMemory | None, tuple[Note, ...]]:
    """Return what `save_memory` left; None where it did not run."""
    oddities = Oddities(SAVING_FILE)
    saving = read_record(folder / SAVING_FILE, SavedMemory, oddities)
    if saving is not None and saving.timeline is not None and not saving.timeline.is_whole():
        oddities.add("timeline", "its lines are not equally long")
        saving = replace(saving, timeline=None)
    return saving, tuple(oddities.notes)


def read_memory(folder: Path) -> dict[str, Any] | None:
    """memory.json of a rank's folder in its own words; None where it was not captured."""
    captured, _ = read_captured(folder)
    return None if captured is None else to_builtins(replace(captured, graph=None))


def _known(categories: Categories, place: str, oddities: Oddities) -> Categories:
    """Drop names that are no category."""
    for name in categories.keys() - set(CATEGORIES):
        oddities.add(f"{place}.{brief(name)}", "no such category")
    return {name: categories[name] for name in CATEGORIES if name in categories}


def _add_up(peak: CapturedPeak, oddities: Oddities) -> CapturedPeak:
    """Categories that all are known add up to what the allocator held at the peak. They may hold
    more: what did not come from the allocator, and then nothing is left for the last two."""
    held = _known(peak.categories, "peak", oddities)
    sizes = [held.get(name) for name in CATEGORIES]
    known = [size for size in sizes if size is not None]
    total, allocated = sum(known), peak.allocated_bytes
    if allocated is not None and len(known) == len(sizes):
        rest = (held["temporaries"] or 0) + (held["other"] or 0)
        if total < allocated or (total > allocated and rest):
            oddities.add("peak.categories", f"they sum to {total} bytes of {allocated} allocated")
            held = {}
    return replace(peak, categories=held)


# samples.json: the stacks that the sampler saw outside windows, and in which step.

SAMPLES = "samples.json"
_MAX_BYTES = 64 << 20  # 5,000 stacks of 96 frames, with long paths
_LineNumber = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Row = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class _SampledStack(msgspec.Struct, frozen=True):
    frames: tuple[tuple[str, _LineNumber, str], ...]


class _SampledStepColumns(msgspec.Struct, frozen=True):
    number: list[StepNumber]
    stack: list[_Row]


class _SamplesFile(msgspec.Struct, frozen=True):
    stacks: list[_SampledStack] = []
    environments: list[str] = []
    steps: _SampledStepColumns | None = None  # older captures do not know the steps


def read_stack_samples(folder: Path) -> tuple[StackSamples | None, tuple[Note, ...]]:
    """Read a rank's samples.json; None where stacks were not sampled or steps are not known."""
    oddities = Oddities(SAMPLES)
    file = read_record(folder / SAMPLES, _SamplesFile, oddities, _MAX_BYTES)
    if file is None or file.steps is None:
        return None, oddities.notes
    number, stack = np.array(file.steps.number, np.int64), np.array(file.steps.stack, np.int64)
    # A stack or a sample that was left out moves all that follow it.
    if oddities.count or len(number) != len(stack) or (stack >= len(file.stacks)).any():
        oddities.unread("its samples do not fit its stacks")
        return None, oddities.notes
    stacks = tuple(
        tuple(Place(file=name, line=line, function=function) for name, line, function in one.frames)
        for one in file.stacks
    )
    samples = StackSamples(
        stacks=stacks, number=number, stack=stack, environments=tuple(file.environments)
    )
    return samples, oddities.notes
