"""Explain traces or runs that are not one job each alone, and print one line for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import to_builtins
from rich.cells import cell_len
from rich.text import Text

from stepscope.errors import UsageError
from stepscope.explain.explain_job import SeveralJobsError, explain_job
from stepscope.explain.incomplete_ranks import covers_span
from stepscope.records.explanation import Explanation
from stepscope.text.figures import duration, milliseconds, percent
from stepscope.text.words import counted
from stepscope.trace.discover import DifferentRunsError
from stepscope.ui.terminal.console import (
    FAINT,
    SEVERITY_STYLES,
    cut,
    labelled,
    make_console,
    wrapped,
)
from stepscope.ui.words import Answer, short_kernel

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
    """Return the step, as on the job's own screen."""
    if covers_span(job):
        return f"{duration(job.budget.step_ms * 1e6)}"
    return milliseconds(job.budget.step_ms)


def finding_words(job: Explanation) -> str:
    """Return the first finding with its share."""
    if covers_span(job):
        return "     no training steps found"
    top = job.findings[0]
    share = percent(top.share) if top.share >= _VISIBLE else ""
    return f"{share:>4} {top.title}"


def several_json(several: Several) -> dict[str, Any]:
    """`explain --json` of paths that are not one job: `several` instead of `ranks`."""
    return {
        "schema": SCHEMA,
        **to_builtins(several.answer),
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


# Several jobs on one screen: what they are, and a line for each.

_MOST_JOBS = 40
_MOST_LINES = 3


def print_several(several: Several, *, width: int | None = None) -> None:
    """Print the first jobs, in the order given."""
    console = make_console(width)
    answer = several.answer
    out = labelled("verdict", wrapped(answer.verdict, console, _MOST_LINES, "bold"))
    out += labelled("why", wrapped(answer.why, console, _MOST_LINES))
    out += labelled("next", wrapped(answer.next, console, _MOST_LINES))
    for line in [*out, Text(), *_rows(several, console.width)]:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _rows(several: Several, width: int) -> list[Text]:
    jobs = several.jobs[:_MOST_JOBS]
    names = [short_kernel(name, max(16, width // 3)) for name in short_names(several.paths)]
    columns = [
        names[: len(jobs)],
        [_device(job) for job in jobs],
        [step_words(job) for job in jobs],
    ]
    widths = [max(map(cell_len, column)) for column in columns]
    rows = []
    for job, *cells in zip(jobs, *columns, strict=True):
        padded = [
            f"{cell}{' ' * (room - cell_len(cell))}"
            for cell, room in zip(cells, widths, strict=True)
        ]
        row = Text("  ".join(padded) + "  ")
        words = cut(finding_words(job), max(1, width - row.cell_len))
        row.append(words, SEVERITY_STYLES[job.findings[0].severity])
        rows.append(row)
    left = len(several.jobs) - len(jobs)
    return [*rows, Text(f"{left} more", style=FAINT)] if left else rows


def _device(job: Explanation) -> str:
    rank = job.ranks[0]
    ranks = f" x {len(job.ranks)}" if len(job.ranks) > 1 else ""
    return f"{rank.device or rank.kind.upper()}{ranks}"
