"""Collectives joined across ranks: when each rank arrived, how long it waited, the transfer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.job.hosts import hosts_of, reach_of
from stepscope.explain.job.stragglers import LinkEvidence
from stepscope.records.hardware import Profile
from stepscope.records.job import KINDS, Clock, JobCollective, LastArriver, RankPart, Reach
from stepscope.records.normal import median
from stepscope.step.arrays import Bools, Indices, Int64s
from stepscope.step.call_tree import group
from stepscope.step.collectives import bus_factor

if TYPE_CHECKING:
    from stepscope.trace.matched_collectives import MatchedCollectives


_NEVER = -(2**62)


class AlignedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block on the job's clock. Matrices are (collectives, members); `here` marks known cells."""

    block: MatchedCollectives
    here: Bools
    arrival_ns: Int64s
    start_ns: Int64s
    end_ns: Int64s
    dur_ns: Int64s
    exposed_ns: Int64s
    aligned: bool
    complete: Bools  # (collectives,): all of the group is here
    error_ns: Int64s  # (members,)
    last: Indices  # (collectives,): the member that arrived last
    last_arrival_ns: Int64s

    @property
    def wait_ns(self) -> Int64s:
        return np.where(self.here, self.last_arrival_ns[:, None] - self.arrival_ns, 0)

    @property
    def wait_error_ns(self) -> Int64s:
        """How far off each wait may be: by the rank's own error and the largest of another rank,
        since that one may have come last."""
        errors = np.where(self.here, self.error_ns[None, :], 0)
        second, largest = np.sort(np.pad(errors, ((0, 0), (1, 0))), axis=1)[:, -2:].T
        has_largest = np.arange(errors.shape[1])[None, :] == errors.argmax(axis=1)[:, None]
        others = np.where(has_largest, second[:, None], largest[:, None])
        return np.where(self.here, errors + others, 0)

    @property
    def transfer_ns(self) -> Int64s:
        """From the last arrival to the end, by the clock of the rank that arrived last. An upper
        bound where part of the group is not here."""
        return self._least(self.end_ns - self.arrival_ns)

    @property
    def moving_ns(self) -> Int64s:
        """The same without the time that the call was queued behind other calls."""
        return self._least(self.dur_ns)

    def _least(self, spent: Int64s) -> Int64s:
        least: Int64s = np.where(self.here, spent, -_NEVER).min(axis=1)
        return least


def align_block(parts: Sequence[RankPart], block: MatchedCollectives, clock: Clock) -> AlignedBlock:
    """Bring a block's times to the job's clock, if there is one."""
    ranks = [parts[member].rank for member in block.members.tolist()]
    aligned = clock.aligned and all(rank in clock.offset_ns for rank in ranks)

    def on_clock(name: str) -> Int64s:
        values = block.column(parts, name)
        if aligned:
            for place, rank in enumerate(ranks):
                values[:, place] = clock.shift_ns(rank, values[:, place])
        return values

    here = block.row >= 0
    arrival = on_clock("arrival_ns")
    known = np.where(here, arrival, _NEVER)
    size = block.group.size or (len(block.group.ranks) or None)
    return AlignedBlock(
        block=block,
        here=here,
        arrival_ns=arrival,
        start_ns=on_clock("start_ns"),
        end_ns=on_clock("end_ns"),
        dur_ns=block.column(parts, "end_ns") - block.column(parts, "start_ns"),
        exposed_ns=block.column(parts, "exposed_ns"),
        aligned=aligned,
        complete=here.sum(axis=1) == (size or -1),
        error_ns=np.array([clock.error_ns.get(rank, 0) for rank in ranks], np.int64),
        last=known.argmax(axis=1),
        last_arrival_ns=known.max(axis=1),
    )


def list_joined(
    parts: Sequence[RankPart], blocks: Sequence[AlignedBlock], profiles: Sequence[Profile] = ()
) -> tuple[JobCollective, ...]:
    """One row for each kind, group and size; the longest total first."""
    hosts = hosts_of(parts)
    rows = [
        msgspec.structs.replace(row, reach=reach_of_block(parts, block, hosts))
        for block in blocks
        for row in _join_calls(parts, block, profiles)
    ]
    return tuple(sorted(rows, key=lambda row: -((row.transfer_ns or 0) + (row.wait_ns or 0))))


def reach_of_block(
    parts: Sequence[RankPart], aligned: AlignedBlock, hosts: Mapping[int, str]
) -> Reach | None:
    """Whether the group is inside one host."""
    group = aligned.block.group
    ranks = group.ranks or [parts[member].rank for member in aligned.block.members.tolist()]
    return reach_of(ranks, group.size or len(group.ranks) or None, hosts)


def exposed_between_hosts(parts: Sequence[RankPart], blocks: Sequence[AlignedBlock]) -> list[float]:
    """For each recorded step, what ranks wait on average for transfers between hosts, once all
    ranks have arrived and as far as nothing hides it."""
    hosts = hosts_of(parts)
    exposed: dict[int, float] = {}
    for block in blocks:
        if reach_of_block(parts, block, hosts) != "between hosts":
            continue
        rows = np.flatnonzero(block.block.step >= 0)
        mean = block.exposed_ns[rows].sum(axis=1) / np.maximum(block.here[rows].sum(axis=1), 1)
        transfer = np.minimum(mean, block.moving_ns[rows])
        for step, ns in zip(block.block.step[rows].tolist(), transfer.tolist(), strict=True):
            exposed[step] = exposed.get(step, 0.0) + ns
    return list(exposed.values())


def _kinds_and_sizes(block: MatchedCollectives) -> list[tuple[int, int, Indices]]:
    first, inverse, _ = group(block.kind, block.size_bytes)
    return [
        (int(block.kind[row]), int(block.size_bytes[row]), np.flatnonzero(inverse == code))
        for code, row in enumerate(first.tolist())
    ]


