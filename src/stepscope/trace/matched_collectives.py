"""Match the same collective on several ranks: by group and sequence, else by order in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.job import KINDS, SYNCHRONISING, CollectiveCalls, Group, RankPart
from stepscope.records.trace import ABSENT, Flags, Int8, Int32, Int64

_Member = tuple[int, int, Group]  # part, its code for the group, the group

SYNCHRONISING_CODES = tuple(code for code, kind in enumerate(KINDS) if kind in SYNCHRONISING)
_ALL_TO_ALL = KINDS.index("all_to_all")
_MAX_UNEQUAL = 4
_NO_SIZE = np.int64(2**60)  # larger than any
_SEND, _RECV = KINDS.index("send"), KINDS.index("recv")


class MatchedCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one group. `row` is (collectives, members): rows of a part's calls."""

    group: Group
    members: NDArray[np.intp]  # indices of parts
    kind: Int8
    size_bytes: Int64
    step: Int64  # the step's number, ABSENT outside all steps
    row: Int32  # ABSENT if a member lacks the collective
    by: str  # "sequence" or "order"
    unmatched: int  # calls that only one member has

    def __len__(self) -> int:
        return len(self.kind)

    def column(self, parts: Sequence[RankPart], name: str) -> Int64:
        """One column of every member's calls, as (collectives, members); 0 if absent."""
        return _column(parts, self.members.tolist(), self.row, name)

    @property
    def synchronising(self) -> Flags:
        return np.isin(self.kind, SYNCHRONISING_CODES)


class MatchedTransfers(msgspec.Struct, frozen=True, kw_only=True):
    sender: NDArray[np.intp]  # parts
    send: NDArray[np.intp]  # rows of their calls
    receiver: NDArray[np.intp]
    recv: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.sender)


def match_collectives(parts: Sequence[RankPart]) -> list[MatchedCollectives]:
    """One record for every group that two or more parts call."""
    groups: dict[tuple[str, tuple[int, ...]], list[_Member]] = {}
    for index, part in enumerate(parts):
        for code, group in enumerate(part.calls.groups):
            groups.setdefault((group.name, group.ranks), []).append((index, code, group))
    return [_match_group(parts, members) for members in groups.values() if len(members) > 1]


