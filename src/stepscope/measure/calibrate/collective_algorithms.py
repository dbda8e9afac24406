"""all_reduce, all_gather and reduce_scatter by algorithm, on send and receive: any schedule
of records/collectives, run on tensors. Here and not in fix, because nobody trains with
these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepscope.errors import StepscopeError, UsageError
from stepscope.records.collective_schedules import (
    CollectiveSchedule,
    Message,
    build_schedule,
    chunk_bounds,
    runs,
)

if TYPE_CHECKING:
    import datetime

    Span = tuple[int, int]

# all_reduce(tensor, "ring")
# all_gather(output, share, "bruck")
# reduce_scatter(share, tensor, "halving_doubling")


def all_reduce(
    tensor: torch.Tensor,
    algorithm: str,
    *,
    group: Any = None,
    hosts: Sequence[Sequence[int]] | None = None,
    timeout: datetime.timedelta | None = None,
) -> None:
    """Sum a tensor of any shape over all ranks, in place. `hosts` lists each host's ranks."""
    flat = tensor.detach().reshape(-1)  # a copy where it is not contiguous
    _run("all_reduce", flat, algorithm, group, hosts, timeout)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def all_gather(
    output: torch.Tensor,
    share: torch.Tensor,
    algorithm: str,
    *,
    group: Any = None,
    hosts: Sequence[Sequence[int]] | None = None,
    timeout: datetime.timedelta | None = None,
) -> None:
    """Every rank's share, one after the other, in `output` on all ranks."""
    flat = _flat_whole(output, share, group)
    rank, count = dist.get_rank(group), share.numel()
    flat[rank * count : (rank + 1) * count].copy_(share.detach().reshape(-1))
    _run("all_gather", flat, algorithm, group, hosts, timeout)


def reduce_scatter(
    share: torch.Tensor,
    tensor: torch.Tensor,
    algorithm: str,
    *,
    group: Any = None,
    hosts: Sequence[Sequence[int]] | None = None,
    timeout: datetime.timedelta | None = None,
) -> None:
    """This rank's share of the sum over all ranks; `tensor` stays as it is."""
    flat = _flat_whole(tensor, share, group).clone()
    _run("reduce_scatter", flat, algorithm, group, hosts, timeout)
    rank, count = dist.get_rank(group), share.numel()
    share.detach().view(-1).copy_(flat[rank * count : (rank + 1) * count])


def _run(
    kind: str,
    flat: torch.Tensor,
    algorithm: str,
    group: Any,
    hosts: Sequence[Sequence[int]] | None,
    timeout: datetime.timedelta | None,
) -> None:
    schedule = build_schedule(algorithm, kind, dist.get_world_size(group), hosts)
    ScheduleRunner(schedule, flat, group=group, timeout=timeout).run(flat)


def _flat_whole(whole: torch.Tensor, share: torch.Tensor, group: Any) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    if whole.numel() != ranks * share.numel() or whole.dtype != share.dtype:
        raise UsageError(
            f"the whole has {whole.numel()} elements of {whole.dtype}; {ranks} ranks with shares "
            f"of {share.numel()} of {share.dtype} need {ranks * share.numel()} of that dtype"
        )
    if not whole.is_contiguous() or not share.is_contiguous():
        raise UsageError("all_gather and reduce_scatter need contiguous tensors")
    return whole.detach().view(-1)


# Runs one rank's plan on a tensor, step by step.


class LostRankError(StepscopeError):
    """Another rank ended or stopped answering in the middle of a collective."""


