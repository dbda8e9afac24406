"""One clock for all ranks, with an error bar.

No rank leaves a synchronising collective (or a clock round of capture) before all have arrived. On
the true clock, then, all ranks' intervals of one collective share a moment, which bounds each
rank's offset from both sides. Bounds spread from the reference rank through the collectives that
connect the others to it. A message bounds one side: it is not received before it was sent. Clocks
may drift: the window is cut into bins, each bin bounds the offset at its middle, and every straight
line through all bins is possible. If there is no such line, the times contradict each other and
nothing is aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.job import KINDS, RUN_LABEL, Clock, RankPart, Rounds
from stepscope.records.trace import Flags, Int8, Int64
from stepscope.trace.clock_offsets import MAX_DRIFT
from stepscope.trace.links import distinct
from stepscope.trace.matched_collectives import (
    MatchedCollectives,
    MatchedTransfers,
    match_collectives,
    match_transfers,
)

Float = NDArray[np.float64]
Index = NDArray[np.intp]
_PartRounds = tuple[int, Int64, Int64]  # part, came, left

READING_NS = 1_000.0  # how far off a time in a trace may be
_BINS = (16, 4, 2)
_PASSES = 4
_MAX_HOPS = 256
_NEAR_NS = 60_000_000_000  # rounds of another window lie further from this one
_MAX_PER_GROUP = 4096  # collectives of one group that are used: the shortest ones
_BROADCAST = KINDS.index("broadcast")
_INF = np.inf


class _Edges(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals: a rank was in a meeting from start to end, on its own clock minus its base."""

    meeting: Index
    part: Index
    start: Float
    end: Float
    source: Int8  # 0 collectives, 1 rounds


class _Arrows(msgspec.Struct, frozen=True, kw_only=True):
    """Messages: sent at `sent` or later, received by `received`."""

    sender: Index
    receiver: Index
    sent: Float
    received: Float


class _Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of each rank's offset at the middle of each bin."""

    low: Float  # (parts, bins)
    high: Float
    at: Float  # (bins,) on the reference's clock


class _Problem(msgspec.Struct, frozen=True, kw_only=True):
    """All that bounds the offsets from the reference, which is one of the parts."""

    parts: Sequence[RankPart]
    edges: _Edges
    arrows: _Arrows
    base: Index
    reference: int


class _Contradiction(Exception):  # noqa: N818 - an outcome, not an error
    """The ranks' times cannot all be true."""


def align_clocks(
    parts: Sequence[RankPart],
    blocks: Sequence[MatchedCollectives] | None = None,
    transfers: MatchedTransfers | None = None,
) -> Clock:
    """The offset of every rank from the lowest rank that is connected to others."""
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
            detail="the ranks share no collective and no clock round, so their clocks cannot be "
            "compared",
        )
    connected = distinct(np.concatenate((edges.part, arrows.sender, arrows.receiver)))
    reference = min(connected.tolist(), key=lambda part: parts[part].rank)
    try:
        # Use fewer bins if some bin is too short to connect every rank to the others.
        problem = _Problem(parts=parts, edges=edges, arrows=arrows, base=base, reference=reference)
        rough = _rough(problem)
        for bins in _BINS:
            clock = _fit(problem, rough, bins)
            if len(clock.offset_ns) == int(np.isfinite(rough).sum()):
                break
        return clock
    except _Contradiction as reason:
        detail = f"times of the ranks contradict each other: {reason}; no clock was aligned"
        return Clock(aligned=False, contradicts=True, detail=detail)


def _base(part: RankPart) -> int:
    if len(part.calls):
        return int(part.calls.start_ns.min())
    return int(part.rounds[0].came_ns.min()) if part.rounds else 0


# Collecting the bounds


