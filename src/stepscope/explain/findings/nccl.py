"""Findings about how the ranks are connected, from NCCL's own logs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import rule
from stepscope.records.explanation import Finding, Place, Remedy, Severity
from stepscope.records.nccl import (
    SOCKET,
    Communicator,
    NcclLink,
    NcclLog,
    NcclProcess,
    NcclWarning,
)
from stepscope.text.words import counted, number_ranges

# Communicators put together from the logs of their ranks, and lines that findings show.

Node = tuple[str, str]  # host, and NCCL's id of it


class Member(NamedTuple):
    """One rank's view of a communicator."""

    log: NcclLog
    comm: Communicator
    process: NcclProcess

    def at(self, line: int) -> str:
        """file:line, for a sentence."""
        return f"{Path(self.log.path).name}:{line}"

    def place(self, line: int) -> Place:
        return Place(file=self.log.path, line=line)

    @property
    def node(self) -> Node:
        """The machine, as NCCL knows it."""
        return self.process.host, self.process.settings.get("NCCL_HOSTID", "")


class NcclGroup:
    """One communicator: all its ranks whose logs are given."""

    def __init__(self, name: str, members: list[Member]) -> None:
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
    def _node_by_rank(self) -> dict[int | None, Node]:
        return {member.comm.rank: member.node for member in self.members}

    @cached_property
    def _single_machines(self) -> set[Node]:
        """Names that stand for one machine. Containers often share a host name: NCCL then counts
        fewer ranks on the machine than there are logs with its name."""
        logs = Counter(member.node for member in self.members)
        local_ranks = ((m.node, m.comm.local_ranks) for m in self.members)
        return set(logs) - {node for node, ranks in local_ranks if ranks and logs[node] > ranks}

    def links(self) -> Iterator[tuple[Member, NcclLink]]:
        return ((member, link) for member in self.members for link in member.comm.links)

    def within(self, link: NcclLink) -> bool | None:
        """Whether both ranks are on one machine; None where the logs do not show it."""
        if link.family == "SHM" or self.nodes == 1:
            return True
        one, other = self._node_by_rank.get(link.from_rank), self._node_by_rank.get(link.to_rank)
        if one is None or other is None:
            return None
        if one != other:
            return False
        return True if one in self._single_machines else None

    def describe(self) -> str:
        ranks = "? ranks" if self.nranks is None else counted(self.nranks, "rank")
        return f"communicator {self.id} ({ranks})"


def group_communicators(logs: Iterable[NcclLog]) -> list[NcclGroup]:
    """By the id that all ranks print; without one, by size and order of creation."""
    members: dict[str, list[Member]] = {}
    for log in logs:
        unnamed: Counter[tuple[int, int | None]] = Counter()
        for comm in log.communicators:
            key = comm.id
            if not key:
                unnamed[comm.process, comm.nranks] += 1
                key = f"{comm.nranks or '?'}-ranks-{unnamed[comm.process, comm.nranks]}"
            member = Member(log, comm, log.processes[comm.process])
            members.setdefault(key, []).append(member)
    return [
        NcclGroup(key, sorted(same, key=lambda m: m.comm.rank or 0))
        for key, same in members.items()
    ]


# The lines that NCCL findings show as evidence, each with the log line it comes from.

SHOWN = 4
DIGITS = re.compile(r"0x[0-9a-f]+|\d+")

GroupLink = tuple[NcclGroup, Member, "NcclLink"]


def select_links(groups: list[NcclGroup], is_wanted: Callable[[NcclLink], bool]) -> list[GroupLink]:
    """The links of all groups that `is_wanted` accepts."""
    return [
        (group, member, link)
        for group in groups
        for member, link in group.links()
        if is_wanted(link)
    ]


