"""One rank's part of a schedule: what it sends and gets in each step, and where that is put.

A receive is posted one step early (`look_ahead`), into scratch space if what it would overwrite is
still needed. Under gloo a sender waits until it hears that the receive was posted; early posts take
that round trip out of every step. NCCL runs a step's sends and receives as one operation: there it
is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.collectives.schedule import chunk_bounds, runs

if TYPE_CHECKING:
    from stepscope.records.collectives.schedule import CollectiveSchedule, Message

    Span = tuple[int, int]  # elements: the first, and the one after the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What this rank sends to one other."""

    peer: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """What this rank gets from one other; with `in_place` it is received where it stays."""

    peer: int
    spans: tuple[Span, ...]
    adds: bool
    in_place: bool
    step: int
    post_at: int
    slot: int  # of the scratch space
    place: int  # in the slot, in elements

    @property
    def elements(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """By step: what to post, to send, and to wait for."""

    posts: tuple[tuple[Incoming, ...], ...]
    sends: tuple[tuple[Outgoing, ...], ...]
    arrivals: tuple[tuple[Incoming, ...], ...]
    slots: int  # of scratch space
    slot_elements: int


def plan_rank(
    schedule: CollectiveSchedule, rank: int, count: int, *, look_ahead: int = 1
) -> RankPlan:
    """The part of `rank` for a vector of `count` elements; empty messages are left out."""
    bounds = chunk_bounds(count, schedule.chunks)
    sends, arrivals = [], []
    touched = [-1] * schedule.chunks  # the last step that used each chunk here
    slots = _Slots(look_ahead + 1)
    for number, step in enumerate(schedule.steps):
        leaving = {chunk for one in step if one.source == rank for chunk in one.chunks}
        sends.append(_outgoing(step, rank, bounds))
        coming = [one for one in step if one.target == rank and _spans(one, bounds)]
        arrivals.append(
            tuple(_incoming(one, number, bounds, touched, leaving, slots) for one in coming)
        )
        for chunk in leaving.union(*(one.chunks for one in coming)):
            touched[chunk] = number
    posts: list[list[Incoming]] = [[] for _ in schedule.steps]
    for arriving in arrivals:
        for one in arriving:
            posts[one.post_at].append(one)
    return RankPlan(
        posts=tuple(map(tuple, posts)),
        sends=tuple(sends),
        arrivals=tuple(arrivals),
        slots=slots.count,
        slot_elements=slots.size,
    )


class _Slots:
    """Scratch space of as many steps as can be under way at once, in turns."""

    def __init__(self, count: int) -> None:
        self.count, self.size = count, 0
        self._used: dict[int, int] = {}

    def take(self, step: int, elements: int) -> tuple[int, int]:
        """Which slot, and the place in it."""
        place = self._used.get(step, 0)
        self._used[step] = place + elements
        self.size = max(self.size, place + elements)
        return step % self.count, place


def _spans(message: Message, bounds: list[int]) -> tuple[Span, ...]:
    spans = ((bounds[first], bounds[end]) for first, end in runs(message.chunks))
    return tuple(span for span in spans if span[0] < span[1])


def _outgoing(step: tuple[Message, ...], rank: int, bounds: list[int]) -> tuple[Outgoing, ...]:
    return tuple(
        Outgoing(peer=one.target, spans=spans)
        for one in step
        if one.source == rank and (spans := _spans(one, bounds))
    )


def _incoming(
    message: Message,
    step: int,
    bounds: list[int],
    touched: list[int],
    leaving: set[int],
    slots: _Slots,
) -> Incoming:
    """Sums, scattered chunks and chunks that are in use when the receive is posted go through
    scratch space."""
    spans = _spans(message, bounds)
    post_at = max(0, step - slots.count + 1)
    in_use = any(touched[chunk] >= post_at or chunk in leaving for chunk in message.chunks)
    in_place = not message.adds and not in_use and len(spans) == 1
    slot, place = 0, 0
    if not in_place:
        slot, place = slots.take(step, sum(end - start for start, end in spans))
    return Incoming(
        peer=message.source,
        spans=spans,
        adds=message.adds,
        in_place=in_place,
        step=step,
        post_at=post_at,
        slot=slot,
        place=place,
    )
