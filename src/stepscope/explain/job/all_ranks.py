"""All ranks together: one clock, collectives joined, who waits for whom, and which ranks'
work and which transfers decided a step.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from stepscope.explain.job.arrivals import (
    AlignedBlock,
    align_block,
    exposed_between_hosts,
    last_arrivers,
    link_evidence,
    list_joined,
)
from stepscope.explain.job.hosts import (
    about_hosts,
    blame_links,
    clock_notes,
    find_hierarchical,
    hosts_of,
    list_host_links,
    places_of,
)
from stepscope.explain.job.late_ranks import decide, judge_whole_run
from stepscope.explain.job.rank_part import train_apart, typical_step
from stepscope.explain.job.stragglers import find_stragglers
from stepscope.records.hardware import Profile
from stepscope.records.job import (
    KINDS,
    Clock,
    CriticalPath,
    Job,
    Lanes,
    PathPiece,
    RankPart,
    Stragglers,
)
from stepscope.records.normal import median, medians
from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT
from stepscope.step.arrays import Int64s
from stepscope.text.words import counted
from stepscope.trace.clock_offsets import share_rounds
from stepscope.trace.clocks import align_clocks
from stepscope.trace.matched_collectives import (
    MatchedCollectives,
    MatchedTransfers,
    match_collectives,
    match_transfers,
)

DRAWN_RANKS = 8
_MOST_DRAWN = 6_000
_APART = "they exchange nothing, so none waits for another"


def join_ranks(
    parts: Sequence[RankPart],
    profiles: Sequence[Profile] = (),
    untraced: Sequence[RankPart] = (),
) -> Job:
    """Never raises because of its input: what cannot be computed becomes a note. `untraced` ranks
    count where all steps do: who arrives late, and on which host."""
    parts, notes = _usable(parts)
    parts = share_rounds(parts)
    ranks = tuple(part.rank for part in parts)
    times = tuple(typical_step(part.pace) for part in parts)
    steps, notes_on_steps = _common_steps(parts)
    notes += notes_on_steps
    matrix = {
        name: _matrix(parts, steps, name)
        for name in ("dur_ns", "own_ns", "input_ns", "exposed_comm_ns")
    }
    blocks = match_collectives(parts)
    notes += _about_groups([*parts, *untraced], blocks)
    transfers = match_transfers(parts)
    clock = about_hosts(align_clocks(parts, blocks, transfers), parts)
    notes += clock_notes(clock)
    aligned = [align_block(parts, block, clock) for block in blocks]
    members = tuple(part.member for part in parts)
    everyone = sorted((*parts, *untraced), key=lambda part: part.rank)
    whole_run = judge_whole_run(everyone)
    hosts, host_links = hosts_of(everyone), list_host_links(everyone)
    if train_apart(members) and not any(m.exchanged_bytes for m in members if m is not None):
        stragglers = Stragglers(verdict="none", detail=_APART)
    else:
        own, loading, length = matrix["own_ns"], matrix["input_ns"], matrix["dur_ns"]
        links = link_evidence(aligned, profiles)
        # Stages of a pipeline have different work: a host that holds one is not to blame for it.
        alike = {} if len(transfers.sender) else hosts
        window = find_stragglers(ranks, own, loading, length, links, times, alike)
        whole_steps = length[(length > 0).all(axis=1)]
        slow_links = blame_links(
            host_links,
            exposed_between_hosts(parts, aligned),
            median(whole_steps) if whole_steps.size else 0.0,
        )
        stragglers = decide(window, whole_run, slow_links)
    return Job(
        ranks=ranks,
        times=times,
        hosts=hosts,
        places=places_of(parts),
        hierarchical=find_hierarchical(parts, hosts),
        steps=steps,
        step_ns=matrix["dur_ns"],
        own_ns=matrix["own_ns"],
        input_ns=matrix["input_ns"],
        exposed_comm_ns=matrix["exposed_comm_ns"],
        clock=clock,
        collectives=list_joined(parts, aligned, profiles),
        arrivals=last_arrivers(parts, aligned, len(steps)),
        stragglers=stragglers,
        path=_typical_path(parts, aligned, transfers, clock, steps, matrix["dur_ns"]),
        lanes=_lanes(parts, aligned, clock, _choose_drawn(ranks, matrix["own_ns"], stragglers)),
        notes=tuple(notes),
        members=members,
        run_arrivals=whole_run.arrivals,
        own_times=whole_run.own_times,
        links=host_links,
    )


def _usable(parts: Sequence[RankPart]) -> tuple[list[RankPart], list[Note]]:
    """Sorted by rank, each rank once, without those that recorded nothing."""
    kept: dict[int, RankPart] = {}
    empty, twice = [], []
    for part in sorted(parts, key=lambda part: part.rank):
        if not len(part.calls) and not (part.pace.dur_ns > 0).any():
            empty.append(part.rank)
        elif part.rank in kept:
            twice.append(part.rank)
        else:
            kept[part.rank] = part
    notes = []
    if empty:
        notes.append(Note(id="empty-rank", detail=f"nothing was recorded by {_named(empty)}"))
    if twice:
        detail = f"several files say they are {_named(sorted(set(twice)))}: only the first counts"
        notes.append(Note(id="duplicate-ranks", detail=detail))
    return list(kept.values()), notes


def _named(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {few}{more}" if len(ranks) == 1 else f"ranks {few}{more}"


def _common_steps(parts: Sequence[RankPart]) -> tuple[tuple[int, ...], list[Note]]:
    """Numbers of steps that any rank has; a note where they differ."""
    numbers = [frozenset(part.pace.number.tolist()) for part in parts]
    common = frozenset.intersection(*numbers) if numbers else frozenset[int]()
    steps = tuple(sorted(frozenset[int]().union(*numbers)))
    if len(common) == len(steps):
        return steps, []
    detail = f"ranks recorded different steps: {len(common)} of {len(steps)} are on all ranks"
    return steps, [Note(id="different-steps", detail=detail)]


def _matrix(parts: Sequence[RankPart], steps: tuple[int, ...], name: str) -> Int64s:
    out = np.full((len(steps), len(parts)), ABSENT, np.int64)
    place = np.array(steps, np.int64)
    for column, part in enumerate(parts):
        out[np.searchsorted(place, part.pace.number), column] = getattr(part.pace, name)
    return out


def _about_groups(
    parts: Sequence[RankPart], blocks: Sequence[MatchedCollectives]
) -> Iterator[Note]:
    here = {part.rank for part in parts}
    absent = {
        group.name or "unnamed": sorted(set(group.ranks) - here)
        for part in parts
        for group in part.calls.groups
        if set(group.ranks) - here
    }
    if absent:
        name, gone = next(iter(absent.items()))
        groups = counted(len(absent), "group")
        detail = f"ranks of {groups} are not here (group {name}: {_named(gone)})"
        yield Note(id="partial-groups", detail=detail, count=len(absent))
    unmatched = sum(block.unmatched for block in blocks)
    if unmatched:
        detail = "collectives that only one of their ranks recorded are not joined"
        yield Note(id="unmatched-collectives", detail=detail, count=unmatched)
    uneven = sum(int(((block.row >= 0).sum(axis=1) < len(block.members)).sum()) for block in blocks)
    if uneven:
        detail = "collectives that some of their group's ranks did not record"
        yield Note(id="partly-matched-collectives", detail=detail, count=uneven)


def _typical_path(
    parts: Sequence[RankPart],
    aligned: Sequence[AlignedBlock],
    transfers: MatchedTransfers,
    clock: Clock,
    steps: tuple[int, ...],
    step_ns: Int64s,
) -> CriticalPath | None:
    """The critical path of the step with the median length."""
    whole = np.flatnonzero((step_ns > 0).all(axis=1)) if len(parts) > 1 else np.empty(0, np.intp)
    if not clock.aligned or not len(whole):
        return None
    length = step_ns[whole].max(axis=1)
    typical = whole[int(np.argsort(length, kind="stable")[(len(length) - 1) // 2])]
    return critical_path(parts, aligned, transfers, clock, steps[int(typical)])


def _choose_drawn(ranks: tuple[int, ...], own_ns: Int64s, stragglers: Stragglers) -> list[int]:
    """Ranks worth drawing: stragglers, the slowest and fastest, then the first ones."""
    whole = (own_ns > 0).all(axis=1)
    typical = medians(own_ns[whole]) if whole.any() else np.zeros(len(ranks))
    by_time = [ranks[i] for i in np.argsort(-typical, kind="stable").tolist()]
    slow = stragglers.accused
    wanted = dict.fromkeys([*slow[:3], *by_time[:2], *by_time[-2:], *ranks])
    return sorted(list(wanted)[:DRAWN_RANKS])


def _lanes(
    parts: Sequence[RankPart], aligned: Sequence[AlignedBlock], clock: Clock, ranks: list[int]
) -> Lanes | None:
    """Joined collectives of a few ranks, in the order of time."""
    drawn = {place: part.rank for place, part in enumerate(parts) if part.rank in set(ranks)}
    if not clock.aligned:
        return None
    pieces = [_drawn(block, drawn, first) for first, block in _numbered(aligned)]
    table = np.concatenate(pieces) if pieces else np.empty((0, 8), np.int64)
    table = table[np.argsort(table[:, 5], kind="stable")][:_MOST_DRAWN]
    steps = [
        (part.rank, number, *clock.shift_ns(part.rank, np.array([start, start + dur])).tolist())
        for part in parts
        if part.rank in clock.offset_ns and part.rank in set(ranks)
        for number, start, dur in zip(
            part.pace.number.tolist(),
            part.pace.start_ns.tolist(),
            part.pace.dur_ns.tolist(),
            strict=True,
        )
    ]
    of_steps = np.array(steps, np.int64).reshape(-1, 4)
    return Lanes(
        ranks=tuple(ranks),
        match=table[:, 0],
        rank=table[:, 1].astype(np.int32),
        kind=table[:, 2].astype(np.int8),
        size_bytes=table[:, 3],
        arrival_ns=table[:, 4],
        start_ns=table[:, 5],
        end_ns=table[:, 6],
        last_ns=table[:, 7],
        step_rank=of_steps[:, 0].astype(np.int32),
        step_number=of_steps[:, 1],
        step_start_ns=of_steps[:, 2],
        step_end_ns=of_steps[:, 3],
    )


def _numbered(aligned: Sequence[AlignedBlock]) -> Iterator[tuple[int, AlignedBlock]]:
    first = 0
    for block in aligned:
        if block.aligned:
            yield first, block
            first += len(block.block)


def _drawn(aligned: AlignedBlock, drawn: dict[int, int], first: int) -> Int64s:
    """(match, rank, kind, size, arrival, start, end, last arrival) of the drawn members."""
    members = aligned.block.members.tolist()
    ranks = np.array([drawn.get(member, ABSENT) for member in members], np.int64)
    row, place = np.nonzero(aligned.here & (ranks != ABSENT))
    return np.column_stack(
        (
            first + row,
            ranks[place],
            aligned.block.kind[row].astype(np.int64),
            aligned.block.size_bytes[row],
            aligned.arrival_ns[row, place],
            aligned.start_ns[row, place],
            aligned.end_ns[row, place],
            aligned.last_arrival_ns[row],
        )
    )


# Which ranks' work and which transfers decided a step, followed from its end to its start.
#
# The rank that ends last has worked since the last collective that it waited in. That collective
# ended with its transfer, which began when the last rank arrived, or when the group's previous
# collective was done. The path continues with that rank, from its arrival.

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
        place = bisect.bisect_right(mine, time, key=lambda event: event.end_ns) - 1
        while place >= 0 and not mine[place].blocks:
            place -= 1
        since = max(begin, mine[place].end_ns) if place >= 0 else begin
        pieces += _work(parts[at], int(starts[at]), since, time, step)
        if place < 0:
            break
        at, time = _follow_transfers(parts[at].rank, mine, place, begin, since, pieces, at)
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
