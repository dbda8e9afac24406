"""NCCL's own logs: which way the ranks talk, and what is odd about it.

A log knows ways and not times: a finding here has no share of the step. `explain_nccl` is what a
job's explanation holds; nccl_calls.py gives a trace's calls the algorithm that a log names.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.records.explanation import Finding, Place, Remedy
from stepscope.records.nccl import (
    SOCKET,
    Choice,
    CommunicatorRow,
    NcclSummary,
    TransportRow,
)
from stepscope.trace.nccl_log import find_nccl_logs, read_nccl_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from stepscope.records.explanation import Severity
    from stepscope.records.nccl import (
        Communicator,
        Link,
        NcclLog,
        NcclOps,
        NcclProcess,
        NcclWarning,
    )
    from stepscope.trace.files import Progress

    Int64 = NDArray[np.int64]
    _Node = tuple[str, str]  # host name, NCCL_HOSTID

FINDINGS = ("nccl-socket-fallback", "nccl-unequal-channels", "nccl-no-p2p", "nccl-warnings")

_SHOWN = 4
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_HIDES_ADAPTERS = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_HCA")
_HIDES_P2P = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")


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


def judge_nccl(logs: Sequence[NcclLog]) -> tuple[Finding, ...]:
    """What is odd about the ways the ranks talk, the gravest first."""
    groups = _groups(logs)
    found = [
        finding
        for judge in (_socket_fallback, _unequal_channels, _no_p2p)
        if (finding := judge(logs, groups))
    ]
    if warnings := _warnings(logs):
        found.append(warnings)
    order = ("high", "medium", "low", "none")
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


# One communicator over several logs


class _Member(NamedTuple):
    """One rank's side of a communicator."""

    log: NcclLog
    comm: Communicator
    process: NcclProcess

    def at(self, line: int) -> str:
        return f"{Path(self.log.path).name}:{line}"

    def place(self, line: int) -> Place:
        return Place(file=self.log.path, line=line)

    @property
    def node(self) -> _Node:
        return self.process.host, self.process.settings.get("NCCL_HOSTID", "")


class _Group:
    """All ranks of a communicator whose logs are at hand."""

    def __init__(self, name: str, members: list[_Member]) -> None:
        self.id = name
        self.members = members

    @cached_property
    def nranks(self) -> int | None:
        return max((m.comm.nranks for m in self.members if m.comm.nranks), default=None)

    @cached_property
    def nodes(self) -> int | None:
        return max((m.comm.nodes for m in self.members if m.comm.nodes), default=None)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(member.process.host for member in self.members))

    @cached_property
    def _node_of(self) -> dict[int | None, _Node]:
        return {member.comm.rank: member.node for member in self.members}

    @cached_property
    def _believed(self) -> set[_Node]:
        """Containers often share a host name: it does not stand for one machine when NCCL counts
        fewer ranks there than there are logs with that name."""
        logs = Counter(member.node for member in self.members)
        told = ((m.node, m.comm.local_ranks) for m in self.members)
        return set(logs) - {node for node, ranks in told if ranks and logs[node] > ranks}

    def links(self) -> Iterator[tuple[_Member, Link]]:
        return ((member, link) for member in self.members for link in member.comm.links)

    def within(self, link: Link) -> bool | None:
        """Whether both ranks are on one machine; None where the logs do not tell."""
        if link.family == "SHM" or self.nodes == 1:
            return True
        one, other = self._node_of.get(link.from_rank), self._node_of.get(link.to_rank)
        if one is None or other is None:
            return None
        if one != other:
            return False
        return True if one in self._believed else None

    def words(self) -> str:
        size = "?" if self.nranks is None else self.nranks
        return f"communicator {self.id} ({size} ranks)"


def _groups(logs: Iterable[NcclLog]) -> list[_Group]:
    """By the id that all ranks print; where there is none, by size and the order of creation."""
    members: dict[str, list[_Member]] = {}
    for log in logs:
        unnamed: Counter[tuple[int, int | None]] = Counter()
        for comm in log.communicators:
            key = comm.id
            if not key:
                unnamed[comm.process, comm.nranks] += 1
                key = f"{comm.nranks or '?'}-ranks-{unnamed[comm.process, comm.nranks]}"
            member = _Member(log, comm, log.processes[comm.process])
            members.setdefault(key, []).append(member)
    return [
        _Group(key, sorted(found, key=lambda m: m.comm.rank or 0)) for key, found in members.items()
    ]


# Findings


