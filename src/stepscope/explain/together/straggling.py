"""What waiting for others costs, and how much of it a consistency can avoid at best.

Three steps bound every consistency. With a barrier a step takes as long as its slowest worker. With
bounded staleness workers run ahead of others for a while, but in the long run none is faster than
the slowest worker is on average. Without any waiting every worker has its own pace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.figures import factor, milliseconds
from stepscope.records.together_summary import Straggling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.records.consistency import Consistency
    from stepscope.records.together_summary import StragglingKind
    from stepscope.records.worker_times import WorkerTimes

    Floats = NDArray[np.float64]

WORTH = 0.05  # of the step: what is less is no reason to change the consistency
_SLOWER = 1.1  # a worker whose typical step is this much longer is slow at every step


def find_straggling(times: WorkerTimes) -> Straggling:
    """Needs two workers and one step of each."""
    means = np.array([series.mean() for series in times.own_ns])
    medians = np.array([np.median(series) for series in times.own_ns])
    slowest = int(means.argmax())
    others = float(np.median(np.delete(medians, slowest)))
    barrier = mean_of_slowest(times)
    free = len(means) / float((1 / np.maximum(means, 1.0)).sum())
    ratio = float(medians[slowest]) / max(others, 1.0)
    return Straggling(
        kind=_kind(barrier, float(means[slowest]), free),
        workers=len(means),
        barrier_ms=barrier / 1e6,
        slowest_ms=float(means[slowest]) / 1e6,
        free_ms=free / 1e6,
        worker=times.workers[slowest],
        typical_ratio=ratio,
        always=ratio >= _SLOWER,
    )


def _kind(barrier: float, slowest: float, free: float) -> StragglingKind:
    if barrier - free < WORTH * barrier:
        return "none"
    return "transient" if barrier - slowest >= slowest - free else "persistent"


def mean_of_slowest(times: WorkerTimes) -> float:
    """The slowest worker's time, on average over steps. Steps that were not measured side by side
    are taken to be independent."""
    if times.side_by_side:
        return float(np.max(times.own_ns, axis=0).mean())
    return _expected_maximum([np.sort(series) for series in times.own_ns])


def _expected_maximum(ordered: Sequence[Floats]) -> float:
    """Of one draw from each sorted series."""
    values = np.unique(np.concatenate(ordered))
    below = np.ones(len(values))
    for series in ordered:
        below *= np.searchsorted(series, values, side="right") / len(series)
    return float((values * np.diff(below, prepend=0.0)).sum())


def describe_straggling(found: Straggling) -> str:
    """Who is slow, and when."""
    barrier, slowest, free = map(milliseconds, (found.barrier_ms, found.slowest_ms, found.free_ms))
    if found.kind == "none":
        return f"workers take equally long ({barrier} a step with a barrier, {free} without)"
    if found.kind == "transient":
        return (
            "slow steps come to different workers "
            f"({barrier} a step with a barrier, {slowest} at the slowest worker's mean pace)"
        )
    if found.always:
        times = f"{factor(found.typical_ratio)} times as long as the others"
        return f"worker {found.worker} is slow at every step: it takes {times}"
    return f"most slow steps are those of worker {found.worker}"


def describe_effect(found: Straggling, consistency: Consistency, *, pays: bool) -> str:
    """What such a straggler means for this consistency."""
    would = "would " if consistency.synchronous else ""
    if found.kind == "none":
        return "there is little waiting to save"
    if found.kind == "persistent" and consistency.largest_gap is None:
        return "nobody waits for that worker, which adds fewer updates"
    if found.kind == "persistent":
        return f"bounded staleness {would or 'only '}{'only delay' if would else 'delays'} the wait"
    if pays or consistency.synchronous:
        return f"workers that {'may ' if would else ''}run ahead {would}wait less"
    return "workers may not run far enough ahead of such steps"
