"""What it costs the host to follow a plan: saved tensors and repeated calls pass through Python."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from stepscope.fix.saved.choose import make_plan
from stepscope.fix.saved.follower import FollowedPlan, unpack_held
from stepscope.fix.saved.operator_clock import disturb_caches
from stepscope.fix.saved.pin_plan import pin_plan
from stepscope.fix.saved.pinned_follower import PinnedFollower
from stepscope.fix.saved.pinning import PinningFollower
from stepscope.fix.saved.recorder import StepRecorder
from stepscope.fix.saved.save_plan import KEEP, SavePlan
from stepscope.records.memory_targets import MemoryTarget

if TYPE_CHECKING:
    from stepscope.fix.saved.pinned_plan import PinnedPlan
    from stepscope.fix.saved.step_record import StepRecord

_LAYERS = 24
_ROUNDS = 7
_CPU = torch.device("cpu")
_NOTHING = frozenset[int]()


@dataclass(frozen=True, slots=True)
class FollowingCosts:
    """Of one saved tensor: to pack and unpack it, and as much again if it is not kept. Of one
    repeated operator: to call it, beside its own time."""

    watch_ns: int
    replace_ns: int
    repeat_ns: int


class _SmallChain(nn.Module):  # type: ignore[misc]
    """Products of four numbers, each after an activation that is worth recomputing and that
    so many products read."""

    def __init__(self, readers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(_two_by_two() for _ in range(_LAYERS))
        self._readers = readers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            _disturb_caches()
            if x.requires_grad:
                x.register_hook(_disturb_caches)
            active = nn.functional.silu(x)
            x = torch.mm(active, weight)
            for _ in range(self._readers - 1):
                x = x + torch.mm(active, weight)
        return x


def _disturb_caches(_gradient: torch.Tensor | None = None) -> None:
    disturb_caches(_CPU)


@dataclass(frozen=True, slots=True)
class _ChainCosts:
    watch_ns: float  # of one saved tensor
    repeat_ns: float  # of one repeated operator with all who read its result


@functools.cache
def following_costs() -> FollowingCosts:
    """Measured once, on operators that do next to nothing, with the follower of every later pass;
    this thread's own time, as others may run."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        one, two = (_chain_costs(_SmallChain(readers)) for readers in (1, 2))
    replace_ns = max(0.0, min(one.repeat_ns, two.repeat_ns - one.repeat_ns))
    return FollowingCosts(
        round(one.watch_ns), round(replace_ns), max(0, round(one.repeat_ns - replace_ns))
    )


def with_host_costs(record: StepRecord) -> StepRecord:
    """On a GPU, whose work hides them, they tell which of two plans asks more of the host."""
    costs = following_costs()
    return replace(
        record,
        watch_ns=costs.watch_ns,
        replace_ns=costs.replace_ns,
        repeat_ns=costs.repeat_ns,
    )


def _chain_costs(model: nn.Module) -> _ChainCosts:
    record = _recorded(model)
    plan = make_plan(record, MemoryTarget())
    followed = None, _pinned(model, _keeping_all(plan)), _pinned(model, plan)
    rounds = [[_step_ns(model, pinned) for pinned in followed] for _ in range(_ROUNDS)]
    watch_ns = median(watched - plain for plain, watched, _ in rounds)
    again_ns = median(repeated - watched for _, watched, repeated in rounds)
    repeats = [record.operators[call.operator].took_ns for call in plan.repeated]
    per_repeat = again_ns / len(repeats) - median(repeats) if repeats else 0.0
    return _ChainCosts(max(0.0, watch_ns / len(record.uses)), max(0.0, per_repeat))


def _two_by_two() -> torch.Tensor:
    return torch.eye(2, dtype=torch.float32, device=_CPU)


def _recorded(model: nn.Module) -> StepRecord:
    recorder = StepRecorder(model)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack), recorder:
            output = model(_two_by_two())
    finally:
        recorder.detach()
    return recorder.finish(output)


def _keeping_all(plan: SavePlan) -> SavePlan:
    uses = tuple(replace(use, action=KEEP, encoding=None) for use in plan.uses)
    return replace(plan, uses=uses, repeated=(), results=())


def _pinned(model: nn.Module, plan: SavePlan) -> PinnedPlan:
    seen = PinningFollower(FollowedPlan.of(plan), _NOTHING, model)
    try:
        with torch.autograd.graph.saved_tensors_hooks(seen.pack, unpack_held), seen:
            model(_two_by_two())
    finally:
        seen.detach()
    seen.finish()
    return pin_plan(seen, pausing=False)


def _step_ns(model: nn.Module, pinned: PinnedPlan | None) -> int:
    """Forward and backward; without a plan, as they are."""
    began = time.thread_time_ns()
    follower = None if pinned is None else PinnedFollower(pinned, _NOTHING, count=False)
    if follower is not None:
        follower.start()
    try:
        output = model(_two_by_two())
    finally:
        if follower is not None:
            follower.stop()
    if follower is not None:
        follower.finish()
    torch.autograd.grad(output.sum(), list(model.parameters()))
    return time.thread_time_ns() - began