def _socket_fallback(logs: Sequence[NcclLog], groups: list[_Group]) -> Finding | None:
    """Ranks that talk over TCP where something faster is, or may be, there."""
    slow = _chosen_links(groups, lambda link: link.family == "NET" and link.network == SOCKET)
    if not slow:
        return None
    local = [each for each in slow if each[0].within(each[2])]
    evidence = _better_network(logs, groups)
    switches = _switches(logs, _HIDES_P2P if local else _HIDES_ADAPTERS)
    severity: Severity = "high" if local or evidence else "medium" if switches else "low"
    if local:
        summary = "ranks of one machine talk over TCP sockets instead of P2P or shared memory."
    elif evidence:
        summary = "ranks talk over TCP sockets although these machines have a faster network."
    elif switches:
        summary = "ranks talk over TCP sockets, and the environment switches faster ways off."
    else:
        summary = "ranks talk over TCP sockets; NCCL saw no faster network on these machines."
    return Finding(
        id="nccl-socket-fallback",
        title="NCCL over sockets",
        share=0.0,
        severity=severity,
        summary=summary,
        evidence=(*_link_lines(local or slow), *evidence, *switches, *_reasons(logs)),
        where=_places(local or slow),
        remedies=_local_remedies() if local else _network_remedies(bool(switches)),
    )