def describe_links(links: list[GroupLink]) -> list[str]:
    """One line per communicator and transport, with one example from the log."""
    by_transport: dict[tuple[str, str], list[GroupLink]] = {}
    for group, member, link in links:
        by_transport.setdefault((group.id, link.transport), []).append((group, member, link))
    lines = []
    for (_, transport), same in list(by_transport.items())[:SHOWN]:
        group, member, link = same[0]
        pairs = sorted({(link.from_rank, link.to_rank or 0) for _, _, link in same})
        channels = sorted({channel for _, _, link in same for channel in link.channels})
        shown = ", ".join(f"{a} -> {b}" for a, b in pairs[:SHOWN])
        shown += f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
        lines.append(
            f"{group.describe()}: ranks {shown} use {transport} on "
            f"{named_ranges('channel', channels)} ({member.at(link.line)})"
        )
    return [*lines, *count_rest(len(by_transport) - SHOWN, "other connection")]


def quote_facts(logs: Sequence[NcclLog], beginning: str) -> list[str]:
    """NCCL's own sentences that begin so, once per host."""
    quotes: dict[tuple[str, str], str] = {}
    for log in logs:
        for process in log.processes:
            for fact in process.facts:
                if fact.text.startswith(beginning):
                    at = f"{Path(log.path).name}:{fact.line}"
                    key = process.host, DIGITS.sub("#", fact.text)
                    quotes.setdefault(key, f'NCCL on {process.host}: "{fact.text}" ({at})')
    return list(quotes.values())[:SHOWN]


def list_switches(logs: Sequence[NcclLog], names: tuple[str, ...]) -> list[str]:
    """Which of these variables are set so that they switch a connection off, and where."""
    switches = {
        f"{name}={process.settings[name]} is set on {process.host}"
        for log in logs
        for process in log.processes
        for name in names
        if _switches_off(name, process.settings.get(name))
    }
    return sorted(switches)[:SHOWN]


def _switches_off(name: str, value: str | None) -> bool:
    if value is None or (name.endswith("_DISABLE") and value == "0"):
        return False
    return name != "NCCL_NET" or value == SOCKET


def count_pairs(links: list[GroupLink]) -> int:
    """Pairs of ranks, whichever direction their links go."""
    return len({(group.id, frozenset((link.from_rank, link.to_rank))) for group, _, link in links})


def first_places(links: list[GroupLink]) -> tuple[Place, ...]:
    """The first of these links in each log file."""
    first: dict[str, Place] = {}
    for _, member, link in links:
        first.setdefault(member.log.path, member.place(link.line))
    return tuple(list(first.values())[:SHOWN])


def named_ranges(word: str, numbers: list[int]) -> str:
    """channel 3; ranks 0-3, 6."""
    ranges = number_ranges(numbers)
    more = f" and {len(ranges) - 8} more ranges" if len(ranges) > 8 else ""
    return f"{word}{'' if len(set(numbers)) == 1 else 's'} {', '.join(ranges[:8])}{more}"


def count_rest(left: int, words: str) -> list[str]:
    """A last line for what is not shown."""
    return [f"and {counted(left, words)}"] if left > 0 else []


_HIDES_ADAPTERS = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_HCA")
_HIDES_P2P = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")


class NcclEvidence(NamedTuple):
    """What NCCL's logs show."""

    logs: Sequence[NcclLog]
    groups: list[NcclGroup]


@rule("NCCL uses TCP sockets", scope="nccl")
def nccl_socket_fallback(evidence: NcclEvidence) -> Finding | None:
    """Ranks that talk over TCP sockets where a faster connection exists, or may exist. High
    where a faster connection is certain, medium where a variable may hide one."""
    logs, groups = evidence
    sockets = select_links(groups, lambda link: link.family == "NET" and link.network == SOCKET)
    if not sockets:
        return None
    within_machine = [chosen for chosen in sockets if chosen[0].within(chosen[2])]
    # What shows that these machines have something faster than sockets.
    lines = []
    for log in logs:
        for process in log.processes:
            if process.adapters:
                adapters = ", ".join(process.adapters[:SHOWN])
                lines.append(f"{process.host} has {adapters}")
    fast = select_links(groups, lambda link: link.family == "NET" and link.network != SOCKET)
    lines += [f"other links use {name}" for name in sorted({link.network for _, _, link in fast})]
    faster = list(dict.fromkeys(lines))[:SHOWN]
    switches = list_switches(logs, _HIDES_P2P if within_machine else _HIDES_ADAPTERS)
    severity: Severity = "high" if within_machine or faster else "medium" if switches else "low"
    if within_machine:
        summary = "Ranks on one machine talk over TCP sockets instead of P2P or shared memory."
    elif faster:
        summary = "Ranks talk over TCP sockets although their machines have a faster network."
    elif switches:
        summary = (
            "Ranks talk over TCP sockets because environment variables switch faster connections "
            "off."
        )
    else:
        summary = (
            "Ranks talk over TCP sockets because NCCL found no faster network on these machines."
        )
    return nccl_socket_fallback.finding(
        share=0.0,
        severity=severity,
        summary=summary,
        evidence=(
            *describe_links(within_machine or sockets),
            *faster,
            *switches,
            *[*quote_facts(logs, "NET/IB : No device found"), *quote_facts(logs, "Failed to")][
                :SHOWN
            ],
        ),
        where=first_places(within_machine or sockets),
        remedies=_offer_for_sockets(bool(within_machine), bool(switches)),
    )


