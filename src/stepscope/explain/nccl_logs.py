"""The summary of a job's NCCL logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.explain.findings import apply_rules, sort_findings
from stepscope.explain.findings.nccl import NcclEvidence, NcclGroup, group_communicators
from stepscope.records.explanation import Finding, NcclSummary
from stepscope.records.nccl import (
    Choice,
    CommunicatorRow,
    NcclLink,
    NcclLog,
    TransportRow,
)
from stepscope.text.words import counted
from stepscope.trace.nccl_log.lines import find_nccl_logs
from stepscope.trace.nccl_log.read import read_nccl_log

if TYPE_CHECKING:
    from stepscope.trace.files import Progress


def explain_nccl(*paths: str | Path, progress: Progress | None = None) -> NcclSummary | None:
    """All NCCL logs in these files, folders or run folders; None where there is no log.

    A file given by name must be readable; an unreadable one in a folder is left out with a note.
    """
    logs: list[NcclLog] = []
    notes = []
    for path in paths:
        for file in find_nccl_logs(path):
            try:
                logs.append(read_nccl_log(file, progress))
            except UnreadableInputError as error:
                if file == Path(path):
                    raise
                notes.append(f"left out: {error}")
    return _summarise(logs, notes) if logs else None


def _summarise(logs: list[NcclLog], notes: list[str]) -> NcclSummary:
    groups = group_communicators(logs)
    warnings = []
    settings: dict[str, dict[str, None]] = {}
    first = 0
    for log in logs:
        warnings += [replace(line, process=line.process + first) for line in log.warnings]
        first += len(log.processes)
        for process in log.processes:
            for name, value in process.settings.items():
                settings.setdefault(name, {})[value] = None
    calls = sum(comm.calls for log in logs for comm in log.communicators)
    return NcclSummary(
        files=tuple(log.path for log in logs),
        versions=tuple(dict.fromkeys(version for log in logs for version in log.versions)),
        processes=tuple(process for log in logs for process in log.processes),
        communicators=tuple(_describe_communicator(group) for group in groups),
        transports=tuple(
            row
            for group in groups
            for row in sorted(_list_transports(group), key=lambda row: -row.pairs)
        ),
        choices=_merge_choices(logs),
        settings={name: tuple(values) for name, values in sorted(settings.items())},
        warnings=tuple(warnings),
        findings=find_in_nccl(logs),
        calls=calls,
        notes=(*notes, *_list_notes(logs, groups, calls)),
    )


def _describe_communicator(group: NcclGroup) -> CommunicatorRow:
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
        calls=sum(member.comm.calls for member in group.members),
        complete=all(member.comm.complete for member in group.members),
    )


def _list_transports(group: NcclGroup) -> Iterator[TransportRow]:
    by_transport: dict[str, list[NcclLink]] = {}
    for _, link in group.links():
        by_transport.setdefault(link.transport, []).append(link)
    for transport, links in by_transport.items():
        within = {group.within(link) for link in links}
        both_ends = {
            (link.from_rank, link.to_rank, channel) for link in links for channel in link.channels
        }
        yield TransportRow(
            communicator=group.id,
            transport=transport,
            family=links[0].family,
            pairs=len({frozenset((a, b)) for a, b, _ in both_ends}),
            channels=len({channel for _, _, channel in both_ends}),
            within_host=within.pop() if len(within) == 1 else None,
        )


def _merge_choices(logs: list[NcclLog]) -> tuple[Choice, ...]:
    counts: dict[Choice, int] = {}
    for log in logs:
        for choice in log.choices:
            key = replace(choice, count=0)
            counts[key] = counts.get(key, 0) + choice.count
    rows = [replace(choice, count=count) for choice, count in counts.items()]
    return tuple(sorted(rows, key=lambda row: -row.count * row.size_bytes))


def _list_notes(logs: list[NcclLog], groups: list[NcclGroup], calls: int) -> Iterator[str]:
    damaged = sum(log.damaged_lines for log in logs)
    if damaged:
        lines = counted(damaged, "line")
        yield f"left out: {lines} of NCCL's that are cut off or mixed with others"
    yield from (f"{log.path}: {log.ended_early}" for log in logs if log.ended_early)
    guessed = sum(comm.guessed_lines for log in logs for comm in log.communicators)
    if guessed and any(len(log.communicators) > len(log.processes) for log in logs):
        lines = counted(guessed, "line names", "lines name")
        yield f"{lines} no communicator: assigned to the latest one that has the rank"
    for group in groups:
        ranks = len({member.comm.rank for member in group.members})
        if group.nranks and ranks < group.nranks:
            yield f"{group.describe()}: only {counted(ranks, 'rank has', 'ranks have')} logs"
    if len({version for log in logs for version in log.versions}) > 1:
        yield "the processes run different versions of NCCL"
    if not calls:
        yield (
            "the logs hold no calls: set NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,COLL,TUNING to add them "
            "and their algorithms"
        )


def find_in_nccl(logs: Sequence[NcclLog]) -> tuple[Finding, ...]:
    """Return findings about how the ranks are connected."""
    return sort_findings(apply_rules("nccl", NcclEvidence(logs, group_communicators(logs))))
