"""What it costs the host to follow a plan: every operator passes through Python."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch

from stepscope.fix.saved.follower import FollowedPlan, PlanFollower
from stepscope.fix.saved.save_plan import PlannedRepeat, SavePlan

_OPERATORS = 64
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class FollowingCosts:
    """Of one operator: to count it, and to hold it for later."""

    watch_ns: int
    hold_ns: int


@functools.cache
def following_costs() -> FollowingCosts:
    """Measured once, with additions of two numbers."""
    plain, watched, held = (
        min(_additions_ns(plan) for _ in range(_ROUNDS)) for plan in (None, _plan(0), _plan(1))
    )
    watch_ns = max(0, watched - plain) // _OPERATORS
    return FollowingCosts(watch_ns, max(0, held - watched) // _OPERATORS)


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


def _additions_ns(followed: FollowedPlan | None) -> int:
    number = torch.ones(2)
    if followed is None:
        began = time.perf_counter_ns()
        _add(number)
        return time.perf_counter_ns() - began
    with PlanFollower(followed, frozenset(), count=False):
        began = time.perf_counter_ns()
        _add(number)
        return time.perf_counter_ns() - began


def _add(number: torch.Tensor) -> None:
    for _ in range(_OPERATORS):
        torch.add(number, number)