def _offer_for_sockets(within_machine: bool, switched_off: bool) -> tuple[Remedy, ...]:
    if within_machine:
        return (remedies.ONE_MACHINE.offer(),)
    network = (remedies.FAST_NETWORK.offer(), remedies.FASTER_SOCKETS.offer())
    if not switched_off:
        return network
    unset = remedies.UNSET_NCCL_VARIABLES.offer()
    return (unset, *network)


_Difference = tuple[str, list[Member], bool]  # words, the ranks that differ, whether it slows all


@rule("Ranks are connected differently", scope="nccl")
def nccl_unequal_channels(evidence: NcclEvidence) -> Finding | None:
    """Ranks of one communicator that are connected differently from the others. Different
    channel counts, networks, or connections inside machines."""
    lines: list[str] = []
    where: list[Place] = []
    slows_all = False
    for group in evidence.groups:
        for text, odd_members, slows in [*_compare_counts(group), *_compare_transports(group)]:
            lines.append(f"{group.describe()}: {text}")
            where += [member.place(member.comm.line) for member in odd_members[:1]]
            slows_all |= slows
    if not lines:
        return None
    return nccl_unequal_channels.finding(
        share=0.0,
        severity="medium" if slows_all else "low",
        summary="Ranks of one communicator are connected differently. The slowest connection sets "
        "the pace for all.",
        evidence=(*lines[:SHOWN], *count_rest(len(lines) - SHOWN, "more difference")),
        where=tuple(where[:SHOWN]),
        remedies=(remedies.SAME_ENVIRONMENT.offer(),),
    )


def _compare_counts(group: NcclGroup) -> list[_Difference]:
    """Channel counts that NCCL should have agreed on."""
    differences: list[_Difference] = []
    for words, field in (
        ("channels for collectives", "channels"),
        ("channels for point to point", "p2p_channels"),
        ("NVLS channels", "nvls_channels"),
    ):
        by_count: dict[object, list[Member]] = {}
        for member in group.members:
            count = getattr(member.comm, field)
            if count is not None:
                by_count.setdefault(count, []).append(member)
        differences += _contrast(by_count, words, field == "channels")
    return differences


def _compare_transports(group: NcclGroup) -> list[_Difference]:
    """Networks of the ranks that use one, and the connections inside each machine."""
    networks: dict[object, list[Member]] = {}
    local: dict[Node, set[str]] = {}
    for member in group.members:
        used = {
            f"NET/{link.network} {'with' if link.gdrdma else 'without'} GPU direct RDMA"
            for link in member.comm.links
            if link.family == "NET"
        }
        if used:
            networks.setdefault(" and ".join(sorted(used)), []).append(member)
        inside = {link.family for link in member.comm.links if link.family in ("P2P", "SHM")}
        local.setdefault(member.node, set()).update(inside)
    machines: dict[object, list[Member]] = {}
    for member in group.members:
        if local[member.node]:
            machines.setdefault(" and ".join(sorted(local[member.node])), []).append(member)
    return [*_contrast(networks, "", True), *_contrast(machines, "inside the machine", False)]


