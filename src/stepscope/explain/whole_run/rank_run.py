"""One rank's run, from every step that it took: its account, stalls, changes, memory, and
its typical step without the profiler.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.explain.whole_run.account import account_for, find_noted
from stepscope.explain.whole_run.stalls import (
    StallSplit,
    find_period,
    find_steady,
    split_stalls,
    without_waits,
)
from stepscope.explain.whole_run.step_levels import change_places, find_step_levels, robust_slope
from stepscope.records.normal import median, quantile
from stepscope.records.rank import USUAL_PHASES, MeasuredSteps, StepColumns
from stepscope.records.rank_facts import HostStepTimes
from stepscope.records.run import (
    CORE_WAIT,
    LevelChange,
    MemoryGrowth,
    RankRun,
    RunTimes,
    Stall,
    StallCause,
    StepSeries,
    StepTimes,
)
from stepscope.step.arrays import Bools, Floats
from stepscope.step.graph import QUEUE_DEPTH
from stepscope.step.statistics import lower_median, mean_interval, spread

_MOST_NUMBERS = 10
_NEARLY_ALL = 0.9
_REMAINDERS = 0.1  # of a cause's cost, in steps that have less than half of what is usual for it
_PHASE_CAUSES: dict[StallCause, str] = {
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "compile": "compile",
    "gc": "gc",
    "data": "data",
    "logging": "other",
}
_BETWEEN_EPOCHS: tuple[StallCause, ...] = ("evaluation", "checkpoint")


def explain_run(
    steps: StepColumns,
    *,
    rank: int = 0,
    times: RunTimes | None = None,
    waits: Mapping[StallCause, NDArray[np.int64]] | None = None,
) -> RankRun:
    """`waits` are columns of causes that other files measured, such as waits for other ranks."""
    steady, warm_up = find_steady(steps)
    step_ns = steps.step_ns[steady].astype(np.float64)
    numbers = steps.number[steady]
    causes = {
        **_measured_waits(steps, steady),
        **{cause: column[steady].astype(np.float64) for cause, column in (waits or {}).items()},
    }
    levels = find_step_levels(
        without_waits(step_ns, causes),
        numbers,
        _chosen(steps.elements, steady),
        _chosen(steps.allocated_bytes, steady),
    )
    split = split_stalls(step_ns, levels.level, causes, hidden=steps.device_ns is not None)
    cause = np.full(len(steps), -1, np.int8)
    cause[steady] = split.main_cause
    unknown = np.zeros(len(steps))
    unknown[steady] = split.excess_ns.get("unknown", 0.0)
    excess = np.zeros(len(steps), np.int64)
    excess[steady] = np.rint(sum(split.excess_ns.values(), np.zeros(int(steady.sum()))))
    return RankRun(
        rank=rank,
        attempt=times.attempt if times else 1,
        steps=len(steps),
        warm_up=warm_up,
        times=_step_times(step_ns, levels.level, split) if len(step_ns) else None,
        stalls=_list_stalls(steps, steady, split),
        changes=add_causes(levels.changes, steps, steady),
        trend=levels.trend,
        inputs=levels.inputs,
        memory_growth=find_memory_growth(steps, "host" if steps.device_ns is None else "device"),
        account=account_for(steps, warm_up, times) if times else None,
        noted=find_noted(steps) or msgspec.UNSET,
        began_ns=times.began_ns if times else None,
        ended_ns=times.ended_ns if times else None,
        series=StepSeries(
            number=steps.number,
            start_unix_ns=steps.end_unix_ns - steps.wall_ns,
            step_ns=steps.step_ns,
            cause=cause,
            window=steps.window | steps.memory,
            warm_up=warm_up,
            excess_ns=excess,
            unknown_ns=unknown,
        ),
    )


def sum_up_run(
    steps: StepColumns, *, rank: int = 0, times: RunTimes | None = None
) -> tuple[RankRun, float | None]:
    """The account and the mean steady step alone, in a fraction of the time: for the ranks of a
    large job that nobody reads one by one."""
    steady, warm_up = find_steady(steps)
    run = RankRun(
        rank=rank,
        attempt=times.attempt if times else 1,
        steps=len(steps),
        warm_up=warm_up,
        times=None,
        account=account_for(steps, warm_up, times) if times else None,
    )
    return run, float(steps.step_ns[steady].mean()) / 1e6 if steady.any() else None


def _chosen(column: NDArray[np.int64] | None, steady: Bools) -> NDArray[np.int64] | None:
    return None if column is None else column[steady]


def _measured_waits(steps: StepColumns, steady: Bools) -> dict[StallCause, Floats]:
    """What each cause measured in each steady step, without the time between epochs."""
    between = _between_epochs(steps)
    waits: dict[StallCause, Floats] = {}
    for cause, phase in _PHASE_CAUSES.items():
        column = steps.phases_ns.get(phase)
        if column is not None:
            inside = column - between.get(cause, 0)
            waits[cause] = inside[steady].astype(np.float64)
    if steps.retries is not None:  # how long they took is not known: all of the step's excess
        waits["allocator"] = np.where(steps.retries[steady] > 0, np.inf, 0.0)
    if steps.cpu_wait_ns is not None:
        waits["operating_system"] = np.maximum(steps.cpu_wait_ns[steady], 0).astype(np.float64)
        if "data" in waits:
            # A loader that works in the training process takes longer when no core
            # is free. Where that explains nearly all of a long wait, it is no wait
            # for data: a thread that waits for a loader's workers sleeps, and is not
            # ready to run.
            data = waits["data"]
            core_wait = waits["operating_system"]
            usual = np.minimum(data, median(data)) if len(data) else data
            crowded = core_wait > _NEARLY_ALL * (data - usual)
            waits["data"] = np.where(crowded, np.maximum(usual, data - core_wait), data)
    return waits


def _between_epochs(steps: StepColumns) -> dict[StallCause, NDArray[np.int64]]:
    """How much of evaluation and checkpoints lay between two epochs: as much as fits there."""
    if steps.epoch_gap_ns is None:
        return {}
    rest = steps.phases_ns.get("between_epochs")
    left = steps.epoch_gap_ns - (rest if rest is not None else 0)
    out: dict[StallCause, NDArray[np.int64]] = {}
    for cause in _BETWEEN_EPOCHS:
        if cause in steps.phases_ns:
            out[cause] = np.minimum(steps.phases_ns[cause], np.maximum(left, 0))
            left = left - out[cause]
    return out


def _step_times(step_ns: Floats, level: Floats, split: StallSplit) -> StepTimes:
    low, high = mean_interval(step_ns)
    calm = (step_ns / np.maximum(level, 1.0))[~split.stalled]
    return StepTimes(
        steps=len(step_ns),
        mean_ms=split.mean_ns / 1e6,
        low_ms=low / 1e6,
        high_ms=high / 1e6,
        median_ms=median(step_ns) / 1e6,
        typical_ms=split.typical_ns / 1e6,
        p99_ms=quantile(step_ns, 0.99) / 1e6,
        longest_ms=float(step_ns.max()) / 1e6,
        variation=spread(calm),
    )


def _list_stalls(steps: StepColumns, steady: Bools, split: StallSplit) -> tuple[Stall, ...]:
    """The costliest first. Evaluation and checkpoints between epochs are no part of a step, but
    cost time all the same."""
    count = int(steady.sum())
    gaps = {
        cause: float(column[steady].sum()) / count / 1e6 if count else 0.0
        for cause, column in _between_epochs(steps).items()
    }
    causes = dict.fromkeys((*split.excess_ns, *(cause for cause, ms in gaps.items() if ms)))
    none = np.zeros(count)
    stalls = [
        sum_up_stalls(cause, split.excess_ns.get(cause, none), steps.number[steady], split.mean_ns)
        for cause in causes
    ]
    stalls = [replace(stall, between_epochs_ms=gaps.get(stall.cause, 0.0)) for stall in stalls]
    return tuple(sorted(stalls, key=lambda stall: -stall.cost_ms - stall.between_epochs_ms))


def sum_up_stalls(
    cause: StallCause, excess: Floats, numbers: NDArray[np.int64], mean_ns: float
) -> Stall:
    """`excess` is what each step took longer for this cause."""
    places = _stalled_places(excess)
    longest = places[np.argsort(-excess[places], kind="stable")[:_MOST_NUMBERS]]
    cost = float(excess.mean()) if len(excess) else 0.0
    period = find_period(numbers[places])
    return Stall(
        cause=cause,
        steps=len(places),
        cost_ms=cost / 1e6,
        share=cost / mean_ns if mean_ns else 0.0,
        typical_ms=median(excess[places]) / 1e6 if len(places) else 0.0,
        longest_ms=float(excess.max()) / 1e6 if len(places) else 0.0,
        period=period.steps if period else None,
        numbers=tuple(numbers[longest].tolist()),
    )


def _stalled_places(excess: Floats) -> NDArray[np.intp]:
    """Steps that stalled for a cause. A step that stalled for something else leaves small
    remainders to other causes: they count in the cost, but say nothing about how often and how
    long. Usual is what the stalls that hold the middle of the cost have."""
    rising = np.argsort(excess, kind="stable")
    cost = np.cumsum(excess[rising])
    if not len(cost) or not cost[-1]:
        return np.flatnonzero(excess)
    usual = excess[rising[np.searchsorted(cost, cost[-1] / 2)]]
    remainder = (cost <= _REMAINDERS * cost[-1]) & (excess[rising] < usual / 2)
    return np.sort(rising[~remainder & (excess[rising] > 0)])


# What takes longer after a change of level: a phase of the step, or the wait for a free core.


def add_causes(
    changes: tuple[LevelChange, ...], steps: StepColumns, steady: Bools
) -> tuple[LevelChange, ...]:
    """The same changes, each with what grew between the level before and its own."""
    numbers = steps.number[steady]
    edges = [0, *change_places(numbers, changes), len(numbers)]
    levels = [slice(start, end) for start, end in itertools.pairwise(edges)]
    parts = [_parts_ms(steps, steady, level) for level in levels]
    return tuple(
        replace(change, more_ms={name: after[name] - before[name] for name in after})
        for change, (before, after) in zip(changes, itertools.pairwise(parts), strict=True)
    )


def _parts_ms(steps: StepColumns, steady: Bools, level: slice) -> dict[str, float]:
    """Phases of a typical step. Waits for a core are read now and then, so only their mean says
    how long they are."""
    parts = {
        phase: median(steps.phases_ns[phase][steady][level]) / 1e6
        for phase in USUAL_PHASES
        if phase in steps.phases_ns and level.stop > level.start
    }
    if steps.cpu_wait_ns is not None and level.stop > level.start:
        parts[CORE_WAIT] = float(np.mean(steps.cpu_wait_ns[steady][level])) / 1e6
    return parts


# Memory that is still alive at the end of each step, over the whole run: does it grow for ever?
#
# What counts is the floor: the least that is alive at this step or at any later one. Memory that
# the garbage collector frees later lies above it, and so do the teeth of a saw. A cache that fills
# up raises the floor, then leaves it flat. So growth must go on through all of the run: the floor
# rises in each sixth of what comes after the first quarter, in none of them at less than a quarter
# of the usual pace, and in the end no slower than at half of the pace of the beginning.

_FEWEST_READINGS = 24
_WARM_UP = 0.25  # of the run
_PIECES = 6
_STEADY = 0.25  # of the usual pace
_GOES_ON = 0.5  # of the pace of the beginning
_LEAST_SHARE = 0.01  # of what is alive, over the run
# Below this, an allocator's own holes may fill up; a process also maps libraries and buffers.
_LEAST_BYTES: dict[str, float] = {"device": 4e6, "host": 32e6}


def find_memory_growth(
    columns: StepColumns, of: Literal["device", "host"] = "device"
) -> MemoryGrowth | None:
    """None where memory was not read, was read too seldom, or does not grow."""
    if columns.allocated_bytes is None:
        return None
    read = (columns.allocated_bytes >= 0) & ~columns.window & ~columns.memory
    numbers = columns.number[read].astype(np.float64)
    alive = columns.allocated_bytes[read].astype(np.float64)
    late = (
        np.searchsorted(numbers, float(numbers[0] + _WARM_UP * (numbers[-1] - numbers[0])))
        if len(numbers)
        else 0
    )
    numbers, alive = numbers[late:], alive[late:]
    if len(numbers) < _FEWEST_READINGS or not _keeps_rising(numbers, _floor(alive)):
        return None
    growth = _measure(numbers, alive, of)
    grown = growth.bytes_per_step * float(numbers[-1] - numbers[0]) if growth else 0.0
    least = max(_LEAST_BYTES[of], _LEAST_SHARE * float(alive[-1]))
    return growth if grown >= least else None


def _floor(alive: Floats) -> Floats:
    """The least from each reading to the end."""
    floor: Floats = np.minimum.accumulate(alive[::-1])[::-1]
    return floor


def _keeps_rising(numbers: Floats, floor: Floats) -> bool:
    edges = np.linspace(numbers[0], numbers[-1], _PIECES + 1)
    at = floor[np.minimum(np.searchsorted(numbers, edges), len(floor) - 1)]
    rises = np.diff(at)
    third = _PIECES // 3
    goes_on = rises[-third:].sum() >= _GOES_ON * rises[:third].sum()
    return bool(rises.min() > 0 and goes_on and rises.min() >= _STEADY * median(rises))


def _measure(numbers: Floats, alive: Floats, of: Literal["device", "host"]) -> MemoryGrowth | None:
    """The floor's own slope. Readings may lie unevenly, so the floor is read at even steps."""
    even = np.linspace(numbers[0], numbers[-1], len(numbers))
    slope, low, high = robust_slope(np.interp(even, numbers, _floor(alive)))
    if low <= 0:
        return None
    steps = float(even[1] - even[0])  # between two readings
    return MemoryGrowth(
        bytes_per_step=slope / steps,
        low=low / steps,
        high=high / steps,
        first_bytes=int(alive[0]),
        last_bytes=int(alive[-1]),
        of=of,
    )


