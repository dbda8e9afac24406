"""The runs of all ranks in one: every rank counts, and few are listed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.whole_run.attempts import join_runs
from stepscope.records.whole_run import RankSpread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.job import Job
    from stepscope.records.ranks_without_trace import RankWithoutTrace
    from stepscope.records.whole_run import RankRun, WholeRun

MOST_LISTED = 64  # runs without a trace; beyond, only the spread and the account show them
_SLOWEST, _LONGER = 8, 0.01  # ranks that are named; by how much of the median they are longer


def join_all_ranks(
    traced: Sequence[RankRun],
    untraced: Sequence[RankWithoutTrace],
    others: Sequence[RankRun],
    job: Job | None = None,
) -> WholeRun | None:
    """`others` are earlier attempts, and processes outside the job; `job` has the hosts' clocks."""
    whole = join_runs([*traced, *(rank.run for rank in untraced), *others], job)
    if whole is None:
        return None
    ranks = whole.ranks
    if len(untraced) + len(others) > MOST_LISTED:
        listed = {run.rank for run in traced}
        ranks = tuple(run for run in ranks if run.rank in listed)
    return replace(whole, ranks=ranks, spread=measure_spread(traced, untraced))


def measure_spread(
    traced: Sequence[RankRun], untraced: Sequence[RankWithoutTrace]
) -> RankSpread | None:
    """None for one rank."""
    steps = [run.steps for run in (*traced, *(rank.run for rank in untraced))]
    if len(steps) < 2:
        return None
    timed = [(run.times.mean_ms, run.rank) for run in traced if run.times is not None]
    timed += [(rank.mean_ms, rank.rank) for rank in untraced if rank.mean_ms is not None]
    means = [mean for mean, _ in timed]
    median = float(np.median(means)) if means else None
    longer = [(mean, rank) for mean, rank in timed if mean > (1 + _LONGER) * (median or 0.0)]
    slowest = sorted(longer, key=lambda pair: (-pair[0], pair[1]))[:_SLOWEST]
    return RankSpread(
        ranks=len(steps),
        fewest_steps=min(steps),
        most_steps=max(steps),
        least_mean_ms=min(means, default=None),
        median_mean_ms=median,
        most_mean_ms=max(means, default=None),
        slowest=tuple(rank for _, rank in slowest),
    )
