"""A whole step's memory: what backward keeps, and everything around it.

At the end of forward the allocator says what is held. Less what backward keeps, that stays through
backward: weights, optimizer state, the batch, outputs. On top come the gradients of weights, each
from the last operator that reads its weight on, and what a node of backward works with. Before
backward has run, that is taken to be the gradients of its operator's outputs and inputs; afterwards
the allocator has told it. What a node reads is made again before it works: what passes meanwhile
stands beside the gradients that wait for the node, not beside all that it works with. Nodes that
read nothing, such as sums of gradients, run when what the last one read has gone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepscope.fix.saved.backward_memory import node_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.saved.backward_memory import BackwardMemory
    from stepscope.fix.saved.step_record import StepRecord, StepSurroundings


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes beside what backward keeps. Per node of backward, as BackwardMemory's levels."""

    fixed_bytes: int  # at any batch: weights, optimizer state
    outputs_bytes: int  # of the pass, and what else it left behind; grows with the batch
    gradients: tuple[int, ...]  # of weights
    working: tuple[int | None, ...]  # of the node that runs; grows with the batch; None: not read
    waiting: tuple[int | None, ...]  # of that, what is there before it runs
    following: tuple[int | None, ...]  # what others work with until the next node reads something
    loss_bytes: int | None = None  # of the loss, before the first node; None: not read

    def peak_bytes(self, memory: BackwardMemory, batch: float = 1.0) -> int:
        """Of forward and backward, at `batch` times the samples."""
        moments = (
            (memory.replay_levels, self.waiting),
            (memory.levels, self.working),
            (memory.after_levels, self.following),
        )
        highest = max(
            batch * (level + beyond) + gradients
            for levels, beyonds in moments
            for level, beyond, gradients in zip(levels, beyonds, self.gradients, strict=True)
            if beyond is not None
        )
        if self.loss_bytes is not None:
            highest = max(highest, batch * (memory.loss_level + self.loss_bytes))
        return round(self.fixed_bytes + batch * self.outputs_bytes + highest)


def step_memory(record: StepRecord, plain: BackwardMemory) -> StepMemory | None:
    """`plain` is what backward kept when the pass was recorded; None where torch keeps no account
    of its memory, as on CPUs."""
    around = record.surroundings
    if around is None:
        return None
    ordinals = _ordinals(record)
    working = _working(record, ordinals)
    guessed = StepMemory(
        fixed_bytes=around.begun_bytes,
        outputs_bytes=max(0, around.ended_bytes - around.begun_bytes - plain.saved_bytes),
        gradients=_gradients(record, around, ordinals),
        working=working,
        waiting=working,
        following=(None,) * len(working),
    )
    return _as_read(record, guessed, plain) if record.backward_was_read else guessed


def _as_read(record: StepRecord, guessed: StepMemory, plain: BackwardMemory) -> StepMemory:
    """Nodes work with what was allocated beyond everything else that is known."""
    times, levels, after_levels = node_times(record), plain.levels, plain.after_levels
    nothing: list[int | None] = [None] * len(levels)
    working, waiting, following = nothing.copy(), nothing.copy(), nothing.copy()
    loss_bytes: int | None = None
    for reading in record.backward_peaks:
        around_bytes = guessed.fixed_bytes + guessed.outputs_bytes
        if reading.use is None:  # nothing is made again yet
            beyond = reading.peak_bytes - around_bytes - plain.loss_level
            loss_bytes = _larger(loss_bytes, beyond)
            continue
        time = times[reading.use]
        others = around_bytes + guessed.gradients[time]
        working[time] = _larger(working[time], reading.peak_bytes - others - levels[time])
        if reading.begun_bytes is not None:
            before = reading.begun_bytes - others - levels[time]
            waiting[time] = _larger(waiting[time], before)
        if reading.after_bytes is not None:
            after = reading.after_bytes - others - after_levels[time]
            following[time] = _larger(following[time], after)
    before_nodes = [w if b is None else b for w, b in zip(working, waiting, strict=True)]
    return replace(
        guessed,
        working=tuple(working),
        waiting=tuple(before_nodes),
        following=tuple(following),
        loss_bytes=loss_bytes,
    )


def _larger(one: int | None, other: int) -> int:
    return other if one is None else max(one, other)


def _ordinals(record: StepRecord) -> list[int]:
    """For every node of backward, the place of its operator in forward; and one for the end."""
    places: dict[int, int] = {}
    for use, time in zip(record.uses, node_times(record), strict=True):
        places[time] = max(places.get(time, 0), use.after)
    ordinals = [len(record.operators)] * (max(places, default=0) + 3)
    for time in range(len(ordinals)):
        ordinals[time] = places.get(time, ordinals[time - 1] if time else len(record.operators))
    ordinals[-2:] = [0, 0]
    return ordinals


def _gradients(
    record: StepRecord, around: StepSurroundings, ordinals: Sequence[int]
) -> tuple[int, ...]:
    """Weights' gradients that were not there before, in the order in which they come."""
    last_reader: dict[int, int] = {}
    for number, call in enumerate(record.operators):
        for value in call.inputs:
            if record.values[value].owned:
                last_reader[value] = number
    owned_bytes = sum(record.values[value].size_bytes for value in last_reader)
    share = around.gradient_bytes / owned_bytes if owned_bytes else 0.0
    arriving = defaultdict[int, float](float)
    descending = [-ordinal for ordinal in ordinals]
    for value, number in last_reader.items():
        time = min(bisect_left(descending, -number), len(ordinals) - 1)
        arriving[time] += share * record.values[value].size_bytes
    held, levels = 0.0, []
    for time in range(len(ordinals)):
        held += arriving[time]
        levels.append(round(held))
    return tuple(levels)


def _working(record: StepRecord, ordinals: Sequence[int]) -> tuple[int, ...]:
    """Gradients of the inputs and of the outputs of the operator whose node runs."""
    sizes = [0] * (len(record.operators) + 1)
    for number, call in enumerate(record.operators):
        known = [record.values[value] for value in {*call.inputs, *call.outputs}]
        sizes[number] = sum(v.size_bytes for v in known if not v.owned and "float" in v.dtype)
    return tuple(max(sizes[place], sizes[max(0, place - 1)]) for place in ordinals)
