"""What a job's explanation holds of its NCCL logs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.explain.nccl.groups import groups_of
from stepscope.explain.nccl.judge import judge_nccl
from stepscope.records.nccl import Choice, CommunicatorRow, NcclSummary, TransportRow
from stepscope.records.words import counted
from stepscope.trace.nccl_log import find_nccl_logs, read_nccl_log

if TYPE_CHECKING:
    from stepscope.explain.nccl.groups import Group
    from stepscope.records.nccl import Link, NcclLog, NcclOps
    from stepscope.trace.files import Progress


def explain_nccl(*paths: str | Path, progress: Progress | None = None) -> NcclSummary | None:
    """All NCCL logs of files, folders or run folders; None where there is no log.

    A file given by name must be readable; one found in a folder is left out with a note.
    """
    logs: list[NcclLog] = []
    calls: list[Counter[int]] = []
    notes = []
    for path in paths:
        for file in find_nccl_logs(path):
            try:
                log = read_nccl_log(file, progress)
            except UnreadableInputError as error:
                if file == Path(path):
                    raise
                notes.append(f"left out: {error}")
                continue
            calls.append(Counter(log.ops.communicator.tolist()))
            logs.append(replace(log, ops=_no_ops(log.ops)))  # only summaries stay
    return _summarise(logs, calls, notes) if logs else None


def _no_ops(ops: NcclOps) -> NcclOps:
    empty = {
        name: getattr(ops, name)[:0].copy()
        for name in ops.__struct_fields__
        if isinstance(getattr(ops, name), np.ndarray)
    }
    return replace(ops, **empty)


def _summarise(logs: list[NcclLog], calls: list[Counter[int]], notes: list[str]) -> NcclSummary:
    groups = groups_of(logs)
    by_comm = {
        id(comm): counted[place]
        for log, counted in zip(logs, calls, strict=True)
        for place, comm in enumerate(log.communicators)
    }
    warnings = []
    settings: dict[str, dict[str, None]] = {}
    first = 0
    for log in logs:
        warnings += [replace(each, process=each.process + first) for each in log.warnings]
        first += len(log.processes)
        for process in log.processes:
            for name, value in process.settings.items():
                settings.setdefault(name, {})[value] = None
    total = sum(sum(counted.values()) for counted in calls)
    return NcclSummary(
        files=tuple(log.path for log in logs),
        versions=tuple(dict.fromkeys(version for log in logs for version in log.versions)),
        processes=tuple(process for log in logs for process in log.processes),
        communicators=tuple(_row(group, by_comm) for group in groups),
        transports=tuple(row for group in groups for row in _transports(group)),
        choices=_all_choices(logs),
        settings={name: tuple(values) for name, values in sorted(settings.items())},
        warnings=tuple(warnings),
        findings=judge_nccl(logs),
        calls=total,
        notes=(*notes, *_notes(logs, groups, total)),
    )


def _row(group: Group, calls: dict[int, int]) -> CommunicatorRow:
    used: Counter[str] = Counter()
    for _, link in group.links():
        used[link.transport] += len(link.channels)
    return CommunicatorRow(
        id=group.id,
        nranks=group.nranks,
        ranks_seen=len({m.comm.rank for m in group.members if m.comm.rank is not None}),
        hosts=group.hosts,
        nodes=group.nodes,
        channels=tuple(sorted({m.comm.channels for m in group.members if m.comm.channels})),
        transports=tuple(name for name, _ in used.most_common()),
        calls=sum(calls[id(member.comm)] for member in group.members),
        complete=all(member.comm.complete for member in group.members),
    )


def _transports(group: Group) -> list[TransportRow]:
    found: dict[str, list[Link]] = {}
    for _, link in group.links():
        found.setdefault(link.transport, []).append(link)
    out = []
    for transport, links in found.items():
        within = {group.within(link) for link in links}
        both_ends = {
            (link.from_rank, link.to_rank, channel) for link in links for channel in link.channels
        }
        out.append(
            TransportRow(
                communicator=group.id,
                transport=transport,
                family=links[0].family,
                pairs=len({frozenset((a, b)) for a, b, _ in both_ends}),
                channels=len({channel for _, _, channel in both_ends}),
                within_host=within.pop() if len(within) == 1 else None,
            )
        )
    return sorted(out, key=lambda row: -row.pairs)


def _all_choices(logs: list[NcclLog]) -> tuple[Choice, ...]:
    counted: dict[Choice, int] = {}
    for log in logs:
        for choice in log.choices:
            key = replace(choice, count=0)
            counted[key] = counted.get(key, 0) + choice.count
    rows = [replace(choice, count=count) for choice, count in counted.items()]
    return tuple(sorted(rows, key=lambda row: -row.count * row.size_bytes))


def _notes(logs: list[NcclLog], groups: list[Group], calls: int) -> list[str]:
    out = []
    damaged = sum(log.damaged_lines for log in logs)
    if damaged:
        out.append(f"left out: {counted(damaged, 'line')} of NCCL's, cut or mixed with others")
    left_out = sum(log.calls_left_out for log in logs)
    if left_out:
        out.append(f"left out: the last {counted(left_out, 'call')} of a very long log")
    out += [f"{log.path}: {log.ended_early}" for log in logs if log.ended_early]
    guessed = sum(comm.guessed_lines for log in logs for comm in log.communicators)
    if guessed and any(len(log.communicators) > len(log.processes) for log in logs):
        out.append(
            f"no communicator is named in {counted(guessed, 'line')}: the latest one whose "
            "rank fits "
            "was taken"
        )
    for group in groups:
        seen = len({member.comm.rank for member in group.members})
        if group.nranks and seen < group.nranks:
            out.append(f"{group.words()}: logs of only {counted(seen, 'rank')} are here")
    if len({version for log in logs for version in log.versions}) > 1:
        out.append("the processes do not all run the same version of NCCL")
    if not calls:
        out.append(
            "no calls in the logs: NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,COLL,TUNING adds them and "
            "their algorithms"
        )
    return out
