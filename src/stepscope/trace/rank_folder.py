"""What capture wrote beside a rank's trace: clock rounds, the job's layout, the flight recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.records.job import ClockKeeping, RankFolder, Rounds
from stepscope.records.limits import (  # noqa: TC001  (decoded)
    Bytes,
    Count,
    DurationNs,
    Ranks,
    StampNs,
    StepNumber,
    UnixOffsetNs,
)
from stepscope.records.links import RankLinks
from stepscope.trace.collective_log import COLLECTIVES, read_collective_log
from stepscope.trace.decode import Oddities
from stepscope.trace.rank_facts import RANK, decode_facts
from stepscope.trace.regular_files import may_exist
from stepscope.trace.side_files import read_record, read_rows
from stepscope.trace.windows import comms_of

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.quality import Note
    from stepscope.records.run_calls import LoggedCollectives
    from stepscope.trace.rank_facts import CapturedGroup, CapturedLayout, RankFacts

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


class _Line(msgspec.Struct, frozen=True, kw_only=True):
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
    """None for a bare trace. What is missing, cut short or makes no sense is left out."""
    folder = trace.parent
    comms = comms_of(trace)
    if not any(map(may_exist, (folder / RANK, folder / CLOCK, folder / comms))):
        return None
    about_rank, about_clock, about_comms = map(Oddities, (RANK, CLOCK, comms))
    about_run, about_links = Oddities(COLLECTIVES), Oddities(LINKS)
    rank: dict[str, Any] = msgspec.structs.asdict(decode_facts(folder, about_rank))
    known = {name: value for name, value in rank.items() if value is not msgspec.UNSET}
    clock = read_record(folder / CLOCK, _Clock, about_clock) or _Clock()
    lines = read_rows(folder / comms, _Line, about_comms)
    read = (about_rank, about_clock, about_comms, about_run, about_links)
    return RankFolder(
        host=known.get("host"),
        network_place=known.get("network_place"),
        pid=known.get("pid"),
        world_size=known.get("world_size"),
        steps=known.get("steps", 0),
        rounds=tuple(_rounds(clock.syncs, about_clock)),
        keeping=_keeping(clock.host_clock),
        clock_notes=tuple(clock.notes[:_MOST_NOTES]),
        layout=_layout(known.get("communication")),
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
    """As `read_rank_folder`, without what only explains a trace: there may be thousands."""
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


def _layout(communication: CapturedLayout | None) -> dict[str, Any]:
    """Every group with all of its ranks."""
    layout: dict[str, Any] = msgspec.to_builtins(communication) or {}
    groups = communication.groups if communication is not None else None
    if isinstance(groups, list):
        layout["groups"] = [
            {**_without_ranges(group), "ranks": group.members()} for group in groups
        ]
    return layout


def _without_ranges(group: CapturedGroup) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(group)
    del fields["ranges"]
    return fields


def read_rounds(folder: Path) -> tuple[Rounds, ...]:
    """Only a rank's clock rounds; empty if it has none."""
    about_clock = Oddities(CLOCK)
    clock = read_record(folder / CLOCK, _Clock, about_clock) or _Clock()
    return tuple(_rounds(clock.syncs, about_clock))


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