def _collect(
    parts: Sequence[RankPart], blocks: Sequence[MatchedCollectives], base: Index
) -> _Edges:
    pieces: list[tuple[NDArray[Any], ...]] = []  # the columns of _Edges
    count = 0
    for block in blocks:
        start, end = block.column(parts, "start_ns"), block.column(parts, "end_ns")
        chosen = _tightest(block, end - start)
        row, place = np.nonzero(block.row[chosen] >= 0)
        member = block.members[place]
        began, ended = (times[chosen][row, place] - base[member] for times in (start, end))
        pieces.append((count + row, member, began, ended, np.zeros(len(row), np.int8)))
        count += len(chosen)
    for rounds in _common_rounds(parts):
        for part, came, left in rounds:
            meeting, member = count + np.arange(len(came)), np.full(len(came), part)
            source = np.ones(len(came), np.int8)
            pieces.append((meeting, member, came - base[part], left - base[part], source))
        count += len(rounds[0][1])
    pieces = pieces or [(np.empty(0, np.intp),) * 5]
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    return _Edges(
        meeting=columns[0],
        part=columns[1],
        start=columns[2] - READING_NS,
        end=columns[3] + READING_NS,
        source=columns[4].astype(np.int8),
    )


def _tightest(block: MatchedCollectives, dur: Int64) -> Index:
    """Synchronising collectives; if there are many, those in which the last rank spent least."""
    rows = np.flatnonzero(block.synchronising)
    if len(rows) <= _MAX_PER_GROUP:
        return rows
    present = block.row[rows] >= 0
    shortest = np.where(present, dur[rows], np.iinfo(np.int64).max).min(axis=1)
    return np.sort(rows[np.argsort(shortest, kind="stable")[:_MAX_PER_GROUP]])


def _common_rounds(parts: Sequence[RankPart]) -> list[list[_PartRounds]]:
    """Clock rounds that two or more ranks recorded, by label and step."""
    common: dict[tuple[str, int | None, int], list[_PartRounds]] = {}
    for place, part in enumerate(parts):
        for rounds in part.rounds:
            if rounds.label == RUN_LABEL or not _is_near(part, rounds):
                continue
            key = rounds.label, rounds.step, len(rounds.came_ns)
            common.setdefault(key, []).append((place, rounds.came_ns, rounds.left_ns))
    return [rounds for rounds in common.values() if len(rounds) > 1]


def _is_near(part: RankPart, rounds: Rounds) -> bool:
    """Far from the window no straight line holds."""
    if not len(part.calls):
        return True
    first, last = int(part.calls.start_ns.min()), int(part.calls.end_ns.max())
    margin = max(_NEAR_NS, last - first)
    return first - margin <= int(rounds.came_ns[0]) <= last + margin


def _messages(
    parts: Sequence[RankPart],
    transfers: MatchedTransfers,
    blocks: Sequence[MatchedCollectives],
    base: Index,
) -> _Arrows:
    columns = (transfers.sender, transfers.send, transfers.receiver, transfers.recv)
    messages = [
        (
            sender,
            receiver,
            float(parts[sender].calls.start_ns[send] - base[sender]),
            float(parts[receiver].calls.end_ns[recv] - base[receiver]),
        )
        for sender, send, receiver, recv in zip(*(c.tolist() for c in columns), strict=True)
    ]
    messages += [message for block in blocks for message in _broadcasts(parts, block, base)]
    table = np.array(messages, np.float64).reshape(-1, 4)
    return _Arrows(
        sender=table[:, 0].astype(np.intp),
        receiver=table[:, 1].astype(np.intp),
        sent=table[:, 2] - READING_NS,
        received=table[:, 3] + READING_NS,
    )


def _broadcasts(
    parts: Sequence[RankPart], block: MatchedCollectives, base: Index
) -> list[tuple[int, int, float, float]]:
    """(root, member, began, ended): no member has the data before the root begins to send."""
    messages = []
    number = {parts[part].rank: place for place, part in enumerate(block.members.tolist())}
    for row in np.flatnonzero(block.kind == _BROADCAST).tolist():
        present = np.flatnonzero(block.row[row] >= 0).tolist()
        first = int(block.members[present[0]])
        root = number.get(int(parts[first].calls.peer[block.row[row, present[0]]]), -1)
        if root not in present:
            continue
        from_part = int(block.members[root])
        began = float(parts[from_part].calls.start_ns[block.row[row, root]] - base[from_part])
        for place in present:
            to_part = int(block.members[place])
            if place != root:
                ended = parts[to_part].calls.end_ns[block.row[row, place]] - base[to_part]
                messages.append((from_part, to_part, began, float(ended)))
    return messages


