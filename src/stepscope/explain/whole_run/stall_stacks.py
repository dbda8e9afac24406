"""Which lines run in stalled steps more often than in typical ones, and for how many
milliseconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.explain.host_calls import is_library_frame
from stepscope.records.normal import NORMAL_95
from stepscope.records.run import STALL_CAUSES, LevelChange, RankRun, StallCause, StepSeries
from stepscope.records.source_lines import (
    LineDifference,
    Place,
    StackDifference,
    StackSamples,
    StackShare,
)
from stepscope.step.arrays import Int64s

# The sampler looks at round times of the clock, so a line's share of the samples in some steps is
# its share of their time: with their mean length it becomes a time per step. (Samples per step
# would not do: the sampler looks more closely early in a run.) What a line takes longer in stalled
# steps is its part of the stall. Each stack counts for one line: the innermost one of the user's
# own code, else the innermost one.

FEWEST_SAMPLES = 4  # in stalled steps, at one line
_SURE = 2.0  # standard errors
_LEAST_PART = 0.10  # of what stalled steps take longer
_MOST_PLACES = 3
MOST_STACKS = 200
TYPICAL = -1
_LEFT_OUT = -2  # warm-up, windows, steps that were not seen


class StackCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of each stack in the steps that stalled for one cause, and in typical ones."""

    stalled: Int64s
    typical: Int64s
    stalled_steps: int
    typical_steps: int
    stalled_ms: float  # the mean of these steps
    typical_ms: float


def add_stall_stacks(run: RankRun, samples: StackSamples) -> RankRun:
    """The run, with the lines of each stall and the stacks to draw."""
    if run.series is None:
        return run
    compared = compare_stacks(samples, run.series)
    stalls = tuple(
        replace(stall, where=compared[stall.cause][0]) if stall.cause in compared else stall
        for stall in run.stalls
    )
    return replace(
        run,
        stalls=stalls,
        stacks=tuple(stacks for _, stacks in compared.values()),
        changes=_add_lines_of_changes(run, samples, run.series),
    )


def _add_lines_of_changes(
    run: RankRun, samples: StackSamples, series: StepSeries
) -> tuple[LevelChange, ...]:
    """Where typical steps take longer from some step on: the lines that do."""
    typical = kinds_of_steps(series) == TYPICAL
    edges = [0, *(change.step for change in run.changes), sys.maxsize]
    changed = []
    for change, (first, middle, end) in zip(
        run.changes, zip(edges, edges[1:], edges[2:], strict=False), strict=True
    ):
        if change.factor > 1:
            before = typical & (series.number >= first) & (series.number < middle)
            after = typical & (series.number >= middle) & (series.number < end)
            counts = StackCounts(
                stalled=_count(samples, np.isin(samples.number, series.number[after])),
                typical=_count(samples, np.isin(samples.number, series.number[before])),
                stalled_steps=int(after.sum()),
                typical_steps=int(before.sum()),
                stalled_ms=_mean_ms(series, after),
                typical_ms=_mean_ms(series, before),
            )
            if counts.typical.sum() >= FEWEST_SAMPLES:
                change = replace(change, where=find_places(samples.stacks, counts))
        changed.append(change)
    return tuple(changed)


def compare_stacks(
    samples: StackSamples, series: StepSeries
) -> dict[StallCause, tuple[tuple[Place, ...], StackDifference]]:
    """For each cause of stalls with enough samples: lines that run more, and all stacks."""
    kinds = kinds_of_steps(series)
    place = np.searchsorted(series.number, samples.number)
    known = np.minimum(place, len(series.number) - 1) if len(kinds) else place
    kind_of = np.full(len(samples.number), _LEFT_OUT)
    if len(kinds):
        kind_of = np.where(series.number[known] == samples.number, kinds[known], _LEFT_OUT)
    compared = {}
    for index, cause in enumerate(STALL_CAUSES):
        counts = StackCounts(
            stalled=_count(samples, kind_of == index),
            typical=_count(samples, kind_of == TYPICAL),
            stalled_steps=int((kinds == index).sum()),
            typical_steps=int((kinds == TYPICAL).sum()),
            stalled_ms=_mean_ms(series, kinds == index),
            typical_ms=_mean_ms(series, kinds == TYPICAL),
        )
        if counts.stalled.sum() >= FEWEST_SAMPLES and counts.typical_steps:
            difference = describe_difference(cause, samples.stacks, counts)
            compared[cause] = (find_places(samples.stacks, counts), difference)
    return compared


def _mean_ms(series: StepSeries, chosen: NDArray[np.bool_]) -> float:
    return float(series.step_ns[chosen].mean()) / 1e6 if chosen.any() else 0.0


def find_places(stacks: tuple[tuple[Place, ...], ...], counts: StackCounts) -> tuple[Place, ...]:
    """Lines that take a tenth or more of what stalled steps take longer, the costliest first."""
    lines: dict[Place, list[int]] = {}
    for row, frames in enumerate(stacks):
        if frames:
            lines.setdefault(line_of(frames), []).append(row)
    return _costly_places(lines, counts) or _costly_places(_by_function(lines, counts), counts)


