"""One clock for all ranks, with an error bar.

Nobody leaves a synchronising collective (or a round that capture held) before everybody has come.
So on the one true clock all ranks' intervals of the same collective share a moment, which bounds
every rank's offset from both sides. Bounds travel from the reference rank through whatever
collectives connect the others to it. A message bounds one side: it is not received before it was
sent. Drift is allowed for: the window is cut into bins, each bin bounds the offset at its middle,
and the straight lines that pass through all of them are what is possible. No line: the times
contradict each other, and nothing is aligned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.records.job import KINDS, Clock
from stepscope.trace.matching import match_collectives, match_transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.records.job import RankPart
    from stepscope.trace.matching import MatchedCollectives, MatchedTransfers

    Float = NDArray[np.float64]
    Index = NDArray[np.intp]

MAX_DRIFT = 200e-6  # of two quartz clocks against each other
READING_NS = 1_000.0  # what a time in a trace is good for
_BINS = (16, 4, 2)
_PASSES = 4
_MAX_HOPS = 256
_MAX_OF_A_GROUP = 4096  # collectives of one group that are looked at: the shortest ones
_BROADCAST = KINDS.index("broadcast")
_INF = np.inf


class _Edges(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals: a part was inside a meeting from start to end, on its own clock less its base."""

    meeting: Index
    part: Index
    start: Float
    end: Float
    source: NDArray[np.int8]  # 0 collectives, 1 rounds


class _Arrows(msgspec.Struct, frozen=True, kw_only=True):
    """Messages: sent not before `sent`, received not after `received`."""

    sender: Index
    receiver: Index
    sent: Float
    received: Float


class _Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Per part and bin, what the offset at the bin's middle can be."""

    low: Float  # (parts, bins)
    high: Float
    at: Float  # (bins,) on the reference's clock


class _Contradiction(Exception):  # noqa: N818 - an outcome, not an error
    """The times cannot all be true."""


def align_clocks(
    parts: Sequence[RankPart],
    blocks: Sequence[MatchedCollectives] | None = None,
    transfers: MatchedTransfers | None = None,
) -> Clock:
    """Offsets of all ranks against the lowest one that anything connects to the others."""
    if len(parts) < 2:
        return Clock(aligned=False, detail="one rank only: there is nothing to align")
    base = np.array([_base(part) for part in parts], np.int64)
    blocks = match_collectives(parts) if blocks is None else blocks
    edges = _collect(parts, blocks, base)
    transfers = match_transfers(parts) if transfers is None else transfers
    arrows = _messages(parts, transfers, blocks, base)
    if not len(edges.part) and not len(arrows.sender):
        return Clock(
            aligned=False,
            detail="the ranks share no collective and no clock round: their clocks cannot be "
            "compared",
        )
    connected = np.unique(np.concatenate((edges.part, arrows.sender, arrows.receiver)))
    reference = min(connected.tolist(), key=lambda part: parts[part].rank)
    try:
        return _solve(parts, edges, arrows, base, reference)
    except _Contradiction as reason:
        detail = f"times of the ranks contradict each other: {reason}; nothing was aligned"
        return Clock(aligned=False, contradicts=True, detail=detail)


def _base(part: RankPart) -> int:
    if len(part.calls):
        return int(part.calls.start_ns.min())
    return int(part.rounds[0].came_ns.min()) if part.rounds else 0


# What bounds there are.


def _collect(
    parts: Sequence[RankPart], blocks: Sequence[MatchedCollectives], base: Index
) -> _Edges:
    meetings, members, starts, ends, sources = [], [], [], [], []
    count = 0
    for block in blocks:
        start, end = block.column(parts, "start_ns"), block.column(parts, "end_ns")
        chosen = _tightest(block, end - start)
        row, place = np.nonzero(block.row[chosen] >= 0)
        member = block.members[place]
        meetings.append(count + row)
        members.append(member)
        starts.append(start[chosen][row, place] - base[member] - READING_NS)
        ends.append(end[chosen][row, place] - base[member] + READING_NS)
        sources.append(np.zeros(len(row), np.int8))
        count += len(chosen)
    for rounds in _common_rounds(parts):
        for part, came, left in rounds:
            meetings.append(count + np.arange(len(came)))
            members.append(np.full(len(came), part))
            starts.append(came - base[part] - READING_NS)
            ends.append(left - base[part] + READING_NS)
            sources.append(np.ones(len(came), np.int8))
        count += len(rounds[0][1])
    if not meetings:
        none = np.empty(0)
        index = none.astype(np.intp)
        return _Edges(meeting=index, part=index, start=none, end=none, source=none.astype(np.int8))
    return _Edges(
        meeting=np.concatenate(meetings),
        part=np.concatenate(members),
        start=np.concatenate(starts).astype(np.float64),
        end=np.concatenate(ends).astype(np.float64),
        source=np.concatenate(sources),
    )