# Solving for the offsets


def _fit(problem: _Problem, rough: Float, bins: int) -> Clock:
    drift = np.zeros(len(rough))
    wobble = np.full(len(rough), MAX_DRIFT)  # uncertainty of the drift, on either side
    wobble[problem.reference] = 0.0
    reached = np.isfinite(rough)
    for _ in range(_PASSES):
        bounds = _bin_bounds(problem, rough, drift, wobble, bins)
        least, most = _slopes(bounds, drift, wobble)
        if (least > most)[reached].any():
            raise _Contradiction("no steady drift explains them")
        drift, wobble = (least + most) / 2, (most - least) / 2
        drift[problem.reference] = wobble[problem.reference] = 0.0
    return _describe(problem, bounds, drift, wobble, reached)


def _rough(problem: _Problem) -> Float:
    """Offsets that allow for the largest drift over the whole window; infinite if unconnected."""
    edges, arrows = problem.edges, problem.arrows
    span = float(edges.end.max() - edges.start.min()) if len(edges.part) else 0.0
    if len(arrows.sent):
        span = max(span, float(arrows.received.max() - arrows.sent.min()))
    slack = span * MAX_DRIFT
    low, high = _propagate(
        edges.part, edges.meeting, edges.start - slack, edges.end + slack,
        arrows.sender, arrows.receiver, arrows.received - arrows.sent + 2 * slack,
        np.array([problem.reference]), len(problem.parts),
    )  # fmt: skip
    one_sided = np.where(np.isfinite(high), high, low)
    both = np.isfinite(high) & np.isfinite(low)
    return np.where(both, (np.where(both, low, 0.0) + np.where(both, high, 0.0)) / 2, one_sided)


