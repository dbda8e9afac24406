"""Traces or runs that are not one job: each explained alone, a line of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.explain.explain_job import explain_job
from stepscope.explain.separate_jobs import SeveralJobsError
from stepscope.explain.spans import covers_span
from stepscope.records.figures import duration, milliseconds, percent
from stepscope.records.words import counted
from stepscope.trace.one_job import DifferentRunsError
from stepscope.ui.answer import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.errors import UsageError
    from stepscope.records.explanation import Explanation

SCHEMA = 1
_VISIBLE = 0.005  # of the step


class Several(NamedTuple):
    """The jobs, and the path that stands for each."""

    answer: Answer
    paths: tuple[str, ...]
    jobs: tuple[Explanation, ...]


def explain_apart(error: UsageError, paths: Sequence[str], *, cache: bool) -> Several:
    """Raises the error again if it is about something else."""
    if isinstance(error, SeveralJobsError):
        jobs, why, what = error.jobs, error.why, "trace"
        named = tuple(job.ranks[0].path for job in jobs)
    elif isinstance(error, DifferentRunsError):
        named = tuple(dict.fromkeys(paths))
        jobs = tuple(explain_job(path, cache=cache) for path in named)
        why, what = str(error).partition(": these are")[0], "run"
    else:
        raise error
    ranks = sum(len(job.ranks) for job in jobs) if what == "trace" else len(jobs)
    answer = Answer(
        verdict=f"{counted(ranks, what)} of {len(jobs)} different jobs: each is explained alone.",
        why=why,
        next=_next(named),
    )
    return Several(answer, named, jobs)


def _next(paths: Sequence[str]) -> str:
    pair = " ".join(paths) if len(paths) == 2 else "A B"
    return f"stepscope compare {pair}: whether their steps differ, and where"


def short_names(paths: Sequence[str]) -> list[str]:
    """File names; with the folder where two are the same."""
    names = [Path(path).name for path in paths]
    seen = Counter(names)
    return [
        name if seen[name] == 1 else f"{Path(path).parent.name}/{name}"
        for name, path in zip(names, paths, strict=True)
    ]


def step_words(job: Explanation) -> str:
    """The step, as on the job's own screen."""
    if covers_span(job):
        return f"{duration(job.budget.step_ms * 1e6)}"
    return milliseconds(job.budget.step_ms)


def finding_words(job: Explanation) -> str:
    """The first finding with its share."""
    if covers_span(job):
        return "     no training steps found"
    top = job.findings[0]
    share = percent(top.share) if top.share >= _VISIBLE else ""
    return f"{share:>4} {top.title}"


def several_json(several: Several) -> dict[str, Any]:
    """`explain --json` of paths that are not one job: `several` instead of `ranks`."""
    answer = several.answer
    return {
        "schema": SCHEMA,
        "verdict": answer.verdict,
        "why": answer.why,
        "next": answer.next,
        "several": [
            {
                "path": path,
                "paths": [rank.path for rank in job.ranks],
                "device": job.ranks[0].device,
                "verdict": job.verdict,
                "why": job.why,
                "step_ms": None if covers_span(job) else job.budget.step_ms,
                "finding": job.findings[0].id,
            }
            for path, job in zip(several.paths, several.jobs, strict=True)
        ],
    }
