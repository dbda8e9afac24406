"""Hosts whose ranks are all late together; what is left is the lateness of single ranks.

The means of hosts are tested against each other just as ranks are. So a host with half of all ranks
is found, although its ranks do not stand apart from one another. A host is late only if each of its
ranks is, by about as much: a single late rank moves the mean of its host too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.whole_run.lateness import LEAST_LATE, find_late, gain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.hosts import HostColumns
    from stepscope.explain.whole_run.lateness import Flags, Floats, Lateness, LateRank

# Of the step: ranks that are late only because they wait for cores, and by less, wait by chance.
# Such waiting lasts for minutes, and blocks of steps do not show how much of it is chance.
_LEAST_FOR_CORES = 0.15
_ALIKE = 0.5  # of the latest rank's lateness: less, and the ranks of a host are not late alike


class LateHost(msgspec.Struct, frozen=True, kw_only=True):
    """`late.place` is the host's place among the hosts."""

    host: HostColumns
    late: LateRank


class StepMatrices(msgspec.Struct, frozen=True, kw_only=True):
    """(steps, ranks): arrivals, waiting for cores, phases in which no rank waits for another."""

    arrival_ns: Floats
    cpu_wait_ns: Floats | None
    own_ns: Floats | None

    def by_host(self, hosts: Sequence[HostColumns]) -> StepMatrices:
        """The means of hosts, (steps, hosts)."""

        def means(matrix: Floats | None) -> Floats | None:
            if matrix is None:
                return None
            return np.stack([matrix[:, list(host.columns)].mean(axis=1) for host in hosts], axis=1)

        arrival = means(self.arrival_ns)
        assert arrival is not None
        cpu_wait, own = means(self.cpu_wait_ns), means(self.own_ns)
        return StepMatrices(arrival_ns=arrival, cpu_wait_ns=cpu_wait, own_ns=own)

    def without(self, hosts: Sequence[LateHost]) -> StepMatrices:
        """As if these hosts were like the others."""
        arrival = self.arrival_ns.copy()
        for late in hosts:
            if not late.late.constant:
                by = np.where(late.late.late, late.late.excess_ns, 0.0)
                arrival[:, list(late.host.columns)] -= by[:, None]
        return StepMatrices(
            arrival_ns=_levelled(arrival, hosts),
            cpu_wait_ns=None if self.cpu_wait_ns is None else _levelled(self.cpu_wait_ns, hosts),
            own_ns=None if self.own_ns is None else _levelled(self.own_ns, hosts),
        )

    def find_late(self, step_ns: float) -> Lateness | None:
        return find_late(self.arrival_ns, step_ns, self.cpu_wait_ns, self.own_ns)


def find_late_hosts(
    matrices: StepMatrices, hosts: Sequence[HostColumns], step_ns: float
) -> tuple[LateHost, ...]:
    """The costliest first. Hosts with one rank are compared with, but never found: see its rank."""
    if len(hosts) < 2 or all(len(host.columns) < 2 for host in hosts):
        return ()
    means = matrices.by_host(hosts)
    lateness = means.find_late(step_ns)
    late_hosts = []
    for late in lateness.late if lateness is not None else ():
        host = hosts[late.place]
        if len(host.columns) > 1 and _all_late(matrices, host, late, step_ns):
            late_hosts.append(LateHost(host=host, late=_recost(matrices.arrival_ns, host, late)))
    return tuple(sorted(late_hosts, key=lambda late: -late.late.cost_ns))


def merge_late_ranks(
    matrices: StepMatrices, hosts: Sequence[HostColumns], lateness: Lateness, step_ns: float
) -> tuple[tuple[LateHost, ...], Lateness]:
    """Where every rank of a host is found late by itself, and by about as much, it is the host."""
    always = {late.place: late for late in lateness.late if late.constant}
    merged = []
    for place, host in enumerate(hosts):
        if len(host.columns) < 2 or not always.keys() >= {*host.columns}:
            continue
        its = [always[column] for column in host.columns]
        if _is_alike(np.array([late.excess_ns for late in its]), step_ns):
            merged.append(LateHost(host=host, late=_mean_of(matrices.arrival_ns, host, place, its)))
    gone = {column for one in merged for column in one.host.columns}
    left = tuple(late for late in lateness.late if late.place not in gone)
    return tuple(merged), replace(lateness, late=left)


