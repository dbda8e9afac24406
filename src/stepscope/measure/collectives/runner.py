"""Runs one rank's plan on a tensor, step by step."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepscope.errors import StepscopeError
from stepscope.measure.collectives.plan import plan_rank

if TYPE_CHECKING:
    import datetime

    from stepscope.measure.collectives.plan import Incoming, Outgoing, RankPlan
    from stepscope.records.collectives.schedule import CollectiveSchedule


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
            operations = [self._receive(one, vector) for one in posts]
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

    def _receive(self, one: Incoming, vector: torch.Tensor) -> Any:
        return self._operation(dist.irecv, self._target(one, vector), one.peer)

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