class ScheduleRunner:
    """One rank's part of a schedule, for flat tensors of one size, dtype and device.

    Every rank of `group` runs the same schedule with the same size. Sums add what comes to what is
    there, in the order of the schedule: all ranks get the same bits. bool adds as torch does: or.
    """

    def __init__(
        self,
        schedule: CollectiveSchedule,
        like: torch.Tensor,
        *,
        group: Any = None,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        self._schedule = schedule
        self._group = group if group is not None else dist.group.WORLD
        self._rank = dist.get_rank(self._group)
        self._world_ranks = dist.get_process_group_ranks(self._group)
        self._nccl = dist.get_backend(self._group) == "nccl"
        self._timeout = timeout
        self._plan: RankPlan = plan_rank(
            schedule, self._rank, like.numel(), look_ahead=0 if self._nccl else 1
        )
        self._scratch = [
            torch.empty(self._plan.slot_elements, dtype=like.dtype, device=like.device)
            for _ in range(self._plan.slots)
        ]

    def run(self, vector: torch.Tensor) -> None:
        """In place. Raises LostRankError."""
        waiting: dict[Incoming, Any] = {}
        for step in range(len(self._schedule.steps)):
            sends = self._plan.sends[step]
            posts = self._plan.posts[step]
            packed = [_packed(vector, one) for one in sends]
            peers = [one.peer for one in posts] + [one.peer for one in sends]
            operations = [
                self._operation(dist.irecv, self._target(one, vector), one.peer) for one in posts
            ]
            operations += [
                self._operation(dist.isend, tensor, one.peer)
                for one, tensor in zip(sends, packed, strict=True)
            ]
            try:
                works = dist.batch_isend_irecv(operations) if operations else []
            except RuntimeError as error:
                raise self._lost(step, peers, error) from None
            if self._nccl:  # one piece of work for all of them
                waiting.clear()
                self._wait(works, step, peers)
            else:
                waiting |= zip(posts, works[: len(posts)], strict=True)
                for one in self._plan.arrivals[step]:
                    self._wait([waiting.pop(one)], step, [one.peer])
                for sent, work in zip(sends, works[len(posts) :], strict=True):
                    self._wait([work], step, [sent.peer])
            for one in self._plan.arrivals[step]:
                self._put(one, vector)

    def _target(self, one: Incoming, vector: torch.Tensor) -> torch.Tensor:
        if one.in_place:
            ((start, end),) = one.spans
            return vector[start:end]
        return self._scratch[one.slot][one.place : one.place + one.elements]

    def _operation(self, call: Any, tensor: torch.Tensor, peer: int) -> Any:
        return dist.P2POp(call, tensor, self._world_ranks[peer], self._group)

    def _wait(self, works: list[Any], step: int, peers: list[int]) -> None:
        try:
            for work in works:
                # NCCL would block the host with a timeout; its watchdog has one of its own.
                if self._timeout is None or self._nccl:
                    work.wait()
                else:
                    work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(step, peers, error) from None

    def _put(self, one: Incoming, vector: torch.Tensor) -> None:
        if one.in_place:
            return
        came = self._target(one, vector)
        begin = 0
        for start, end in one.spans:
            part = came[begin : begin + end - start]
            if one.adds:
                vector[start:end].add_(part)
            else:
                vector[start:end].copy_(part)
            begin += end - start

    def _lost(self, step: int, peers: list[int], error: RuntimeError) -> LostRankError:
        whom = ", ".join(map(str, sorted(set(peers))))
        return LostRankError(
            f"{self._schedule.algorithm} {self._schedule.kind}: rank {self._rank} lost rank {whom} "
            f"in step {step + 1} of {len(self._schedule.steps)}: it ended or did not answer in "
            f"time ({short_reason(error)})"
        )


def _packed(vector: torch.Tensor, one: Outgoing) -> torch.Tensor:
    """A single stretch as it lies in the vector; several, copied side by side."""
    parts = [vector[start:end] for start, end in one.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def short_reason(error: RuntimeError) -> str:
    """The first sentence of a backend's message, without the place in its source."""
    line = str(error).strip().split("\n")[0]
    return re.sub(r"^\[\S*\] ?", "", line).split(". ")[0][:160] or type(error).__name__


# One rank's part of a schedule: what it sends and gets in each step, and where that is put.
#
# A receive is posted one step early (`look_ahead`), into scratch space if what it would overwrite
# is still needed. Under gloo a sender waits until it hears that the receive was posted; early posts
# take that round trip out of every step. NCCL runs a step's sends and receives as one operation:
# there it is 0.


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