def _join_calls(
    parts: Sequence[RankPart], aligned: AlignedBlock, profiles: Sequence[Profile]
) -> Iterator[JobCollective]:
    block, ranks = aligned.block, aligned.block.group.size
    wait, transfer, members = aligned.wait_ns, aligned.transfer_ns, aligned.here.sum(axis=1)
    mean_error = aligned.wait_error_ns.sum(axis=1) / members
    for code, size, rows in _kinds_and_sizes(block):
        kind = KINDS[code]
        moving = int(aligned.moving_ns[rows].sum())
        algbw = size * len(rows) / moving if size >= 0 and moving else None
        resolved = aligned.aligned and block.synchronising[rows].all()
        last_member = int(block.members[np.bincount(aligned.last[rows]).argmax()])
        yield JobCollective(
            kind=kind,
            group=block.group.name,
            description=block.group.description,
            group_size=ranks,
            ranks_seen=int(members[rows].max()),
            size_bytes=size if size >= 0 else None,
            count=len(rows),
            wait_ns=int((wait[rows].sum(axis=1) / members[rows]).sum()) if resolved else None,
            wait_error_ns=int(np.ceil(mean_error[rows].sum())) if resolved else None,
            transfer_ns=int(transfer[rows].sum()),
            exposed_ns=int((aligned.exposed_ns[rows].sum(axis=1) / members[rows]).sum()),
            algbw_gb_s=algbw,
            busbw_gb_s=algbw * bus_factor(kind, ranks) if algbw and ranks else None,
            expected_ns=_expected(profiles, kind, ranks, size)[0],
            slowest_rank=parts[last_member].rank if resolved else None,
        )


def _expected(
    profiles: Sequence[Profile], kind: str, ranks: int | None, size: int
) -> tuple[float | None, float]:
    """A transfer's time by the first profile that knows such a group, and its relative error."""
    for profile in profiles:
        fit = profile.fit_for(kind, ranks) if ranks and size >= 0 else None
        if fit is not None:
            return fit.expected_ns(size), max(fit.noise, fit.held_out)
    return None, 0.0


def last_arrivers(
    parts: Sequence[RankPart], blocks: Sequence[AlignedBlock], steps: int
) -> tuple[LastArriver, ...]:
    """How often each rank arrived last, where the clocks are precise enough to say."""
    times, waits, errors = (np.zeros(len(parts), np.int64) for _ in range(3))
    leads: list[list[int]] = [[] for _ in parts]
    compared = 0
    for block in blocks:
        if not block.aligned:
            continue
        rows = np.flatnonzero(block.block.synchronising & (block.here.sum(axis=1) > 1))
        np.add.at(waits, block.block.members, block.wait_ns[rows].sum(axis=0))
        np.add.at(errors, block.block.members, block.wait_error_ns[rows].sum(axis=0))
        arrival = np.where(block.here[rows], block.arrival_ns[rows], _NEVER)
        order = np.argsort(arrival, axis=1)
        last, second = order[:, -1], order[:, -2]
        at = np.arange(len(rows))
        lead = arrival[at, last] - arrival[at, second]
        clear = lead > block.error_ns[last] + block.error_ns[second]
        compared += len(rows)
        np.add.at(times, block.block.members[last[clear]], 1)
        for place, ns in zip(last[clear].tolist(), lead[clear].tolist(), strict=True):
            leads[int(block.block.members[place])].append(ns)
    table = [
        LastArriver(
            rank=part.rank,
            times_last=int(times[place]),
            of=compared,
            lead_ns=int(median(leads[place])) if leads[place] else 0,
            waits_ns=int(waits[place]) // max(steps, 1),
            wait_error_ns=-(-int(errors[place]) // max(steps, 1)),
        )
        for place, part in enumerate(parts)
    ]
    return tuple(sorted(table, key=lambda row: (-row.times_last, row.waits_ns))) if compared else ()


def link_evidence(
    blocks: Sequence[AlignedBlock], profiles: Sequence[Profile] = ()
) -> list[LinkEvidence]:
    """Transfers of groups that are all here, where it is known how long they should take."""
    links: list[LinkEvidence] = []
    for block in blocks:
        transfer = block.moving_ns
        for code, size, rows in _kinds_and_sizes(block.block):
            rows = rows[block.complete[rows] & (block.block.step[rows] >= 0)]
            if not len(rows) or size < 0:
                continue
            expected, error = _expected(profiles, KINDS[code], block.block.group.size, size)
            members = block.here[rows].sum(axis=1)
            links.append(
                LinkEvidence(
                    group=block.block.group.name,
                    members=len(block.block.members),
                    kind=KINDS[code],
                    size_bytes=size,
                    step=block.block.step[rows],
                    transfer_ns=transfer[rows],
                    exposed_ns=block.exposed_ns[rows].sum(axis=1) // members,
                    calibrated=expected is not None,
                    should_ns=(expected or 0.0) * (1 + error),
                )
            )
    return list(_compare_with_siblings(links))


def _compare_with_siblings(links: Sequence[LinkEvidence]) -> Iterator[LinkEvidence]:
    """Without a calibration, a transfer should take as long as in other groups of that size."""
    alike: dict[tuple[str, int, int], dict[str, float]] = {}
    for link in links:
        groups = alike.setdefault((link.kind, link.size_bytes, link.members), {})
        groups[link.group] = median(link.transfer_ns)
    for link in links:
        groups = alike[link.kind, link.size_bytes, link.members]
        others = [typical for name, typical in groups.items() if name != link.group]
        if link.calibrated:
            yield link
        elif others:
            yield msgspec.structs.replace(link, should_ns=median(others))
