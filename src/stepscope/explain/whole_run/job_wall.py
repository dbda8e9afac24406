"""The wall time of a job on several hosts: from the first host's start to the last one's end.

Each rank's account covers the command on its own host, by its own clock. On one clock, what other
hosts did before is start-up, and what they did afterwards is shut-down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.whole_run.account import widen_account

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.job import Job
    from stepscope.records.whole_run import RankRun

_NOT_ALIGNED = (
    "the hosts' clocks are not aligned: the wall time of each host is that of its own command only"
)


def widen_to_job(runs: Sequence[RankRun], job: Job | None) -> list[RankRun]:
    """`runs` are sorted by attempt: a rank's first begins with the job, its last ends with it."""
    first: dict[int, RankRun] = {}
    last: dict[int, RankRun] = {}
    for run in runs:
        if run.account is not None and run.began_ns is not None and run.ended_ns is not None:
            first.setdefault(run.rank, run)
            last[run.rank] = run
    began = _on_one_clock({rank: run.began_ns or 0 for rank, run in first.items()}, job)
    ended = _on_one_clock({rank: run.ended_ns or 0 for rank, run in last.items()}, job)
    if began is None or ended is None:
        return [_with_note(run) for run in runs]
    widened = []
    for run in runs:
        before = began[run.began_ns or 0] - min(began.values()) if first.get(run.rank) is run else 0
        after = max(ended.values()) - ended[run.ended_ns or 0] if last.get(run.rank) is run else 0
        account = widen_account(run.account, before, after) if run.account else None
        widened.append(replace(run, account=account))
    return widened


def _on_one_clock(by_rank: dict[int, int], job: Job | None) -> dict[int, int] | None:
    """The distinct times, each on the reference's clock; None if that cannot be known.

    Ranks of one host share a time, and must keep sharing it: one rank's offset counts for all.
    """
    if job is None or len(set(job.hosts.values())) < 2:
        return {unix_ns: unix_ns for unix_ns in by_rank.values()}
    if not job.clock.aligned and len(set(by_rank.values())) > 1:
        return None
    shifted: dict[int, int] = {}
    for rank in sorted(by_rank, key=lambda rank: (rank not in job.clock.offset_ns, rank)):
        unix_ns = by_rank[rank]
        moved = job.clock.shift_ns(rank, np.array([unix_ns], np.int64))
        shifted.setdefault(unix_ns, int(moved[0]))
    return shifted


def _with_note(run: RankRun) -> RankRun:
    if run.account is None:
        return run
    return replace(run, account=replace(run.account, notes=(*run.account.notes, _NOT_ALIGNED)))
