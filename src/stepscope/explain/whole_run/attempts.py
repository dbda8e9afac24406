"""A job that was restarted into the same run folder: attempts, one after another.

The last attempt with a trace is explained. The steps of earlier ones, and of processes that left no
trace, belong to the run and to its account all the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from stepscope.explain.whole_run.account import add_accounts, mean_account
from stepscope.explain.whole_run.job_wall import widen_to_job
from stepscope.records.quality import Note
from stepscope.records.whole_run import WholeRun
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.job import Job
    from stepscope.records.whole_run import RankRun, RunAccount


def join_runs(runs: Sequence[RankRun], job: Job | None = None) -> WholeRun | None:
    """None for bare traces. A rank's account is the sum of its attempts'; the job's is the mean.

    `job` has the hosts' clocks: it lasts from the first host's start to the last one's end.
    """
    if not runs:
        return None
    ordered = widen_to_job(sorted(runs, key=lambda run: (run.attempt, run.rank)), job)
    by_rank: dict[int, list[RunAccount]] = {}
    for run in ordered:
        if run.account is not None:
            by_rank.setdefault(run.rank, []).append(run.account)
    accounts = [add_accounts(accounts) for accounts in by_rank.values()]
    return WholeRun(ranks=tuple(ordered), account=mean_account(accounts))


def note_attempts(runs: Sequence[RankRun]) -> list[Note]:
    """That the job was restarted, and how far each attempt came."""
    attempts = sorted({run.attempt for run in runs})
    if len(attempts) < 2:
        return []
    sizes = Counter(run.attempt for run in runs)
    named = {
        attempt: f"attempt {attempt}"
        + (f" ({counted(sizes[attempt], 'rank')})" if len(set(sizes.values())) > 1 else "")
        for attempt in attempts
    }
    steps = {
        attempt: max(run.steps for run in runs if run.attempt == attempt) for attempt in attempts
    }
    *earlier, last = attempts
    ended = ", ".join(f"{named[one]} ended after {counted(steps[one], 'step')}" for one in earlier)
    detail = f"the job was restarted: {ended}; {named[last]} is explained"
    return [Note(id="restarted", detail=detail)]
