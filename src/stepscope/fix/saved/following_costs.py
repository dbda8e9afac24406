"""What it costs the host to follow a plan: saved tensors and repeated calls pass through Python."""

from __future__ import annotations

import functools
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from stepscope.fix.saved.follower import FollowedPlan, PlanFollower
from stepscope.fix.saved.replay import KeptTensor
from stepscope.fix.saved.save_plan import PlannedRepeat, SavePlan

_OPERATORS = 64
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class FollowingCosts:
    """Of one saved tensor: to pack and unpack it. Of one operator: to hold it for later."""

    watch_ns: int
    hold_ns: int


@functools.cache
def following_costs() -> FollowingCosts:
    """Measured once, with operators on two numbers; this thread's own time, as others may run."""
    watched, held = (
        min(_additions_ns(plan) for _ in range(_ROUNDS)) for plan in (_plan(0), _plan(1))
    )
    plain, hooked = (min(_saves_ns(hook) for _ in range(_ROUNDS)) for hook in (False, True))
    return FollowingCosts(
        max(0, hooked - plain) // _OPERATORS, max(0, held - watched) // _OPERATORS
    )


def _plan(held: int) -> FollowedPlan:
    repeats = [
        PlannedRepeat(operator=number, recomputed_inputs=(False, False))
        for number in range(_OPERATORS * held)
    ]
    plan = SavePlan(
        operators=("aten.add.Tensor",) * _OPERATORS,
        repeated=tuple(repeats),
        results=(),
        uses=(),
        rows=(),
        saved_bytes_before=0,
        saved_bytes=0,
        peak_bytes_before=0,
        peak_bytes=0,
        extra_ns=0,
        step_ns=0,
    )
    return FollowedPlan.of(plan)


def _additions_ns(followed: FollowedPlan) -> int:
    number = torch.ones(2)
    with PlanFollower(followed, frozenset(), count=False):
        began = time.thread_time_ns()
        for _ in range(_OPERATORS):
            torch.add(number, number)
        return time.thread_time_ns() - began


def _saves_ns(hooked: bool) -> int:
    """Forward and backward of operators that save one tensor each."""
    number = torch.ones(2, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(KeptTensor.of, KeptTensor.unpack)
    with torch.enable_grad(), hooks if hooked else nullcontext():
        began = time.thread_time_ns()
        result = number
        for _ in range(_OPERATORS):
            result = torch.tanh(result)
        torch.autograd.grad(result.sum(), number)
        return time.thread_time_ns() - began
