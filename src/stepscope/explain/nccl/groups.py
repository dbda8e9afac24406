"""One communicator, put together from the logs of its ranks."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.explanation import Place
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stepscope.records.nccl import Communicator, NcclLink, NcclLog, NcclProcess

    Node = tuple[str, str]  # host name, NCCL_HOSTID


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
