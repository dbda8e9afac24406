"""NCCL communicators put together from the logs of their ranks, and the log lines that
findings show as evidence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.explanation import Place
from stepscope.records.nccl import SOCKET, Communicator, NcclLink, NcclLog, NcclProcess
from stepscope.text.words import counted, number_ranges

if TYPE_CHECKING:
    Node = tuple[str, str]


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