def _bin_bounds(problem: _Problem, rough: Float, drift: Float, wobble: Float, bins: int) -> _Bounds:
    """Bound each bin by itself: within one, a drifting clock nearly stands still."""
    edges, arrows = problem.edges, problem.arrows
    on_reference = (edges.start + edges.end) / 2 - rough[edges.part]
    rough_middle = (rough[arrows.sender] + rough[arrows.receiver]) / 2
    sent_at = (arrows.sent + arrows.received) / 2 - rough_middle
    times = np.concatenate((on_reference, sent_at))
    times = times[np.isfinite(times)]
    first, last = (float(times.min()), float(times.max())) if len(times) else (0.0, 0.0)
    width = max(1.0, (last - first) / bins)

    def find_bin(at: Float) -> Index:
        safe = np.where(np.isfinite(at), at, first)
        return np.clip((safe - first) // width, 0, bins - 1).astype(np.intp)

    meeting_bin = find_bin(_smallest_in_group(edges.meeting, on_reference))
    which = meeting_bin[edges.meeting] if len(edges.meeting) else edges.meeting
    message_bin = find_bin(sent_at)
    middle = np.asarray(first + (np.arange(bins) + 0.5) * width, np.float64)

    def without_drift(part: Index, local: Float, bin_: Index) -> tuple[Float, Float]:
        """A local time with the drift within the bin removed, and how far off that may be."""
        since = local - np.where(np.isfinite(rough[part]), rough[part], 0.0) - middle[bin_]
        return local - drift[part] * since, wobble[part] * np.abs(since)

    start, early = without_drift(edges.part, edges.start, which)
    end, late = without_drift(edges.part, edges.end, which)
    sent, sent_slack = without_drift(arrows.sender, arrows.sent, message_bin)
    received, received_slack = without_drift(arrows.receiver, arrows.received, message_bin)
    parts = len(rough)
    low, high = _propagate(
        edges.part * bins + which, edges.meeting, start - early, end + late,
        arrows.sender * bins + message_bin, arrows.receiver * bins + message_bin,
        received - sent + sent_slack + received_slack,
        problem.reference * bins + np.arange(bins), parts * bins,
    )  # fmt: skip
    return _Bounds(low=low.reshape(parts, bins), high=high.reshape(parts, bins), at=middle)


def _smallest_in_group(group: Index, values: Float) -> Float:
    if not len(group):
        return np.empty(0)
    smallest = np.full(int(group.max()) + 1, _INF)
    np.minimum.at(smallest, group, np.where(np.isfinite(values), values, _INF))
    return smallest


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
    """Bound every node's offset by shortest paths from the known nodes.

    In a meeting at true time t, start <= t + offset <= end holds for every node in it.
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
    """The smallest and largest drift of lines through all bins."""
    least, most = drift - wobble, drift + wobble
    for i, j in combinations(range(len(bounds.at)), 2):
        apart = bounds.at[j] - bounds.at[i]
        with np.errstate(invalid="ignore"):
            rise = (bounds.high[:, j] - bounds.low[:, i]) / apart
            fall = (bounds.low[:, j] - bounds.high[:, i]) / apart
        most = np.minimum(most, np.where(np.isfinite(rise), rise, _INF))
        least = np.maximum(least, np.where(np.isfinite(fall), fall, -_INF))
    return least, most


def _possible_offsets(
    bounds: _Bounds, drift: Float, wobble: Float, at: float
) -> tuple[Float, Float]:
    """The possible offsets at a time: every bin's bounds, moved there by any possible drift, and
    the straight line between two bins."""
    away = at - bounds.at
    up = drift[:, None] * away + wobble[:, None] * np.abs(away)
    down = drift[:, None] * away - wobble[:, None] * np.abs(away)
    low, high = (bounds.low + down).max(axis=1), (bounds.high + up).min(axis=1)
    for i, j in combinations(range(len(bounds.at)), 2):
        if bounds.at[i] <= at <= bounds.at[j]:
            part = (at - bounds.at[i]) / (bounds.at[j] - bounds.at[i])
            high = np.minimum(high, (1 - part) * bounds.high[:, i] + part * bounds.high[:, j])
            low = np.maximum(low, (1 - part) * bounds.low[:, i] + part * bounds.low[:, j])
    return low, high


def _describe(
    problem: _Problem, bounds: _Bounds, drift: Float, wobble: Float, reached: Flags
) -> Clock:
    parts, base, reference = problem.parts, problem.base, problem.reference
    half = (bounds.at[1] - bounds.at[0]) / 2
    moments = (bounds.at[0] - half, (bounds.at[0] + bounds.at[-1]) / 2, bounds.at[-1] + half)
    lows, highs = zip(
        *(_possible_offsets(bounds, drift, wobble, at) for at in moments), strict=True
    )
    if any((low > high)[reached].any() for low, high in zip(lows, highs, strict=True)):
        raise _Contradiction("no steady drift explains them")
    with np.errstate(invalid="ignore"):  # for a rank that is bounded on one side only
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
    aligned = np.flatnonzero(reached & np.isfinite(error)).tolist()
    unconnected = tuple(parts[i].rank for i in range(len(parts)) if i not in set(aligned))
    used = set(problem.edges.source.tolist())
    known = enumerate(("collectives", "rounds"))
    sources = tuple(name for code, name in known if code in used) or ("messages",)
    detail = f"from {' and '.join(sources)}"
    if unconnected:
        ranks = ", ".join(map(str, unconnected[:8]))
        detail += f"; rank {ranks} shares nothing with the others"
    return Clock(
        aligned=len(aligned) > 1,
        reference=parts[reference].rank,
        at_ns=round(moments[1]) + int(base[reference]),
        offset_ns={parts[i].rank: round(line[i]) + int(base[i] - base[reference]) for i in aligned},
        error_ns={parts[i].rank: int(np.ceil(error[i])) for i in aligned},
        drift_ppm={parts[i].rank: float(drift[i] * 1e6) for i in aligned},
        sources=sources,
        unconnected=unconnected,
        detail=detail,
    )