def _tightest(block: MatchedCollectives, dur: NDArray[np.int64]) -> Index:
    """Synchronising collectives, the ones that the last comer spent least time in when many."""
    rows = np.flatnonzero(block.synchronising)
    if len(rows) <= _MAX_OF_A_GROUP:
        return rows
    here = block.row[rows] >= 0
    shortest = np.where(here, dur[rows], np.iinfo(np.int64).max).min(axis=1)
    return np.sort(rows[np.argsort(shortest, kind="stable")[:_MAX_OF_A_GROUP]])


def _common_rounds(
    parts: Sequence[RankPart],
) -> list[list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]]:
    """Rounds of the same label and step on two ranks or more."""
    found: dict[tuple[str, int | None, int], list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]]
    found = {}
    for place, part in enumerate(parts):
        for rounds in part.rounds:
            key = rounds.label, rounds.step, len(rounds.came_ns)
            found.setdefault(key, []).append((place, rounds.came_ns, rounds.left_ns))
    return [each for each in found.values() if len(each) > 1]


def _messages(
    parts: Sequence[RankPart],
    transfers: MatchedTransfers,
    blocks: Sequence[MatchedCollectives],
    base: Index,
) -> _Arrows:
    sent = [
        parts[part].calls.start_ns[row] - base[part]
        for part, row in zip(transfers.sender.tolist(), transfers.send.tolist(), strict=True)
    ]
    received = [
        parts[part].calls.end_ns[row] - base[part]
        for part, row in zip(transfers.receiver.tolist(), transfers.recv.tolist(), strict=True)
    ]
    sender, receiver = transfers.sender.tolist(), transfers.receiver.tolist()
    for block in blocks:
        for from_part, to_part, began, ended in _broadcasts(parts, block, base):
            sender.append(from_part)
            receiver.append(to_part)
            sent.append(began)
            received.append(ended)
    return _Arrows(
        sender=np.array(sender, np.intp),
        receiver=np.array(receiver, np.intp),
        sent=np.array(sent, np.float64) - READING_NS,
        received=np.array(received, np.float64) + READING_NS,
    )


def _broadcasts(
    parts: Sequence[RankPart], block: MatchedCollectives, base: Index
) -> list[tuple[int, int, float, float]]:
    """Nobody has a broadcast's data before its root began to send."""
    out = []
    number = {parts[part].rank: place for place, part in enumerate(block.members.tolist())}
    for row in np.flatnonzero(block.kind == _BROADCAST).tolist():
        here = np.flatnonzero(block.row[row] >= 0).tolist()
        first = int(block.members[here[0]])
        root = number.get(int(parts[first].calls.peer[block.row[row, here[0]]]), -1)
        if root not in here:
            continue
        from_part = int(block.members[root])
        began = float(parts[from_part].calls.start_ns[block.row[row, root]] - base[from_part])
        for place in here:
            to_part = int(block.members[place])
            if place != root:
                ended = parts[to_part].calls.end_ns[block.row[row, place]] - base[to_part]
                out.append((from_part, to_part, began, float(ended)))
    return out


# What they leave possible.


def _solve(
    parts: Sequence[RankPart], edges: _Edges, arrows: _Arrows, base: Index, reference: int
) -> Clock:
    """With fewer bins where a bin is too short to hold all that ties some rank to the others."""
    rough = _rough(len(parts), edges, arrows, reference)
    for bins in _BINS:
        clock = _fit(parts, edges, arrows, base, reference, rough, bins)
        if len(clock.offset_ns) == int(np.isfinite(rough).sum()):
            break
    return clock


def _fit(
    parts: Sequence[RankPart],
    edges: _Edges,
    arrows: _Arrows,
    base: Index,
    reference: int,
    rough: Float,
    bins: int,
) -> Clock:
    drift = np.zeros(len(parts))
    wobble = np.full(len(parts), MAX_DRIFT)  # what drift may still be, either side
    wobble[reference] = 0.0
    reached = np.isfinite(rough)
    for _ in range(_PASSES):
        bounds = _bin_bounds(edges, arrows, rough, drift, wobble, reference, bins)
        least, most = _slopes(bounds, drift, wobble)
        if (least > most)[reached].any():
            raise _Contradiction("no steady drift explains them")
        drift, wobble = (least + most) / 2, (most - least) / 2
        drift[reference] = wobble[reference] = 0.0
    return _describe(parts, edges, bounds, drift, wobble, base, reference, reached)


