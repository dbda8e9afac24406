"""all_reduce, all_gather and reduce_scatter by algorithm, on send and receive: any schedule
of records/collectives, run on tensors. Here and not in fix, because nobody trains with
these.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist

from stepscope.errors import StepscopeError, UsageError
from stepscope.records.collective_schedules import (
    CollectiveSchedule,
    Transfer,
    build_schedule,
    chunk_bounds,
    runs,
)

Span = tuple[int, int]

# all_reduce(tensor, "ring")
# all_gather(output, share, "bruck")
# reduce_scatter(share, tensor, "halving_doubling")


class Options(TypedDict, total=False):
    """Of every collective; `hosts` lists each host's ranks."""

    group: Any
    hosts: Sequence[Sequence[int]] | None
    timeout: datetime.timedelta | None


def all_reduce(tensor: torch.Tensor, algorithm: str, **options: Unpack[Options]) -> None:
    """Sum a tensor of any shape over all ranks, in place."""
    flat = tensor.detach().reshape(-1)  # a copy where it is not contiguous
    _run("all_reduce", flat, algorithm, options)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def all_gather(
    output: torch.Tensor, share: torch.Tensor, algorithm: str, **options: Unpack[Options]
) -> None:
    """Put every rank's share, one after the other, into `output` on all ranks."""
    flat, here = _flat_and_share(output, share, options.get("group"))
    flat[here].copy_(share.detach().reshape(-1))
    _run("all_gather", flat, algorithm, options)


def reduce_scatter(
    share: torch.Tensor, tensor: torch.Tensor, algorithm: str, **options: Unpack[Options]
) -> None:
    """Put the sum of this rank's part over all ranks into `share`; `tensor` stays as it is."""
    flat, here = _flat_and_share(tensor, share, options.get("group"))
    flat = flat.clone()
    _run("reduce_scatter", flat, algorithm, options)
    share.detach().view(-1).copy_(flat[here])


def _run(kind: str, flat: torch.Tensor, algorithm: str, options: Options) -> None:
    group = options.get("group")
    ranks = dist.get_world_size(group)
    schedule = build_schedule(algorithm, kind, ranks, options.get("hosts"))
    ScheduleRunner(schedule, flat, group=group, timeout=options.get("timeout")).run(flat)


def _flat_and_share(
    whole: torch.Tensor, share: torch.Tensor, group: Any
) -> tuple[torch.Tensor, slice]:
    """Return the whole as one row, and where this rank's share lies in it."""
    ranks, count = dist.get_world_size(group), share.numel()
    if whole.numel() != ranks * count or whole.dtype != share.dtype:
        raise UsageError(
            f"the whole has {whole.numel()} elements of {whole.dtype}; {ranks} ranks with shares "
            f"of {count} of {share.dtype} need {ranks * count} of that dtype"
        )
    if not whole.is_contiguous() or not share.is_contiguous():
        raise UsageError("all_gather and reduce_scatter need contiguous tensors")
    rank = dist.get_rank(group)
    return whole.detach().view(-1), slice(rank * count, (rank + 1) * count)


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
        # NCCL would block the host with a timeout; its watchdog has one of its own.
        self._patience = () if timeout is None or self._nccl else (timeout,)
        look_ahead = 0 if self._nccl else 1
        self._plan = plan_rank(schedule, self._rank, like.numel(), look_ahead=look_ahead)
        self._scratch = [
            torch.empty(self._plan.slot_elements, dtype=like.dtype, device=like.device)
            for _ in range(self._plan.slots)
        ]

    def run(self, vector: torch.Tensor) -> None:
        """In place. Raises LostRankError."""
        waiting: dict[Incoming, Any] = {}
        for step in range(len(self._schedule.steps)):
            sends, posts = self._plan.sends[step], self._plan.posts[step]
            # A single stretch as it lies in the vector; several, copied side by side.
            parts = [[vector[start:end] for start, end in send.spans] for send in sends]
            packed = [part[0] if len(part) == 1 else torch.cat(part) for part in parts]
            operations = [
                self._operation(dist.irecv, self._target(post, vector), post.peer) for post in posts
            ]
            operations += [
                self._operation(dist.isend, tensor, send.peer)
                for send, tensor in zip(sends, packed, strict=True)
            ]
            peers = [post.peer for post in posts] + [send.peer for send in sends]
            try:
                works = dist.batch_isend_irecv(operations) if operations else []
            except RuntimeError as error:
                raise self._lost(step, peers, error) from None
            if self._nccl:  # one piece of work for all of them
                waiting.clear()
                self._wait(works, step, peers)
            else:
                waiting |= zip(posts, works[: len(posts)], strict=True)
                for arrival in self._plan.arrivals[step]:
                    self._wait([waiting.pop(arrival)], step, [arrival.peer])
                for sent, work in zip(sends, works[len(posts) :], strict=True):
                    self._wait([work], step, [sent.peer])
            for arrival in self._plan.arrivals[step]:
                if not arrival.in_place:
                    self._put(arrival, vector)

    def _target(self, arrival: Incoming, vector: torch.Tensor) -> torch.Tensor:
        if arrival.in_place:
            ((start, end),) = arrival.spans
            return vector[start:end]
        return self._scratch[arrival.slot][arrival.place : arrival.place + arrival.elements]

    def _operation(self, call: Any, tensor: torch.Tensor, peer: int) -> Any:
        return dist.P2POp(call, tensor, self._world_ranks[peer], self._group)

    def _wait(self, works: list[Any], step: int, peers: list[int]) -> None:
        try:
            for work in works:
                work.wait(*self._patience)
        except RuntimeError as error:
            raise self._lost(step, peers, error) from None

    def _put(self, arrival: Incoming, vector: torch.Tensor) -> None:
        came, begin = self._target(arrival, vector), 0
        for start, end in arrival.spans:
            part = came[begin : begin + end - start]
            if arrival.adds:
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