# The typical step of a run: steady steps that are no stalls, and their host's phases.

_AHEAD = 0.93  # of the device's time for that step
_FREELY = 1.4  # times the quickest one: a longer one was held up inside
_MOST_TIMES = 10_000


def measure_typical_step(steps: StepColumns, run: RankRun) -> MeasuredSteps | None:
    """None without steady steps."""
    if run.times is None or run.series is None:
        return None
    steady, _ = find_steady(steps)
    calm = steady & (run.series.cause < 0)
    device = steps.device_ns[calm] if steps.device_ns is not None else np.empty(0, np.int64)
    device = device[device >= 0]
    times = steps.step_ns[steady]
    # None without a data loader. Where a step stalled, its calm neighbours say what it would
    # have waited: stalls may be common where waits are long.
    data_ns = steps.phases_ns.get("data")
    if data_ns is None or not calm.any():
        mean_wait = None
    else:
        places = np.flatnonzero(calm)
        mean_wait = round(float(np.interp(np.flatnonzero(steady), places, data_ns[places]).mean()))
    return MeasuredSteps(
        steps=run.times.steps,
        steps_ns=tuple(times[:: 1 + (len(times) - 1) // _MOST_TIMES].tolist()),
        step_ns=round(1e6 * run.times.typical_ms),
        wall_ns=round(median(steps.wall_ns[calm])),
        device_ns=round(median(device)) if len(device) else None,
        phases_ns=_median_phases(steps, calm),
        data_ns=mean_wait,
        host_ns=_median_phases(steps, _ran_ahead(steps, steady)),
    )


def _median_phases(steps: StepColumns, chosen: Bools) -> dict[str, int]:
    if not chosen.any():
        return {}
    return {
        phase: round(median(column[chosen])) if column is not None else 0
        for phase in USUAL_PHASES
        for column in (steps.phases_ns.get(phase),)
    }


def _ran_ahead(steps: StepColumns, steady: Bools) -> Bools:
    """Steps that the host was through with before the device: nothing held it up. The queue of
    launches fills up in a run of them, so most steps of a device-bound training are not such; the
    first ones and those after the window are."""
    if steps.device_ns is None:
        return np.zeros(len(steps), np.bool_)
    ahead = steady & (steps.wall_ns < _AHEAD * steps.device_ns)
    least = steps.wall_ns[ahead].min() if ahead.any() else 0
    free: Bools = ahead & (steps.wall_ns < _FREELY * least)
    return free


# The host's own time of a step, from steps in which it never waited for the device.

_PHASES = ("data", "forward", "backward", "optimizer")
_FEWEST = 2
_DISTURBED = 0.25  # quantile: what disturbs a step only adds
_OTHER_STOPS = 0.25  # of the usual number
_FULL = 0.75  # of the queue: inside a step more may wait than at its end
# A step that begins with an empty queue ends with the most launches that ever wait. Steps of hosts
# that find it full end with 0.87 of it or more.
_FULL_AFTER_EMPTY = 0.83


def host_phases_ns(
    measured: Sequence[HostStepTimes], steps: StepColumns | None, launches: int | None
) -> dict[str, int]:
    """By phase; empty if too few steps tell. `launches` of a step that calls nothing that waits for
    the device, else None.

    Whatever disturbs either kind of step only adds: the shorter counts. A kind with too few steps
    of its own joins the other. Plain steps bound the phases in which the host does not wait, even
    if it waits in another one.
    """
    own_ns = own_phases_ns(measured)
    among_ranks = any(not step.alone for step in measured)
    if among_ranks or steps is None:
        return own_ns
    if launches is None:
        others_ns = plain_phases_ns(steps) if own_ns else {}
    else:
        others_ns = free_phases_ns(steps, launches, () if own_ns else measured)
    names = own_ns or others_ns
    return {name: min(ns[name] for ns in (own_ns, others_ns) if name in ns) for name in names}


def own_phases_ns(steps: Sequence[HostStepTimes]) -> dict[str, int]:
    """By phase; empty if too few steps were measured, or other ranks trained: the queue then fills
    up inside the step.

    Stopping inside forward costs a little, and not stopping may let the queue fill up: both only
    add, so the shorter of the two counts.
    """
    own = [step for step in steps if step.alone]
    if len(own) < _FEWEST:
        return {}
    kinds = [_typical([step for step in own if step.fine == fine]) for fine in (False, True)]
    return {
        phase: round(
            min(
                median([float(getattr(step, f"{phase}_ns")) for step in kind])
                for kind in kinds
                if kind
            )
        )
        for phase in _PHASES
    }


def _typical(steps: list[HostStepTimes]) -> list[HostStepTimes]:
    """Without those that were stopped far more or less often: they have more passes or fewer, as
    every fifth step has in which a generator trains too."""
    usual = lower_median([step.stops for step in steps]) if steps else 0
    return [step for step in steps if abs(step.stops - usual) <= _OTHER_STOPS * usual]


def free_phases_ns(
    steps: StepColumns, launches: int, own: Sequence[HostStepTimes] = ()
) -> dict[str, int]:
    """By phase, from plain steps in which the host never found the queue full, and from steps of
    its `own`; empty if they are too few.

    To wait only adds, and so do cold caches and other programs. Where plain steps in general spend
    less on a phase than the free ones, the host does not wait there either: the shorter counts.
    """
    free = _free(steps, launches)
    if np.count_nonzero(free) + len(own) < _FEWEST:
        return {}
    plain = steps.plain & ~_after_ours(steps)
    return {phase: round(_phase_ns(steps, phase, free, plain, own)) for phase in USUAL_PHASES}


def plain_phases_ns(steps: StepColumns) -> dict[str, int]:
    """By phase, what plain steps spend with all their waits: the host never needs more."""
    plain = steps.plain & ~_after_ours(steps)
    if np.count_nonzero(plain) < _FEWEST:
        return {}
    nothing = np.zeros(len(steps), np.bool_)
    return {phase: round(_phase_ns(steps, phase, nothing, plain, ())) for phase in USUAL_PHASES}


def _phase_ns(
    steps: StepColumns, phase: str, free: Bools, plain: Bools, own: Sequence[HostStepTimes]
) -> float:
    column = steps.phases_ns.get(phase, np.zeros(len(steps), np.int64))
    own_ns = [float(getattr(step, f"{phase}_ns")) for step in own] if phase in _PHASES else []
    kinds = (np.concatenate((column[free], own_ns)), column[plain])
    return min((quantile(kind, _DISTURBED) for kind in kinds if len(kind)), default=0.0)


def _free(steps: StepColumns, launches: int) -> Bools:
    """Steps of the host that ended before the queue was full. The first ones after our own work
    run with cold caches and clear up after it: they count only if there are too few others, and
    those that nearly filled the queue only if there are still too few."""
    first = _after_ours(steps)
    ahead = _launches_ahead(steps, first, launches)
    free = steps.plain & (ahead < _FULL * QUEUE_DEPTH)
    for kind in (free & ~first, free & first):
        if np.count_nonzero(kind) >= _FEWEST:
            return kind
    return steps.plain & first & (ahead < _FULL_AFTER_EMPTY * QUEUE_DEPTH)


def _after_ours(steps: StepColumns) -> Bools:
    """Plain steps right after a window or a step of ours: they begin with an empty queue."""
    ours = steps.window | steps.memory
    after = np.zeros(len(steps), np.bool_)
    after[1:] = ours[:-1] & (np.diff(steps.number) == 1)
    return after & steps.plain


def _launches_ahead(steps: StepColumns, first: Bools, launches: int) -> Floats:
    """How many launches wait in the queue when the host ends a step; infinite where not known."""
    ahead = np.full(len(steps), np.inf)
    if steps.device_ns is None:
        ahead[first] = 0.0 if launches <= QUEUE_DEPTH else np.inf
        return ahead
    known = steps.plain & (steps.device_ns >= 0)
    for begin in np.flatnonzero(first & known):
        rest = np.flatnonzero(~known[begin:] | (np.diff(steps.number[begin - 1 :]) != 1))
        end = begin + (int(rest[0]) if len(rest) else len(steps) - begin)
        host_ns = np.cumsum(steps.wall_ns[begin:end])
        device_ns = np.cumsum(steps.device_ns[begin:end])
        done = np.interp(host_ns, np.concatenate(([0], device_ns)), np.arange(end - begin + 1))
        ahead[begin:end] = launches * (np.arange(1, end - begin + 1) - done)
    return ahead
