"""What stalled steps run longer, in milliseconds: stacks of all ranks together, and their lines.

The sampler looks at round times of the clock, so a stack's share of the samples is its share of the
time: with the mean length of those steps it becomes a time per step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.whole_run.stall_stacks import (
    MOST_STACKS,
    StackCounts,
    find_places,
    line_of,
)
from stepscope.records.stack_samples import LineDifference, StackDifference, StackShare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.place import Place

_NORMAL_95 = 1.96  # standard deviations on each side hold 95%


def merge_differences(differences: Sequence[StackDifference]) -> StackDifference:
    """The same cause on several ranks: every sample counts once."""
    if len(differences) == 1:
        return differences[0]
    stalled_samples = sum(one.stalled_samples for one in differences)
    typical_samples = sum(one.typical_samples for one in differences)
    counts: dict[tuple[Place, ...], list[float]] = {}
    for one in differences:
        for stack in one.stacks:
            count = counts.setdefault(stack.frames, [0.0, 0.0])
            count[0] += stack.stalled * one.stalled_samples
            count[1] += stack.typical * one.typical_samples
    stacks = [
        StackShare(
            frames=frames,
            stalled=stalled / max(1, stalled_samples),
            typical=typical / max(1, typical_samples),
        )
        for frames, (stalled, typical) in counts.items()
    ]
    stacks.sort(key=lambda stack: -abs(stack.stalled - stack.typical))
    return StackDifference(
        cause=differences[0].cause,
        stalled_steps=sum(one.stalled_steps for one in differences),
        typical_steps=sum(one.typical_steps for one in differences),
        stalled_samples=stalled_samples,
        typical_samples=typical_samples,
        stacks=tuple(stacks[:MOST_STACKS]),
        stalled_ms=_mean([(one.stalled_ms, one.stalled_steps) for one in differences]),
        typical_ms=_mean([(one.typical_ms, one.typical_steps) for one in differences]),
    )


def compare_lines(difference: StackDifference) -> tuple[LineDifference, ...]:
    """Lines that explain the stall, the costliest first; none where chance may be the reason."""
    places = find_places(tuple(s.frames for s in difference.stacks), _counts_of(difference))
    lines = [_compare_line(difference, place) for place in places]
    return tuple(sorted(lines, key=lambda line: -line.more_ms))


def _counts_of(difference: StackDifference) -> StackCounts:
    stalled = np.array([stack.stalled for stack in difference.stacks])
    typical = np.array([stack.typical for stack in difference.stacks])
    return StackCounts(
        stalled=np.rint(stalled * difference.stalled_samples).astype(np.int64),
        typical=np.rint(typical * difference.typical_samples).astype(np.int64),
        stalled_steps=difference.stalled_steps,
        typical_steps=difference.typical_steps,
        stalled_ms=difference.stalled_ms,
        typical_ms=difference.typical_ms,
    )


def _compare_line(difference: StackDifference, place: Place) -> LineDifference:
    own = [stack for stack in difference.stacks if stack.frames and line_of(stack.frames) == place]
    stalled = sum(stack.stalled for stack in own)
    typical = sum(stack.typical for stack in own)
    more = stalled * difference.stalled_ms - typical * difference.typical_ms
    doubt = _NORMAL_95 * math.hypot(
        difference.stalled_ms * _error(stalled, difference.stalled_samples),
        difference.typical_ms * _error(typical, difference.typical_samples),
    )
    return LineDifference(
        place=place,
        more_ms=more,
        low_ms=max(0.0, more - doubt),
        high_ms=min(difference.stalled_ms, more + doubt),
    )


def _error(share: float, samples: int) -> float:
    """Standard error of a share. Two more samples, one of them a hit: none is ever quite sure."""
    if not samples:
        return 0.0
    guarded = (share * samples + 1) / (samples + 2)
    return math.sqrt(guarded * (1 - guarded) / (samples + 2))


def _mean(weighed: Sequence[tuple[float, int]]) -> float:
    return sum(value * weight for value, weight in weighed) / max(1, sum(w for _, w in weighed))