def short_reason(error: RuntimeError) -> str:
    """Return the first sentence of a backend's message, without the place in its source."""
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
    """Return the part of `rank` for a vector of `count` elements; empty messages are left out.

    Sums, scattered chunks and chunks that are in use when the receive is posted go through scratch
    space, of as many steps as can be under way at once, in turns."""
    bounds = chunk_bounds(count, schedule.chunks)
    sends: list[tuple[Outgoing, ...]] = []
    arrivals: list[tuple[Incoming, ...]] = []
    posts: list[list[Incoming]] = [[] for _ in schedule.steps]
    touched = [-1] * schedule.chunks  # the last step that used each chunk here
    slots, slot_elements = look_ahead + 1, 0
    for number, step in enumerate(schedule.steps):
        outgoing = [message for message in step if message.source == rank]
        coming = [message for message in step if message.target == rank]
        leaving = {chunk for message in outgoing for chunk in message.chunks}
        used = {*leaving}
        sends.append(
            tuple(
                Outgoing(peer=message.target, spans=spans)
                for message in outgoing
                if (spans := _spans(message, bounds))
            )
        )
        post_at, filled, arriving = max(0, number - look_ahead), 0, []
        for message in coming:
            if not (spans := _spans(message, bounds)):
                continue
            in_use = any(touched[chunk] >= post_at or chunk in leaving for chunk in message.chunks)
            in_place = not message.adds and not in_use and len(spans) == 1
            arrival = Incoming(
                peer=message.source,
                spans=spans,
                adds=message.adds,
                in_place=in_place,
                step=number,
                post_at=post_at,
                slot=0 if in_place else number % slots,
                place=0 if in_place else filled,
            )
            filled += 0 if in_place else arrival.elements
            arriving.append(arrival)
            used.update(message.chunks)
        slot_elements = max(slot_elements, filled)
        arrivals.append(tuple(arriving))
        posts[post_at] += arriving
        for chunk in used:
            touched[chunk] = number
    return RankPlan(
        posts=tuple(map(tuple, posts)),
        sends=tuple(sends),
        arrivals=tuple(arrivals),
        slots=slots,
        slot_elements=slot_elements,
    )


def _spans(message: Transfer, bounds: list[int]) -> tuple[Span, ...]:
    spans = ((bounds[first], bounds[end]) for first, end in runs(message.chunks))
    return tuple(span for span in spans if span[0] < span[1])
