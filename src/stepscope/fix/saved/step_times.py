"""How long whole steps take, what the allocator holds in them, and what following a plan costs
the host.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn

from stepscope.fix.saved.follower import FollowedPlan, PlanFollower, unpack_held
from stepscope.fix.saved.operators import is_capturing
from stepscope.fix.saved.planner import make_plan
from stepscope.fix.saved.recorder import StepRecorder
from stepscope.fix.saved.save_plan import KEEP, SavePlan
from stepscope.fix.saved.step_record import BackwardReading, StepSurroundings
from stepscope.records.change_values import MemoryTarget

_MOST_PASSES = 64
_FASTER = 0.9  # of a step: what the host needs where it is clearly ahead of the device
PLAIN, RECORDED, FOLLOWED = "plain", "recorded", "followed"


@dataclass(slots=True)
class _Begun:
    """One pass: which kind of inputs, what was done with it, and when it began."""

    key: Hashable
    kind: str
    mark: Any  # a CUDA event, or nanoseconds; None in the capture of a CUDA graph
    host_ns: int  # when the host began it


class StepWatch:
    """From the beginning of one pass to that of the next."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.begun_bytes: int | None = None
        self._passes: deque[_Begun] = deque(maxlen=_MOST_PASSES)
        self._first = True

    def begins(self, key: Hashable, device: torch.device) -> None:
        self.device = device
        self.begun_bytes = allocated_bytes(device)
        if self._first:  # kernels are loaded in it
            self._first = False
        else:
            self._passes.append(_Begun(key, PLAIN, _mark(device), time.perf_counter_ns()))

    def is_of(self, kind: str) -> None:
        """What is done with the pass that has begun."""
        if self._passes:
            self._passes[-1].kind = kind

    def forget_followed(self) -> None:
        """Later passes follow another plan."""
        for one in self._passes:
            one.kind = RECORDED if one.kind == FOLLOWED else one.kind

    def step_ns(self, key: Hashable, kind: str) -> int | None:
        """Return the median of all steps of a kind that another pass has followed."""
        steps = [
            (one.mark, following.mark)
            for one, following in self._pairs(key, kind)
            if one.mark is not None and following.mark is not None
        ]
        if steps and self.device.type == "cuda":
            steps[-1][1].synchronize()
        return round(median(_between_ns(*marks) for marks in steps)) if steps else None

    def slack_ns(self, key: Hashable) -> int:
        """By which the host is faster than the device. It runs ahead until its queue is full: its
        fastest step tells. 0 where it is hardly faster: the device may wait for it."""
        plain_ns = self.step_ns(key, PLAIN) if self.device.type == "cuda" else None
        steps = [after.host_ns - one.host_ns for one, after in self._pairs(key, PLAIN)]
        if plain_ns is None or not steps or min(steps) > _FASTER * plain_ns:
            return 0
        return plain_ns - min(steps)

    def _pairs(self, key: Hashable, kind: str) -> list[tuple[_Begun, _Begun]]:
        pairs = pairwise(self._passes)
        return [(one, after) for one, after in pairs if one.key == key and one.kind == kind]

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


class BackwardReadings:
    """What the allocator held in one backward pass, from one read of a saved tensor to the next:
    torch's own figure of the peak starts anew with each."""

    def __init__(self, device: torch.device) -> None:
        self.readings: list[BackwardReading] = []
        self._device = device
        self._use: int | None = None
        self._begun_bytes = allocated_bytes(device)
        self._start()

    def reads(self, use: int) -> None:
        if self._begun_bytes is not None:
            self._note()
            self._use, self._begun_bytes = use, allocated_bytes(self._device)
            self._start()

    def end(self) -> None:
        """Another pass begins."""
        if self._begun_bytes is not None:
            self._note()
            self._begun_bytes = None

    def _start(self) -> None:
        if self._begun_bytes is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _note(self) -> None:
        most = int(torch.cuda.max_memory_allocated(self._device))
        self.readings.append(BackwardReading(self._use, self._begun_bytes or 0, most))


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


def _between_ns(one: Any, following: Any) -> int:
    if isinstance(one, int):
        return int(following) - one
    return round(float(one.elapsed_time(following)) * 1e6)


# What it costs the host to follow a plan, measured once on a chain of operators that do next to
# nothing; this thread's own time, as others may run.

_LAYERS, _ROUNDS = 24, 5
_KIND: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever torch's defaults are


@functools.cache
def following_costs() -> tuple[int, int]:
    """Return the time of one watched operator or saved tensor, and of one repeated operator."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng([]):
        layers = [part for _ in range(_LAYERS) for part in (nn.SiLU(), nn.Linear(2, 2, **_KIND))]
        model = nn.Sequential(*layers)
        recorder = StepRecorder(model)
        try:
            with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack), recorder:
                output = model(torch.ones(2, 2, **_KIND))
        finally:
            recorder.detach()
        plan = make_plan(recorder.finish(output), MemoryTarget())
        keeping = tuple(replace(use, action=KEEP, encoding=None) for use in plan.uses)
        watched = replace(plan, uses=keeping, repeated=(), results=())
        rounds = [[_step_ns(model, one) for one in (None, watched, plan)] for _ in range(_ROUNDS)]
    plain_ns, watched_ns, followed_ns = (min(times) for times in zip(*rounds, strict=True))
    seen = len(plan.operators) + len(plan.uses)
    repeats = max(1, len(plan.repeated))
    return max(0, (watched_ns - plain_ns) // seen), max(0, (followed_ns - watched_ns) // repeats)


def _step_ns(model: nn.Module, plan: SavePlan | None) -> int:
    """Forward and backward; without a plan, as they are."""
    began = time.thread_time_ns()
    if plan is None:
        output = model(torch.ones(2, 2, **_KIND))
    else:
        follower = PlanFollower(FollowedPlan.of(plan))
        with torch.autograd.graph.saved_tensors_hooks(follower.pack, unpack_held), follower:
            output = model(torch.ones(2, 2, **_KIND))
    torch.autograd.grad(output.sum(), list(model.parameters()))
    return time.thread_time_ns() - began
