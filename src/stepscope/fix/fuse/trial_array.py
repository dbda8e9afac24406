"""Trials of one architecture that train together, each as it would alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from stepscope.errors import UsageError
from stepscope.fix.fuse.largest_array import largest_array
from stepscope.fix.fuse.split_array import SplitArray, fuse_to_fit
from stepscope.fix.fuse.trials import StartedTrial, TrialFailedError, start_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.fuse.largest_array import ArrayFit
    from stepscope.fix.fuse.trials import Build, SweptTrial


class TrialArray:
    """The first trial brings the architecture; more join and leave as they begin and end."""

    def __init__(self, first: StartedTrial) -> None:
        self.kind = first.kind
        self.members = [first]
        self.array: SplitArray = fuse_to_fit(
            [first.model], [first.optimizer], random=[first.random]
        )

    def __len__(self) -> int:
        return len(self.members)

    @property
    def trials(self) -> list[SweptTrial]:
        return [one.trial for one in self.members]

    def fitting(self, memory: int | None = None) -> ArrayFit:
        """How many trials such as the first one fit."""
        first = self.members[0]
        with self.array.drawing_as(0):
            batch = first.batches.next()
        first.batches.put_back(batch)
        loss, parts = _common_loss(first, [batch])
        return largest_array(first.model, first.optimizer, loss, *parts, memory=memory)

    def add(self, started: StartedTrial) -> None:
        self.array.admit(started.model, started.optimizer, random=started.random)
        self.members.append(started)

    def remove(self, place: int) -> SweptTrial:
        """The trial takes its model with it. The last one ends the array."""
        gone = self.members.pop(place)
        gone.trial.model = self.array.evict(place) if self.members else gone.model
        return gone.trial

    def train(self, steps: int) -> None:
        """So many steps of every trial, then their mean loss. TrialFailedError: nobody has trained
        the step whose data one could not give."""
        for _ in range(steps):
            loss, parts = _common_loss(self.members[0], self._draw())
            losses = self.array.train_step(loss, *parts)
            for one, value in zip(self.members, losses, strict=True):
                one.trial.step += 1
                one.counted += 1
                one.since = value if one.since is None else one.since + value
        for one in self.members:
            one.trial.losses.append(float(one.since) / one.counted)
            one.since, one.counted = None, 0

    def _draw(self) -> list[Any]:
        """Every trial's next batch."""
        batches: list[Any] = []
        for place, one in enumerate(self.members):
            try:
                with self.array.drawing_as(place):
                    batches.append(one.batches.next())
            except Exception as error:
                for drawn, batch in zip(self.members, batches, strict=False):
                    drawn.batches.put_back(batch)
                raise TrialFailedError(place) from error
        return batches

    def checkpoint(self) -> dict[str, Any]:
        """Between two calls of `train`."""
        return {
            "array": self.array.checkpoint(),
            "trials": [
                {
                    "number": one.trial.number,
                    "config": dict(one.trial.config),
                    "seed": one.trial.seed,
                    "step": one.trial.step,
                    "losses": list(one.trial.losses),
                    "batches": one.batches.position(),
                }
                for one in self.members
            ],
        }

    @classmethod
    def from_checkpoint(cls, build: Build, saved: dict[str, Any]) -> TrialArray:
        """Build every trial anew, and put each where it was."""
        members = []
        for one in saved["trials"]:
            started = start_trial(build, one["config"], one["number"], one["seed"])
            started.trial.step, started.trial.losses = one["step"], list(one["losses"])
            started.batches.skip_to(one["batches"])
            members.append(started)
        array = cls(members[0])
        array.members = members
        array.array = fuse_to_fit(
            [one.model for one in members], [one.optimizer for one in members]
        )
        array.array.resume(saved["array"])
        return array


def _common_loss(started: StartedTrial, batches: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A loss of a batch's tensors, and these: one for each model, or once where it is one for all.
    What else is in a batch must be the same for all."""
    flat, structures = zip(*(tree_flatten(batch) for batch in batches), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise UsageError("the batches of trials that train together differ in their structure")

    def loss(model: Any, *parts: Any) -> Any:
        return started.loss(model, tree_unflatten(parts, structures[0]))

    return loss, [_part(own) for own in zip(*flat, strict=True)]


def _part(own: Sequence[Any]) -> Any:
    first = own[0]
    if isinstance(first, torch.Tensor):
        return first if all(one is first for one in own) else list(own)
    if any(one != first for one in own):
        raise UsageError(f"the batches of trials that train together differ in {first!r}")
    return first