def _by_function(lines: dict[Place, list[int]], counts: StackCounts) -> dict[Place, list[int]]:
    """Lines of one function together, under the one with most samples: a loop of several short
    lines may have too few at each."""
    functions: dict[tuple[str, str], list[Place]] = {}
    for line in lines:
        functions.setdefault((line.file, line.function), []).append(line)
    return {
        max(group, key=lambda line: int(counts.stalled[lines[line]].sum())): [
            row for line in group for row in lines[line]
        ]
        for group in functions.values()
    }


def _costly_places(places: dict[Place, list[int]], counts: StackCounts) -> tuple[Place, ...]:
    more = {place: _take_more(counts, rows) for place, rows in places.items()}
    whole = max(sum(more.values()), counts.stalled_ms - counts.typical_ms)
    costly = [place for place, extra in more.items() if extra and extra >= _LEAST_PART * whole]
    costly.sort(key=lambda place: (is_library_frame(place), -more[place]))
    own = [place for place in costly if not is_library_frame(place)]
    return tuple((own or costly)[:_MOST_PLACES])


def describe_difference(
    cause: StallCause, stacks: tuple[tuple[Place, ...], ...], counts: StackCounts
) -> StackDifference:
    """All stacks for a difference flame graph, those that differ most first."""
    stalled = counts.stalled / max(1, int(counts.stalled.sum()))
    typical = counts.typical / max(1, int(counts.typical.sum()))
    order = np.argsort(-np.abs(stalled - typical), kind="stable")
    rows = [row for row in order.tolist() if counts.stalled[row] or counts.typical[row]]
    return StackDifference(
        cause=cause,
        stalled_steps=counts.stalled_steps,
        typical_steps=counts.typical_steps,
        stalled_samples=int(counts.stalled.sum()),
        typical_samples=int(counts.typical.sum()),
        stalled_ms=counts.stalled_ms,
        typical_ms=counts.typical_ms,
        stacks=tuple(
            StackShare(frames=stacks[row], stalled=float(stalled[row]), typical=float(typical[row]))
            for row in rows[:MOST_STACKS]
        ),
    )


def kinds_of_steps(series: StepSeries) -> NDArray[np.int64]:
    """The cause of each step's stall, or typical, or left out."""
    kinds = series.cause.astype(np.int64)
    kinds[series.window] = _LEFT_OUT
    kinds[: series.warm_up] = _LEFT_OUT
    return kinds


def _count(samples: StackSamples, chosen: NDArray[np.bool_]) -> Int64s:
    return np.bincount(samples.stack[chosen], minlength=len(samples.stacks))


def _take_more(counts: StackCounts, rows: list[int]) -> float:
    """Milliseconds that these stacks take longer in a stalled step; 0 where chance may be the
    reason."""
    stalled, typical = int(counts.stalled[rows].sum()), int(counts.typical[rows].sum())
    in_stalled = counts.stalled_ms / max(1, int(counts.stalled.sum()))  # that a sample stands for
    in_typical = counts.typical_ms / max(1, int(counts.typical.sum()))
    more = stalled * in_stalled - typical * in_typical
    error = math.hypot(math.sqrt(stalled) * in_stalled, math.sqrt(typical) * in_typical)
    return more if stalled >= FEWEST_SAMPLES and more > _SURE * error else 0.0


def line_of(frames: tuple[Place, ...]) -> Place:
    own = (frame for frame in reversed(frames) if not is_library_frame(frame))
    return next(own, frames[-1])


# What stalled steps run longer, in milliseconds: stacks of all ranks together, and their lines.
#
# The sampler looks at round times of the clock, so a stack's share of the samples is its share of
# the time: with the mean length of those steps it becomes a time per step.


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
    stalled = np.array([stack.stalled for stack in difference.stacks])
    typical = np.array([stack.typical for stack in difference.stacks])
    places = find_places(
        tuple(s.frames for s in difference.stacks),
        StackCounts(
            stalled=np.rint(stalled * difference.stalled_samples).astype(np.int64),
            typical=np.rint(typical * difference.typical_samples).astype(np.int64),
            stalled_steps=difference.stalled_steps,
            typical_steps=difference.typical_steps,
            stalled_ms=difference.stalled_ms,
            typical_ms=difference.typical_ms,
        ),
    )
    lines = [_compare_line(difference, place) for place in places]
    return tuple(sorted(lines, key=lambda line: -line.more_ms))


def _compare_line(difference: StackDifference, place: Place) -> LineDifference:
    own = [stack for stack in difference.stacks if stack.frames and line_of(stack.frames) == place]
    stalled = sum(stack.stalled for stack in own)
    typical = sum(stack.typical for stack in own)
    more = stalled * difference.stalled_ms - typical * difference.typical_ms
    doubt = NORMAL_95 * math.hypot(
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
