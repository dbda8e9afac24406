"""Which ranks' work and which transfers decided a step, followed from its end to its start.

The rank that ends last has worked since the last collective that it waited in. That collective
ended with its transfer, which began when the last rank arrived, or when the group's previous
collective was done. The path continues with that rank, from its arrival.
"""

from __future__ import annotations

import bisect
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from stepscope.records.job import KINDS, CriticalPath, PathPiece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.explain.arrays import Int64s
    from stepscope.explain.arrivals import AlignedBlock
    from stepscope.records.job import Clock, RankPart
    from stepscope.trace.matching import MatchedTransfers


_NEVER = -(2**62)
_MOST_PIECES = 10_000
_LABELS = {"work": "own work", "input": "waiting for data"}


class _Event(NamedTuple):
    """A collective or a receive on one rank, on the job's clock."""

    end_ns: int
    last_ns: int  # when the last rank arrived, or the sender began
    last_part: int
    before_ns: int  # when the group's previous collective ended on this rank
    blocks: bool  # the rank waited in it
    label: str


def critical_path(
    parts: Sequence[RankPart],
    blocks: Sequence[AlignedBlock],
    transfers: MatchedTransfers,
    clock: Clock,
    step: int,
) -> CriticalPath | None:
    """None where clocks are not aligned or the step is not on all ranks."""
    window = _window(parts, clock, step)
    if window is None:
        return None
    starts, ends = window

    @cache
    def events_of(part: int) -> list[_Event]:
        return sorted(
            [*_collectives(blocks, part, step), *_receives(parts, transfers, clock, part, step)]
        )

    at, begin = int(ends.argmax()), int(starts.min())
    time = end = int(ends.max())
    pieces: list[PathPiece] = []
    while time > begin and len(pieces) < _MOST_PIECES:
        mine = events_of(at)
        place = _blocking_before(mine, time)
        since = max(begin, mine[place].end_ns) if place >= 0 else begin
        pieces += _work(parts[at], int(starts[at]), since, time, step)
        if place < 0:
            break
        at, time = _follow_transfers(parts[at].rank, mine, place, begin, since, pieces, at)
    return _path(step, begin, end, pieces)


def _window(parts: Sequence[RankPart], clock: Clock, step: int) -> tuple[Int64s, Int64s] | None:
    spans = []
    for part in parts:
        row = np.flatnonzero(part.pace.number == step)[:1]
        if not len(row) or part.rank not in clock.offset_ns:
            return None
        began = part.pace.start_ns[row]
        spans.append(clock.shift_ns(part.rank, np.append(began, began + part.pace.dur_ns[row])))
    starts, ends = np.array(spans, np.int64).T
    return starts, ends


def _collectives(blocks: Sequence[AlignedBlock], part: int, step: int) -> Iterator[_Event]:
    for block in blocks:
        place = np.flatnonzero(block.block.members == part)
        if not len(place) or not block.aligned:
            continue
        column = int(place[0])
        rows = np.flatnonzero(block.here[:, column] & block.block.synchronising)
        before = np.append(_NEVER, block.end_ns[rows, column])
        for number in np.flatnonzero(block.block.step[rows] == step).tolist():
            row = int(rows[number])
            yield _Event(
                end_ns=int(block.end_ns[row, column]),
                last_ns=int(block.last_arrival_ns[row]),
                last_part=int(block.block.members[block.last[row]]),
                before_ns=int(before[number]),
                blocks=bool(block.exposed_ns[row, column] > 0),
                label=KINDS[block.block.kind[row]],
            )


def _receives(
    parts: Sequence[RankPart], transfers: MatchedTransfers, clock: Clock, part: int, step: int
) -> Iterator[_Event]:
    """A receive ends after its sender began."""
    calls, numbers = parts[part].calls, parts[part].pace.number
    for number in np.flatnonzero(transfers.receiver == part).tolist():
        row, sender = transfers.recv[number], int(transfers.sender[number])
        sent = parts[sender].calls.start_ns[transfers.send[number : number + 1]]
        if calls.step[row] >= 0 and numbers[calls.step[row]] == step:
            yield _Event(
                end_ns=int(clock.shift_ns(parts[part].rank, calls.end_ns[row : row + 1])[0]),
                last_ns=int(clock.shift_ns(parts[sender].rank, sent)[0]),
                last_part=sender,
                before_ns=_NEVER,
                blocks=bool(calls.exposed_ns[row] > 0),
                label="recv",
            )


def _blocking_before(events: Sequence[_Event], time: int) -> int:
    place = bisect.bisect_right(events, time, key=lambda event: event.end_ns) - 1
    while place >= 0 and not events[place].blocks:
        place -= 1
    return place


def _follow_transfers(
    rank: int,
    mine: Sequence[_Event],
    place: int,
    begin: int,
    time: int,
    pieces: list[PathPiece],
    at: int,
) -> tuple[int, int]:
    """Follow a transfer, and those queued before it, back to the rank that arrived last."""
    while True:
        event = mine[place]
        began = max(begin, min(time, max(event.last_ns, event.before_ns)))
        if began < time:
            pieces.append(
                PathPiece(
                    rank=rank, kind="transfer", start_ns=began, end_ns=time, label=event.label
                )
            )
        time = began
        if event.last_ns >= event.before_ns:
            return event.last_part, time
        if place == 0 or time <= begin:
            return at, time
        place -= 1


def _work(part: RankPart, step_start: int, start: int, end: int, step: int) -> list[PathPiece]:
    """Pieces of the rank's own time, the latest first; a step begins by waiting for data."""
    row = int(np.flatnonzero(part.pace.number == step)[0])
    fed = step_start + int(part.pace.input_ns[row])
    cuts: list[tuple[int, int, Literal["work", "input"]]] = [
        (max(start, fed), end, "work"),
        (max(start, step_start), min(end, fed), "input"),
        (start, min(end, step_start), "work"),  # still busy with the step before
    ]
    if fed == step_start:
        cuts = [(start, end, "work")]
    return [
        PathPiece(rank=part.rank, kind=kind, start_ns=a, end_ns=b, label=_LABELS[kind])
        for a, b, kind in cuts
        if b > a
    ]


def _path(step: int, begin: int, end: int, pieces: list[PathPiece]) -> CriticalPath:
    whole = max(end - begin, 1)
    share: dict[int, float] = {}
    transfer_share = 0.0
    for piece in pieces:
        spent = (piece.end_ns - piece.start_ns) / whole
        if piece.kind == "transfer":
            transfer_share += spent
        else:
            share[piece.rank] = share.get(piece.rank, 0.0) + spent
    return CriticalPath(
        step=step,
        start_ns=begin,
        end_ns=end,
        pieces=tuple(reversed(pieces)),
        share_by_rank=dict(sorted(share.items(), key=lambda pair: -pair[1])),
        transfer_share=transfer_share,
    )
