"""How long whole steps take, and what the allocator holds in them; nothing is changed for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.saved.graph_capture import is_capturing
from stepscope.fix.saved.step_record import NodePeak, StepSurroundings

if TYPE_CHECKING:
    from collections.abc import Hashable

_MOST_PASSES = 512  # plain ones must not be forgotten before the last plan is tried
STRETCH = 3  # steps
_FASTER = 0.9  # of a step: what the host needs where it is clearly ahead of the device
PLAIN, RECORDED, FOLLOWED, OUTDATED = "plain", "recorded", "followed", "outdated"


@dataclass(slots=True)
class _Begun:
    """One pass: which kind of inputs, what was done with it, and when it began."""

    key: Hashable
    kind: str
    mark: Any  # a CUDA event, or nanoseconds; None in the capture of a CUDA graph
    host_ns: int = 0  # when the host began it


class StepWatch:
    """From the beginning of one pass to that of the next."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.begun_bytes: int | None = None
        self._passes: list[_Begun] = []
        self._first = True

    def begins(self, key: Hashable, device: torch.device) -> None:
        self.device = device
        self.begun_bytes = allocated_bytes(self.device)
        if self._first:  # kernels are loaded in it
            self._first = False
            return
        self._passes.append(_Begun(key, PLAIN, _mark(self.device), time.perf_counter_ns()))
        del self._passes[:-_MOST_PASSES]

    def is_of(self, kind: str) -> None:
        """What is done with the pass that has begun."""
        if self._passes:
            self._passes[-1].kind = kind

    def forget_followed(self) -> None:
        """Later passes follow another plan."""
        for one in self._passes:
            if one.kind == FOLLOWED:
                one.kind = OUTDATED

    def steps_ns(self, key: Hashable, kind: str) -> list[int]:
        """Of all passes of a kind that another has followed."""
        marks = [one.mark for one in self._passes if one.mark is not None]
        if self.device.type == "cuda" and marks:
            marks[-1].synchronize()
        pairs = zip(self._passes, self._passes[1:], strict=False)
        return [
            _between_ns(one.mark, following.mark)
            for one, following in pairs
            if one.key == key and one.kind == kind and _have_marks(one, following)
        ]

    def latest_steps_ns(self, key: Hashable, kind: str, count: int) -> list[int]:
        """Of the last `count` of a kind that the device is done with: nobody waits."""
        steps: list[int] = []
        for following, one in pairwise(reversed(self._passes)):
            if len(steps) == count:
                break
            of_kind = one.key == key and one.kind == kind
            if of_kind and _have_marks(one, following) and _is_over(following.mark):
                steps.append(_between_ns(one.mark, following.mark))
        return steps[::-1]

    def plain_ns(self, key: Hashable) -> int | None:
        """Of a step before there was a plan. On a GPU in the fastest stretch: first steps also load
        kernels and find memory."""
        steps = self.steps_ns(key, PLAIN)
        if not steps:
            return None
        return min(stretches_ns(steps)) if self.device.type == "cuda" else round(median(steps))

    def host_slack_ns(self, key: Hashable) -> int | None:
        """By which the host is faster than the device. It runs ahead until its queue is full: its
        fastest step tells. None where it is hardly faster: it may be what the device waits for,
        or wait for the device in every step."""
        plain_ns = self.plain_ns(key)
        steps = [
            following.host_ns - one.host_ns
            for one, following in zip(self._passes, self._passes[1:], strict=False)
            if one.key == key and one.kind == PLAIN
        ]
        if plain_ns is None or not steps or min(steps) > _FASTER * plain_ns:
            return None
        return plain_ns - min(steps)

    def typical_ns(self, key: Hashable, kind: str) -> int | None:
        steps = self.steps_ns(key, kind)
        return round(median(steps)) if steps else None

    def has_room(self, recorded: StepSurroundings | None, peak_bytes: int | None) -> bool:
        """Whether a step fits that needs so much beside what was allocated when a pass was
        recorded; more may be by now."""
        limit = _limit_bytes(self.device)
        if recorded is None or peak_bytes is None or limit is None or self.begun_bytes is None:
            return True
        return peak_bytes + self.begun_bytes - recorded.begun_bytes <= recorded.usable_bytes(limit)

    def surroundings(self, parameters: list[torch.Tensor]) -> StepSurroundings | None:
        """At the end of the pass that began last."""
        ended = allocated_bytes(self.device)
        if self.begun_bytes is None or ended is None:
            return None
        missing = [p for p in parameters if p.requires_grad and p.grad is None]
        return StepSurroundings(
            begun_bytes=self.begun_bytes,
            ended_bytes=ended,
            gradient_bytes=sum(p.nbytes for p in missing),
            limit_bytes=_limit_bytes(self.device),
            expandable=any(one.get("is_expandable") for one in torch.cuda.memory_snapshot()),
        )


class BackwardPeaks:
    """The most that was allocated while each node of one backward pass ran, before the first of
    them, and after the last. Torch's own figure of the peak starts anew with every node."""

    def __init__(self, device: torch.device) -> None:
        self.readings: list[NodePeak] = []
        self._device = device
        self._read: int | None = None
        self._node_bytes: int | None = None  # the most until the node had run
        self._ran_bytes = 0  # and what was there then
        self._open = device.type == "cuda"
        if self._open:
            self._start()

    def reads(self, use: int) -> None:
        if self._open:
            self._note()
            self._read = use

    def node_ran(self) -> None:
        """What it read goes now, before anything else is allocated."""
        if self._open and self._node_bytes is None:
            self._node_bytes = int(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
            self._ran_bytes = allocated_bytes(self._device) or 0

    def end(self) -> None:
        """Another pass begins."""
        if self._open:
            self._note()
            self._open = False

    def _start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._begun_bytes = allocated_bytes(self._device)

    def _note(self) -> None:
        latest_bytes = int(torch.cuda.max_memory_allocated(self._device))
        peak_bytes = latest_bytes if self._node_bytes is None else self._node_bytes
        # What is there before the node's tensors go says nothing about the time after.
        was_more = self._node_bytes is not None and latest_bytes > self._ran_bytes
        after_bytes = latest_bytes if was_more else None
        reading = NodePeak(self._read, peak_bytes, self._begun_bytes, after_bytes)
        self.readings.append(reading)
        self._node_bytes = None
        self._start()


def stretches_ns(steps: list[int]) -> list[int]:
    """A step's time over every few steps in a row; single ones where there are not enough."""
    if len(steps) < STRETCH:
        return steps
    rows = zip(*(steps[first:] for first in range(STRETCH)), strict=False)
    return [round(mean(row)) for row in rows]


def allocated_bytes(device: torch.device) -> int | None:
    """None where torch keeps no account. As `torch.cuda.memory_allocated`, which sorts all figures
    first: 19 instead of 118 microseconds (H200)."""
    if device.type != "cuda":
        return None
    account = torch.cuda.memory_stats_as_nested_dict(device)
    return int(account["allocated_bytes"]["all"]["current"]) if account else 0


def _limit_bytes(device: torch.device) -> int | None:
    """What this process may allocate: its share of the device, and what others left of it."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)(device)
    return min(int(share * total), int(free) + int(torch.cuda.memory_reserved(device)))


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter_ns()
    if is_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _have_marks(*passes: _Begun) -> bool:
    return all(one.mark is not None for one in passes)


def _is_over(mark: Any) -> bool:
    return isinstance(mark, int) or bool(mark.query())


def _between_ns(one: Any, following: Any) -> int:
    if isinstance(one, int):
        return int(following) - one
    return round(float(one.elapsed_time(following)) * 1e6)
