"""When the pack hook can rest: over saved tensors that are kept, and that nothing starts from.

A hook costs a few microseconds for every saved tensor, and most are kept. The hook is taken away
right after a tensor that it was needed for, and put back where a module is entered or left, just
before the next such tensor. What is saved in between is autograd's own business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# A module, and how often it was called before in the same pass.
ModuleCall = tuple[Any, int]
# A replaced tensor brings others before the hook: what it starts from, and what is saved beside it.
# Counted on ResNet-50, DenseNet-121, GPT-2 and BERT: 2.2 to 3.6 of them, itself among them.
HOOKED_FOR_EACH = 3
_FEWEST = 2  # saved tensors: a module's hook costs about as much as one of them


@dataclass(frozen=True, slots=True)
class PassPlace:
    """A place in a pass: the saved tensors and the nodes before it."""

    uses: int
    nodes: int


@dataclass(frozen=True, slots=True)
class ModuleBoundary:
    """Where a module is entered or left."""

    call: ModuleCall
    entering: bool
    place: PassPlace


@dataclass(slots=True)
class HookPauses:
    """After which saved tensors the hook rests, and where it goes on."""

    begins_paused: bool = False
    after: set[int] = field(default_factory=set)
    ends_at_entry: dict[ModuleCall, PassPlace] = field(default_factory=dict)
    ends_at_exit: dict[ModuleCall, PassPlace] = field(default_factory=dict)

    def end_at(self, boundary: ModuleBoundary) -> None:
        ends = self.ends_at_entry if boundary.entering else self.ends_at_exit
        ends[boundary.call] = boundary.place


def plan_pauses(needed: Iterable[int], boundaries: Iterable[ModuleBoundary]) -> HookPauses:
    """`needed` are the saved tensors that the hook must see, in order."""
    at_use = _by_uses(boundaries)
    needed = [-1, *needed]
    pauses = HookPauses()
    for before, following in pairwise(needed):
        for uses in range(following, before + _FEWEST, -1):
            if uses in at_use:
                _pause_after(pauses, before)
                pauses.end_at(at_use[uses])
                break
    _pause_after(pauses, needed[-1])
    return pauses


def _pause_after(pauses: HookPauses, use: int) -> None:
    if use < 0:
        pauses.begins_paused = True
    else:
        pauses.after.add(use)


def _by_uses(boundaries: Iterable[ModuleBoundary]) -> dict[int, ModuleBoundary]:
    """One boundary for each number of saved tensors before it; entries, as they cost less."""
    times: dict[tuple[ModuleCall, bool], int] = {}
    listed = list(boundaries)
    for boundary in listed:
        key = boundary.call, boundary.entering
        times[key] = times.get(key, 0) + 1
    chosen: dict[int, ModuleBoundary] = {}
    for boundary in listed:
        if times[boundary.call, boundary.entering] > 1:
            continue  # a module that calls itself
        known = chosen.get(boundary.place.uses)
        if known is None or (boundary.entering and not known.entering):
            chosen[boundary.place.uses] = boundary
    return chosen