def _contrast(by_value: dict[object, list[Member]], words: str, slows: bool) -> list[_Difference]:
    """Nothing where all members have the same value."""
    if len(by_value) < 2:
        return []
    values = sorted(by_value.items(), key=lambda item: -len(item[1]))
    parts = [
        f"{value}{' ' if words else ''}{words if place == 0 else ''}".rstrip()
        + f" on {named_ranges('rank', [m.comm.rank or 0 for m in members])}"
        f" ({members[0].at(members[0].comm.line)})"
        for place, (value, members) in enumerate(values)
    ]
    return [(", ".join(parts[:SHOWN]), values[-1][1], slows)]


@rule("No direct GPU-to-GPU transfers", scope="nccl")
def nccl_no_p2p(evidence: NcclEvidence) -> Finding | None:
    """Ranks on one machine that exchange data through host memory. Medium where somebody
    forbids P2P; NCCL may also have good reasons of its own."""
    logs, groups = evidence
    through_host = select_links(groups, lambda link: link.family == "SHM")
    if not through_host:
        return None
    direct = select_links(groups, lambda link: link.family == "P2P")
    switches = list_switches(logs, ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"))
    quotes = quote_facts(logs, "P2P is disabled")
    pairs = counted(count_pairs([*through_host, *direct]), "pair")
    return nccl_no_p2p.finding(
        share=0.0,
        severity="medium" if switches or quotes else "low",
        summary=f"{count_pairs(through_host)} of {pairs} of ranks on one machine exchange data "
        "through CPU memory instead of directly between GPUs.",
        evidence=(*describe_links(through_host), *switches, *quotes),
        where=first_places(through_host),
        remedies=(
            remedies.P2P.offer(
                "Unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL where they are set"
                if switches
                else "Run `nvidia-smi topo -p2p r`. PCIe access control (ACS), a virtual machine "
                "or a container without all GPUs can block GPU-to-GPU access"
            ),
        ),
    )


@rule("NCCL warnings", scope="nccl")
def nccl_warnings(evidence: NcclEvidence) -> Finding | None:
    """Lines that NCCL logs at WARN. All warnings; those that differ only in numbers are one
    line."""
    logs = evidence.logs
    by_text: dict[str, list[tuple[NcclLog, NcclWarning]]] = {}
    for log in logs:
        for warning in log.warnings:
            by_text.setdefault(DIGITS.sub("#", warning.text), []).append((log, warning))
    if not by_text:
        return None
    kinds = sorted(by_text.values(), key=lambda same: -_count_warnings(same))
    failed = any(not c.complete and c.rank is not None for log in logs for c in log.communicators)
    total = sum(map(_count_warnings, kinds)) + sum(log.warnings_left_out for log in logs)
    return nccl_warnings.finding(
        share=0.0,
        severity="medium" if failed else "low",
        summary=f"NCCL logged {counted(total, 'warning')}"
        + (", and a communicator never finished its initialization." if failed else "."),
        evidence=(
            *(_describe_warnings(same) for same in kinds[:SHOWN]),
            *count_rest(len(kinds) - SHOWN, "other warning"),
        ),
        where=tuple(
            Place(file=log.path, line=warning.line)
            for log, warning in (same[0] for same in kinds[:SHOWN])
        ),
        remedies=(
            remedies.READ_NCCL_WARNINGS.offer(
                f"Read the first warning ({_place_of(*_first_of(logs))}): later ones often follow "
                "from it"
            ),
        ),
    )


def _count_warnings(same: list[tuple[NcclLog, NcclWarning]]) -> int:
    return sum(warning.count for _, warning in same)


def _describe_warnings(same: list[tuple[NcclLog, NcclWarning]]) -> str:
    log, warning = same[0]
    source = f" ({warning.source})" if warning.source else ""
    return f"{_count_warnings(same)} x {warning.text}{source}, first at {_place_of(log, warning)}"


def _first_of(logs: Sequence[NcclLog]) -> tuple[NcclLog, NcclWarning]:
    """Return the first warning of the first log that has one."""
    log = next(log for log in logs if log.warnings)
    return log, min(log.warnings, key=lambda warning: warning.line)


def _place_of(log: NcclLog, warning: NcclWarning) -> str:
    return f"{Path(log.path).name}:{warning.line}"