def _mean_of(
    arrival_ns: Floats, host: HostColumns, place: int, ranks: Sequence[LateRank]
) -> LateRank:
    late = replace(
        ranks[0],
        place=place,
        excess_ns=float(np.mean([rank.excess_ns for rank in ranks])),
        arrived_ns=float(np.mean([rank.arrived_ns for rank in ranks])),
        for_cores_ns=float(np.mean([rank.for_cores_ns for rank in ranks])),
        late=np.logical_and.reduce([rank.late for rank in ranks]),
        p_value=max(rank.p_value for rank in ranks),
    )
    return _recost(arrival_ns, host, late)


def _all_late(matrices: StepMatrices, host: HostColumns, late: LateRank, step_ns: float) -> bool:
    """Whether each rank of the host is late, by about as much. Ranks that share cores hide it, so
    one of the views suffices: arrivals as they were, or without waiting for cores."""
    arrival, cpu_wait = matrices.arrival_ns, matrices.cpu_wait_ns
    if not late.constant:
        since = _after_other_hosts(arrival, host)
        longer = np.median(since[late.late], axis=0) - np.median(since, axis=0)
        return bool(longer.min() >= _ALIKE * late.excess_ns)
    as_it_was = _middle_mean(_after_other_hosts(arrival, host))
    if cpu_wait is None:
        return _is_alike(as_it_was, step_ns)
    with_cores = _middle_mean(_after_other_hosts(arrival - cpu_wait, host))
    if with_cores.mean() < LEAST_LATE * step_ns:
        return _is_alike(as_it_was, step_ns) and as_it_was.mean() >= _LEAST_FOR_CORES * step_ns
    return _is_alike(as_it_was, step_ns) or _is_alike(with_cores, step_ns)


def _is_alike(excess_ns: Floats, step_ns: float) -> bool:
    return bool(excess_ns.min() >= max(LEAST_LATE * step_ns, _ALIKE * float(excess_ns.max())))


def _after_other_hosts(arrival_ns: Floats, host: HostColumns) -> Floats:
    """Each rank of the host against the mean of the ranks of all other hosts."""
    mine = list(host.columns)
    others = np.delete(arrival_ns, mine, axis=1).mean(axis=1, keepdims=True)
    since: Floats = arrival_ns[:, mine] - others
    return since


def _middle_mean(since_ns: Floats) -> Floats:
    """Of each rank, without its latest and its earliest tenth of steps."""
    ordered = np.sort(since_ns, axis=0)
    cut = len(ordered) // 10
    middle: Floats = ordered[cut : len(ordered) - cut].mean(axis=0)
    return middle


def _recost(arrival_ns: Floats, host: HostColumns, late: LateRank) -> LateRank:
    """What the mean step would gain if all ranks of the host came earlier."""
    mine = list(host.columns)
    without = arrival_ns.copy()
    rows: Flags = np.ones(len(without), np.bool_) if late.constant else late.late
    without[:, mine] -= np.where(rows, late.excess_ns, 0.0)[:, None]
    return replace(late, cost_ns=gain(arrival_ns, without))


def _levelled(matrix: Floats, late: Sequence[LateHost]) -> Floats:
    """The ranks of these hosts brought to the level of all others: by one amount for each host."""
    late_columns = [column for one in late for column in one.host.columns]
    middle = np.median(matrix, axis=0)
    usual = np.delete(middle, late_columns)
    levelled = matrix.copy()
    for one in late if len(usual) else ():
        mine = list(one.host.columns)
        levelled[:, mine] -= middle[mine].mean() - usual.mean()
    return levelled