def _rough(parts: int, edges: _Edges, arrows: _Arrows, reference: int) -> Float:
    """Offsets good to what drift can make of the whole window; infinite where nothing connects."""
    span = float(edges.end.max() - edges.start.min()) if len(edges.part) else 0.0
    if len(arrows.sent):
        span = max(span, float(arrows.received.max() - arrows.sent.min()))
    slack = span * MAX_DRIFT
    low, high = _propagate(
        edges.part, edges.meeting, edges.start - slack, edges.end + slack,
        arrows.sender, arrows.receiver, arrows.received - arrows.sent + 2 * slack,
        np.array([reference]), parts,
    )  # fmt: skip
    one_sided = np.where(np.isfinite(high), high, low)
    both = np.isfinite(high) & np.isfinite(low)
    return np.where(both, (np.where(both, low, 0.0) + np.where(both, high, 0.0)) / 2, one_sided)


def _bin_bounds(
    edges: _Edges,
    arrows: _Arrows,
    rough: Float,
    drift: Float,
    wobble: Float,
    reference: int,
    bins: int,
) -> _Bounds:
    """Every bin by itself: a clock that drifts is nearly still for so long."""
    on_reference = (edges.start + edges.end) / 2 - rough[edges.part]
    sent_at = (arrows.sent + arrows.received) / 2 - (
        rough[arrows.sender] + rough[arrows.receiver]
    ) / 2
    times = np.concatenate((on_reference, sent_at))
    times = times[np.isfinite(times)]
    first, last = (float(times.min()), float(times.max())) if len(times) else (0.0, 0.0)
    width = max(1.0, (last - first) / bins)

    def bin_of(at: Float) -> Index:
        safe = np.where(np.isfinite(at), at, first)
        return np.clip((safe - first) // width, 0, bins - 1).astype(np.intp)

    meeting_bin = bin_of(_first_of(edges.meeting, on_reference))
    which = meeting_bin[edges.meeting] if len(edges.meeting) else edges.meeting
    message_bin = bin_of(sent_at)
    middle = np.asarray(first + (np.arange(bins) + 0.5) * width, np.float64)

    def still(part: Index, local: Float, bin_: Index) -> tuple[Float, Float]:
        """A local time as if the clock did not drift within the bin, and how far off that is."""
        since = local - np.where(np.isfinite(rough[part]), rough[part], 0.0) - middle[bin_]
        return local - drift[part] * since, wobble[part] * np.abs(since)

    start, early = still(edges.part, edges.start, which)
    end, late = still(edges.part, edges.end, which)
    sent, sent_slack = still(arrows.sender, arrows.sent, message_bin)
    received, received_slack = still(arrows.receiver, arrows.received, message_bin)
    parts = len(rough)
    low, high = _propagate(
        edges.part * bins + which, edges.meeting, start - early, end + late,
        arrows.sender * bins + message_bin, arrows.receiver * bins + message_bin,
        received - sent + sent_slack + received_slack,
        reference * bins + np.arange(bins), parts * bins,
    )  # fmt: skip
    return _Bounds(low=low.reshape(parts, bins), high=high.reshape(parts, bins), at=middle)


def _first_of(group: Index, values: Float) -> Float:
    """One finite value for each group."""
    if not len(group):
        return np.empty(0)
    out = np.full(int(group.max()) + 1, _INF)
    np.minimum.at(out, group, np.where(np.isfinite(values), values, _INF))
    return out


def _propagate(
    node: Index,
    meeting: Index,
    start: Float,
    end: Float,
    sender: Index,
    receiver: Index,
    room: Float,
    known: Index,
    nodes: int,
) -> tuple[Float, Float]:
    """Shortest paths from the known nodes: bounds of every node's offset.

    In a meeting at true time t: start <= t + offset <= end for everybody in it.
    """
    low, high = np.full(nodes, -_INF), np.full(nodes, _INF)
    low[known] = high[known] = 0.0
    count = int(meeting.max()) + 1 if len(meeting) else 0
    for _ in range(_MAX_HOPS):
        before = low.copy(), high.copy()
        earliest, latest = np.full(count, -_INF), np.full(count, _INF)
        np.maximum.at(earliest, meeting, start - high[node])
        np.minimum.at(latest, meeting, end - low[node])
        np.minimum.at(high, node, end - earliest[meeting])
        np.maximum.at(low, node, start - latest[meeting])
        np.minimum.at(high, receiver, high[sender] + room)
        np.maximum.at(low, sender, low[receiver] - room)
        if (low > high).any() or (earliest > latest).any():
            raise _Contradiction("a collective ended on one rank before another had begun it")
        if np.array_equal(before[0], low) and np.array_equal(before[1], high):
            return low, high
    raise _Contradiction("a collective ended on one rank before another had begun it")


def _slopes(bounds: _Bounds, drift: Float, wobble: Float) -> tuple[Float, Float]:
    """Least and most drift that lines through all bins can have."""
    least, most = drift - wobble, drift + wobble
    for i in range(len(bounds.at)):
        for j in range(i + 1, len(bounds.at)):
            apart = bounds.at[j] - bounds.at[i]
            with np.errstate(invalid="ignore"):
                rise = (bounds.high[:, j] - bounds.low[:, i]) / apart
                fall = (bounds.low[:, j] - bounds.high[:, i]) / apart
            most = np.minimum(most, np.where(np.isfinite(rise), rise, _INF))
            least = np.maximum(least, np.where(np.isfinite(fall), fall, -_INF))
    return least, most


def _reach(bounds: _Bounds, drift: Float, wobble: Float, at: float) -> tuple[Float, Float]:
    """What offsets are possible at a time: each bin's bounds carried there by any drift left, and,
    between two bins, the straight line."""
    away = at - bounds.at
    carry = drift[:, None] * away + wobble[:, None] * np.abs(away)
    back = drift[:, None] * away - wobble[:, None] * np.abs(away)
    low, high = (bounds.low + back).max(axis=1), (bounds.high + carry).min(axis=1)
    for i in range(len(bounds.at)):
        for j in range(i + 1, len(bounds.at)):
            if bounds.at[i] <= at <= bounds.at[j]:
                part = (at - bounds.at[i]) / (bounds.at[j] - bounds.at[i])
                high = np.minimum(high, (1 - part) * bounds.high[:, i] + part * bounds.high[:, j])
                low = np.maximum(low, (1 - part) * bounds.low[:, i] + part * bounds.low[:, j])
    return low, high


def _describe(
    parts: Sequence[RankPart],
    edges: _Edges,
    bounds: _Bounds,
    drift: Float,
    wobble: Float,
    base: Index,
    reference: int,
    reached: NDArray[np.bool_],
) -> Clock:
    half = (bounds.at[1] - bounds.at[0]) / 2
    moments = (bounds.at[0] - half, (bounds.at[0] + bounds.at[-1]) / 2, bounds.at[-1] + half)
    lows, highs = zip(*(_reach(bounds, drift, wobble, at) for at in moments), strict=True)
    if any((low > high)[reached].any() for low, high in zip(lows, highs, strict=True)):
        raise _Contradiction("no steady drift explains them")
    with np.errstate(invalid="ignore"):  # a rank that is bounded on one side only
        line = (lows[1] + highs[1]) / 2
        error = np.max(
            [
                np.maximum(
                    high - line - drift * (at - moments[1]), line + drift * (at - moments[1]) - low
                )
                for at, low, high in zip(moments, lows, highs, strict=True)
            ],
            axis=0,
        )
    known = np.flatnonzero(reached & np.isfinite(error)).tolist()
    lost = [parts[i].rank for i in range(len(parts)) if i not in set(known)]
    sources = tuple(
        name for code, name in enumerate(("collectives", "rounds")) if (edges.source == code).any()
    ) or ("messages",)
    detail = f"from {' and '.join(sources)}"
    if lost:
        detail += f"; nothing ties rank {', '.join(map(str, lost[:8]))} to the others"
    return Clock(
        aligned=len(known) > 1,
        reference=parts[reference].rank,
        at_ns=round(moments[1]) + int(base[reference]),
        offset_ns={parts[i].rank: round(line[i]) + int(base[i] - base[reference]) for i in known},
        error_ns={parts[i].rank: int(np.ceil(error[i])) for i in known},
        drift_ppm={parts[i].rank: float(drift[i] * 1e6) for i in known},
        sources=sources,
        detail=detail,
    )
