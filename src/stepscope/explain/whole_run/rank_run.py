"""One rank's run, from every step that it took."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.whole_run.account import account_for
from stepscope.explain.whole_run.change_causes import add_causes
from stepscope.explain.whole_run.mean_interval import mean_interval
from stepscope.explain.whole_run.memory_growth import find_memory_growth
from stepscope.explain.whole_run.periods import find_period
from stepscope.explain.whole_run.stalls import split_stalls, without_waits
from stepscope.explain.whole_run.steady import find_steady
from stepscope.explain.whole_run.step_levels import find_step_levels
from stepscope.records.whole_run import RankRun, Stall, StepSeries, StepTimes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stepscope.explain.whole_run.stalls import StallSplit
    from stepscope.records.run_times import RunTimes
    from stepscope.records.step_columns import Flags, StepColumns
    from stepscope.records.whole_run import StallCause

    Floats = NDArray[np.float64]

_MOST_NUMBERS = 10
_NEARLY_ALL = 0.9
_REMAINDERS = 0.1  # of a cause's cost, in steps that have less than half of what is usual for it
_OF_NORMAL = 1.4826
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
    causes = {**_measured_waits(steps, steady), **_floats(waits or {}, steady)}
    levels = find_step_levels(
        without_waits(step_ns, causes),
        numbers,
        _chosen(steps.elements, steady),
        _chosen(steps.allocated_bytes, steady),
    )
    split = split_stalls(step_ns, levels.level, causes, hidden=steps.device_ns is not None)
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
        began_ns=times.began_ns if times else None,
        ended_ns=times.ended_ns if times else None,
        series=_series(steps, steady, warm_up, split),
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


def _chosen(column: NDArray[np.int64] | None, steady: Flags) -> NDArray[np.int64] | None:
    return None if column is None else column[steady]


def _floats(
    waits: Mapping[StallCause, NDArray[np.int64]], steady: Flags
) -> dict[StallCause, Floats]:
    return {cause: column[steady].astype(np.float64) for cause, column in waits.items()}


def _measured_waits(steps: StepColumns, steady: Flags) -> dict[StallCause, Floats]:
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
            waits["data"] = _without_core_waits(waits["data"], waits["operating_system"])
    return waits


def _without_core_waits(data: Floats, core_wait: Floats) -> Floats:
    """A loader that works in the training process takes longer when no core is free. Where that
    explains nearly all of a long wait, it is no wait for data: a thread that waits for a loader's
    workers sleeps, and is not ready to run."""
    usual = np.minimum(data, np.median(data)) if len(data) else data
    crowded = core_wait > _NEARLY_ALL * (data - usual)
    return np.where(crowded, np.maximum(usual, data - core_wait), data)


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
    spread = float(np.median(np.abs(calm - np.median(calm)))) if len(calm) else 0.0
    return StepTimes(
        steps=len(step_ns),
        mean_ms=split.mean_ns / 1e6,
        low_ms=low / 1e6,
        high_ms=high / 1e6,
        median_ms=float(np.median(step_ns)) / 1e6,
        typical_ms=split.typical_ns / 1e6,
        p99_ms=float(np.quantile(step_ns, 0.99)) / 1e6,
        longest_ms=float(step_ns.max()) / 1e6,
        variation=_OF_NORMAL * spread,
    )


def _list_stalls(steps: StepColumns, steady: Flags, split: StallSplit) -> tuple[Stall, ...]:
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
        typical_ms=float(np.median(excess[places])) / 1e6 if len(places) else 0.0,
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


def _series(steps: StepColumns, steady: Flags, warm_up: int, split: StallSplit) -> StepSeries:
    cause = np.full(len(steps), -1, np.int8)
    cause[steady] = split.main_cause
    unknown = np.zeros(len(steps))
    unknown[steady] = split.excess_ns.get("unknown", 0.0)
    excess = np.zeros(len(steps), np.int64)
    excess[steady] = np.rint(sum(split.excess_ns.values(), np.zeros(int(steady.sum()))))
    return StepSeries(
        number=steps.number,
        start_unix_ns=steps.end_unix_ns - steps.wall_ns,
        step_ns=steps.step_ns,
        cause=cause,
        window=steps.window | steps.memory,
        warm_up=warm_up,
        excess_ns=excess,
        unknown_ns=unknown,
    )