def _no_p2p(logs: Sequence[NcclLog], groups: list[_Group]) -> Finding | None:
    """Ranks of one machine that pass everything through host memory."""
    shared = _chosen_links(groups, lambda link: link.family == "SHM")
    if not shared:
        return None
    direct = _chosen_links(groups, lambda link: link.family == "P2P")
    switches = _switches(logs, ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"))
    said = _facts(logs, "P2P is disabled")
    return Finding(
        id="nccl-no-p2p",
        title="NCCL without P2P",
        share=0.0,
        severity="medium" if switches or said else "low",
        summary=f"{_pairs(shared)} of {_pairs([*shared, *direct])} pairs of ranks on one machine "
        "talk through host memory instead of GPU to GPU.",
        evidence=(*_link_lines(shared), *switches, *said),
        where=_places(shared),
        remedies=(
            Remedy(id="p2p", summary="unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL where they are set")
            if switches
            else Remedy(
                id="p2p",
                summary="see `nvidia-smi topo -p2p r`: PCIe access control (ACS), a virtual "
                "machine or a container without all GPUs can forbid GPU to GPU access",
            ),
        ),
    )


def _unequal_channels(logs: Sequence[NcclLog], groups: list[_Group]) -> Finding | None:
    """Ranks of one communicator that are connected differently from the others."""
    del logs
    lines: list[str] = []
    where: list[Place] = []
    grave = False
    for group in groups:
        differences = [*_different_counts(group), *_different_ways(group)]
        for text, odd, serious in differences:
            lines.append(f"{group.words()}: {text}")
            where += [member.place(member.comm.line) for member in odd[:1]]
            grave |= serious
    if not lines:
        return None
    return Finding(
        id="nccl-unequal-channels",
        title="Unequal NCCL channels",
        share=0.0,
        severity="medium" if grave else "low",
        summary="ranks of one communicator are connected differently: the slowest way sets the "
        "pace of all.",
        evidence=(*lines[:_SHOWN], *_more(len(lines) - _SHOWN, "difference")),
        where=tuple(where[:_SHOWN]),
        remedies=(
            Remedy(
                id="same-environment",
                summary="start every rank with the same NCCL_* variables, drivers and devices, and "
                "compare `nvidia-smi topo -m` of the machines named here",
            ),
        ),
    )


def _warnings(logs: Sequence[NcclLog]) -> Finding | None:
    """NCCL's lines at WARN, alike ones together."""
    alike: dict[str, list[tuple[NcclLog, NcclWarning]]] = {}
    for log in logs:
        for warning in log.warnings:
            alike.setdefault(_DIGITS.sub("#", warning.text), []).append((log, warning))
    if not alike:
        return None
    kinds = sorted(alike.values(), key=lambda found: -sum(each.count for _, each in found))
    lines = []
    for found in kinds[:_SHOWN]:
        log, warning = found[0]
        times = sum(each.count for _, each in found)
        source = f" ({warning.source})" if warning.source else ""
        at = f"{Path(log.path).name}:{warning.line}"
        lines.append(f"{times} x {warning.text}{source}, first at {at}")
    failed = any(not c.complete and c.rank is not None for log in logs for c in log.communicators)
    total = sum(each.count for found in kinds for _, each in found)
    total += sum(log.warnings_left_out for log in logs)
    return Finding(
        id="nccl-warnings",
        title="NCCL warnings",
        share=0.0,
        severity="medium" if failed else "low",
        summary=f"NCCL warned {total} {'time' if total == 1 else 'times'}"
        + (" and a communicator never came up." if failed else "."),
        evidence=(*lines, *_more(len(kinds) - _SHOWN, "other warning")),
        where=tuple(Place(file=f[0][0].path, line=f[0][1].line) for f in kinds[:_SHOWN]),
        remedies=(
            Remedy(id="read", summary="read the first one: the later ones often follow from it"),
        ),
    )


_Chosen = tuple[_Group, _Member, "Link"]


def _chosen_links(groups: list[_Group], wanted: Callable[[Link], bool]) -> list[_Chosen]:
    return [
        (group, member, link) for group in groups for member, link in group.links() if wanted(link)
    ]


def _link_lines(chosen: list[_Chosen]) -> list[str]:
    """A line a communicator and transport, with one example of where it stands."""
    by_way: dict[tuple[str, str], list[_Chosen]] = {}
    for each in chosen:
        by_way.setdefault((each[0].id, each[2].transport), []).append(each)
    lines = []
    for (_, transport), found in list(by_way.items())[:_SHOWN]:
        group, member, link = found[0]
        pairs = sorted({(each.from_rank, each.to_rank or 0) for _, _, each in found})
        channels = sorted({channel for _, _, each in found for channel in each.channels})
        shown = ", ".join(f"{a} -> {b}" for a, b in pairs[:_SHOWN])
        shown += f" and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
        lines.append(
            f"{group.words()}: ranks {shown} on {_plural('channel', channels)} via {transport} "
            f"({member.at(link.line)})"
        )
    return [*lines, *_more(len(by_way) - _SHOWN, "other way")]


def _better_network(logs: Sequence[NcclLog], groups: list[_Group]) -> list[str]:
    """What shows that these machines have something faster than sockets."""
    lines = []
    for log in logs:
        for process in log.processes:
            if process.adapters:
                listed = ", ".join(process.adapters[:_SHOWN])
                lines.append(f"{process.host} has {listed}")
    fast = _chosen_links(groups, lambda link: link.family == "NET" and link.network != SOCKET)
    lines += [f"other links use {name}" for name in sorted({link.network for _, _, link in fast})]
    return list(dict.fromkeys(lines))[:_SHOWN]


def _switches(logs: Sequence[NcclLog], names: tuple[str, ...]) -> list[str]:
    found = {
        f"{name}={process.settings[name]} is set in the environment of {process.host}"
        for log in logs
        for process in log.processes
        for name in names
        if _switches_off(name, process.settings.get(name))
    }
    return sorted(found)[:_SHOWN]


def _switches_off(name: str, value: str | None) -> bool:
    if value is None or (name.endswith("_DISABLE") and value == "0"):
        return False
    return name != "NCCL_NET" or value == SOCKET


def _reasons(logs: Sequence[NcclLog]) -> list[str]:
    return [
        *_facts(logs, "NET/IB : No device found"),
        *_facts(logs, "Failed to"),
    ][:_SHOWN]


def _facts(logs: Sequence[NcclLog], beginning: str) -> list[str]:
    """What NCCL said, once a host."""
    said: dict[tuple[str, str], str] = {}
    for log in logs:
        for process in log.processes:
            for fact in process.facts:
                if fact.text.startswith(beginning):
                    at = f"{Path(log.path).name}:{fact.line}"
                    key = process.host, _DIGITS.sub("#", fact.text)
                    said.setdefault(key, f"{process.host} said: {fact.text} ({at})")
    return list(said.values())[:_SHOWN]


def _network_remedies(switched_off: bool) -> tuple[Remedy, ...]:
    unset = Remedy(
        id="unset", summary="unset NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA where they are set"
    )
    return (
        *((unset,) if switched_off else ()),
        Remedy(
            id="fast-network",
            summary="give the job the fast network: /dev/infiniband, libibverbs and an unlimited "
            "`ulimit -l` inside the container, or the cloud's own NCCL network plugin",
        ),
        Remedy(
            id="faster-sockets",
            summary="where sockets are all there is: NCCL_SOCKET_IFNAME for the fastest interface, "
            "NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD for more of it",
        ),
    )


def _local_remedies() -> tuple[Remedy, ...]:
    return (
        Remedy(
            id="one-machine",
            summary="let the ranks of a machine see each other: unset NCCL_P2P_DISABLE and "
            "NCCL_SHM_DISABLE, run containers with --ipc=host and all GPUs, or in one container",
        ),
    )


_Difference = tuple[str, list[_Member], bool]  # words, the odd ones, whether it is grave


def _different_counts(group: _Group) -> list[_Difference]:
    """Channel counts that NCCL should have agreed on."""
    out: list[_Difference] = []
    for words, field in (
        ("channels for collectives", "channels"),
        ("channels for point to point", "p2p_channels"),
        ("NVLS channels", "nvls_channels"),
    ):
        by_count: dict[object, list[_Member]] = {}
        for member in group.members:
            count = getattr(member.comm, field)
            if count is not None:
                by_count.setdefault(count, []).append(member)
        out += _contrast(by_count, words, field == "channels")
    return out


def _different_ways(group: _Group) -> list[_Difference]:
    """Networks by rank (those that use one), and ways within a machine by machine."""
    networks: dict[object, list[_Member]] = {}
    local: dict[_Node, set[str]] = {}
    for member in group.members:
        used = {_network_words(link) for link in member.comm.links if link.family == "NET"}
        if used:
            networks.setdefault(" and ".join(sorted(used)), []).append(member)
        inside = {link.family for link in member.comm.links if link.family in ("P2P", "SHM")}
        local.setdefault(member.node, set()).update(inside)
    machines: dict[object, list[_Member]] = {}
    for member in group.members:
        if local[member.node]:
            machines.setdefault(" and ".join(sorted(local[member.node])), []).append(member)
    return [*_contrast(networks, "", True), *_contrast(machines, "inside the machine", False)]


def _network_words(link: Link) -> str:
    return f"NET/{link.network} {'with' if link.gdrdma else 'without'} GPU direct RDMA"


def _contrast(by_value: dict[object, list[_Member]], words: str, grave: bool) -> list[_Difference]:
    if len(by_value) < 2:
        return []
    values = sorted(by_value.items(), key=lambda item: -len(item[1]))
    parts = [
        f"{value}{' ' if words else ''}{words if place == 0 else ''}".rstrip()
        + f" on {_plural('rank', [m.comm.rank or 0 for m in members])}"
        f" ({members[0].at(members[0].comm.line)})"
        for place, (value, members) in enumerate(values)
    ]
    return [(", ".join(parts[:_SHOWN]), values[-1][1], grave)]


def _pairs(chosen: list[_Chosen]) -> int:
    ends = ({link.from_rank, link.to_rank} for _, _, link in chosen)
    return len({(g.id, frozenset(end)) for (g, _, _), end in zip(chosen, ends, strict=True)})


def _places(chosen: list[_Chosen]) -> tuple[Place, ...]:
    """One a file."""
    first: dict[str, Place] = {}
    for _, member, link in chosen:
        first.setdefault(member.log.path, member.place(link.line))
    return tuple(list(first.values())[:_SHOWN])


def _plural(word: str, numbers: list[int]) -> str:
    """channel 3; ranks 0-3, 6."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:8])
    shown += f" and {len(runs) - 8} more ranges" if len(runs) > 8 else ""
    return f"{word}{'' if len(set(numbers)) == 1 else 's'} {shown}"


def _more(left: int, words: str) -> list[str]:
    return [f"{left} {words}{'' if left == 1 else 's'} more"] if left > 0 else []


# The summary


def _no_ops(ops: NcclOps) -> NcclOps:
    empty = {
        name: getattr(ops, name)[:0].copy()
        for name in ops.__struct_fields__
        if isinstance(getattr(ops, name), np.ndarray)
    }
    return replace(ops, **empty)


def _summarise(logs: list[NcclLog], calls: list[Counter[int]], notes: list[str]) -> NcclSummary:
    groups = _groups(logs)
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


def _row(group: _Group, calls: dict[int, int]) -> CommunicatorRow:
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


def _transports(group: _Group) -> list[TransportRow]:
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


def _notes(logs: list[NcclLog], groups: list[_Group], calls: int) -> list[str]:
    out = []
    damaged = sum(log.damaged_lines for log in logs)
    if damaged:
        out.append(f"{damaged} lines of NCCL's were cut or mixed with others and are left out")
    out += [f"{log.path}: {log.ended_early}" for log in logs if log.ended_early]
    guessed = sum(comm.guessed_lines for log in logs for comm in log.communicators)
    if guessed and any(len(log.communicators) > len(log.processes) for log in logs):
        out.append(
            f"{guessed} lines do not name their communicator: they were given to the one whose "
            "rank fits, the latest first"
        )
    for group in groups:
        seen = len({member.comm.rank for member in group.members})
        if group.nranks and seen < group.nranks:
            out.append(f"{group.words()}: logs of {seen} of its ranks are here")
    if len({version for log in logs for version in log.versions}) > 1:
        out.append("the processes do not all run the same version of NCCL")
    if not calls:
        out.append(
            "no calls in the logs: NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,COLL,TUNING adds them and "
            "their algorithms"
        )
    return out