def _match_group(parts: Sequence[RankPart], members: list[_Member]) -> MatchedCollectives:
    rows = [_collective_rows(parts[part].calls, code) for part, code, _ in members]
    own = [(parts[part], row) for (part, _, _), row in zip(members, rows, strict=True)]
    by_sequence = all((part.calls.sequence[row] >= 0).all() for part, row in own)
    steps = [_step_numbers(part)[row] for part, row in own]
    keys = [
        _collective_keys(part.calls, row, None if by_sequence else step)
        for (part, row), step in zip(own, steps, strict=True)
    ]
    member = np.repeat(np.arange(len(members)), [len(row) for row in rows])
    row, step = np.concatenate(rows), np.concatenate(steps)
    key = np.concatenate(keys)
    usable = key[:, 0] >= 0  # without sequences, calls outside all steps cannot be matched
    if not by_sequence:
        usable &= _have_equal_counts(key[:, :-1], member, len(members))
    distinct, inverse = np.unique(key[usable], axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    table = np.full((len(distinct), len(members)), ABSENT, np.int32)
    table[inverse, member[usable]] = row[usable]
    step_of = np.full(len(distinct), ABSENT, np.int64)
    step_of[inverse] = step[usable]
    numbers = [part for part, _, _ in members]
    sizes = _column(parts, numbers, table, "size_bytes", ABSENT)
    # Whether the ranks' bytes can belong to the same collective.
    least = np.where(sizes > 0, sizes, _NO_SIZE).min(axis=1)
    similar: Flags = np.maximum(sizes.max(axis=1), 0) <= _MAX_UNEQUAL * least
    shared = ((table >= 0).sum(axis=1) > 1) & similar
    order = np.argsort(_first_arrival(parts, members, table[shared]), kind="stable")
    table = table[shared][order]
    return MatchedCollectives(
        group=members[0][2],
        members=np.array(numbers, np.intp),
        kind=distinct[shared][order, 1].astype(np.int8),
        size_bytes=sizes[shared][order].max(axis=1),  # the largest share of any rank
        step=step_of[shared][order],
        row=table,
        by="sequence" if by_sequence else "order",
        unmatched=int((~shared).sum()) + int((~usable).sum()),
    )


def _collective_rows(calls: CollectiveCalls, group: int) -> NDArray[np.intp]:
    wanted = (calls.group == group) & (calls.kind != _SEND) & (calls.kind != _RECV)
    return np.flatnonzero(wanted)


def _step_numbers(part: RankPart) -> Int64:
    """The number of each call's step; the same on every rank."""
    step = part.calls.step
    if not len(part.pace):
        return np.zeros(len(step), np.int64)
    return np.where(step >= 0, part.pace.number[np.maximum(step, 0)], ABSENT)


def _call_keys(*columns: NDArray[Any]) -> Int64:
    """Number repeated calls, so that the n-th identical call gets the same key on every rank."""
    numbers = [column.astype(np.int64) for column in columns]
    count = len(numbers[0])
    order = np.lexsort((np.arange(count), *reversed(numbers)))
    changes = np.ones(count, np.bool_)
    changes[1:] = np.any([np.diff(column[order]) != 0 for column in numbers], axis=0)
    first = np.maximum.accumulate(np.where(changes, np.arange(count), 0))
    nth = np.empty(count, np.int64)
    nth[order] = np.arange(count) - first
    return np.stack((*numbers, nth), axis=1)


def _collective_keys(calls: CollectiveCalls, rows: NDArray[np.intp], step: Int64 | None) -> Int64:
    """Key calls by sequence, else by step, kind and bytes. Ranks may give unequal shares to an all-
    to-all."""
    kind = calls.kind[rows]
    if step is None:
        return _call_keys(calls.sequence[rows], kind, np.zeros(len(rows), np.int64))
    return _call_keys(step, kind, np.where(kind == _ALL_TO_ALL, 0, calls.size_bytes[rows]))


def _have_equal_counts(call: Int64, member: Int64, members: int) -> Flags:
    """Whether all members made a call equally often: else the n-th of one is not the others'."""
    distinct, inverse = np.unique(call, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    counts = np.zeros((len(distinct), members), np.int64)
    np.add.at(counts, (inverse, member), 1)
    most = counts.max(axis=1, keepdims=True)
    equal: Flags = ((counts == most) | (counts == 0)).all(axis=1)[inverse]
    return equal


def _first_arrival(parts: Sequence[RankPart], members: list[_Member], table: Int32) -> Int64:
    """Arrival times at the member that has most of the collectives."""
    fullest = int((table >= 0).sum(axis=0).argmax()) if len(table) else 0
    arrival = parts[members[fullest][0]].calls.arrival_ns
    row = table[:, fullest]
    return np.where(
        row >= 0, arrival[np.maximum(row, 0)] if len(arrival) else 0, np.iinfo(np.int64).max
    )


def _column(
    parts: Sequence[RankPart], members: list[int], table: Int32, name: str, absent: int = 0
) -> Int64:
    """One column of the members' calls, in the places of their rows in the table."""
    values = np.full(table.shape, absent, np.int64)
    for place, member in enumerate(members):
        present = table[:, place] >= 0
        values[present, place] = getattr(parts[member].calls, name)[table[present, place]]
    return values


def match_transfers(parts: Sequence[RankPart]) -> MatchedTransfers:
    """Match transfers: in each step, a rank's n-th send to another meets that one's n-th receive
    from it."""
    sends = [_point_to_point(part, place, _SEND) for place, part in enumerate(parts)]
    receives = [_point_to_point(part, place, _RECV) for place, part in enumerate(parts)]
    send, recv = (
        np.concatenate(rows) if rows else np.empty((0, 6), np.int64) for rows in (sends, receives)
    )
    receive_rows = {tuple(key): row for row, key in enumerate(recv[:, :4].tolist())}
    pairs = [
        (row, receive_rows[key])
        for row, key in enumerate(map(tuple, send[:, :4].tolist()))
        if key in receive_rows
    ]
    ours, theirs = (np.array([pair[i] for pair in pairs], np.intp) for i in (0, 1))
    return MatchedTransfers(
        sender=send[ours, 4], send=send[ours, 5], receiver=recv[theirs, 4], recv=recv[theirs, 5]
    )


def _point_to_point(part: RankPart, place: int, kind: int) -> Int64:
    """Rows of (from, to, step, nth, part, row)."""
    calls = part.calls
    rows = np.flatnonzero((calls.kind == kind) & (calls.peer >= 0))
    peer = calls.peer[rows].astype(np.int64)
    step = _step_numbers(part)[rows]
    own = np.full(len(rows), part.rank, np.int64)
    pair = np.stack((own, peer) if kind == _SEND else (peer, own), axis=1)
    nth = _call_keys(step, peer)[:, -1]
    return np.column_stack((pair, step, nth, np.full(len(rows), place), rows))
