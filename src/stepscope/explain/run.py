"""Several files, one verdict. One worker reads and explains a file; only summaries stay."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.explain.budget import mean_budget
from stepscope.explain.rank import explain_rank
from stepscope.records.explanation import Explanation
from stepscope.records.quality import Note
from stepscope.trace.discover import find_traces
from stepscope.trace.read import read_trace
from stepscope.trace.truth import read_truth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.explanation import Finding, RankExplanation
    from stepscope.records.trace import Trace
    from stepscope.trace.files import Progress

    Also = Callable[[Trace, RankExplanation], Any]

_SEVERITIES = ("high", "medium", "low", "none")
_COMMUNICATION = "exposed-communication"
_OWN_TIME = ("data-loading", "host-bound", "launch-bound", "blocking-syncs", "exposed-copies")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)


def explain_job(
    *paths: str | Path, cache: bool = True, progress: Progress | None = None
) -> Explanation:
    """Explain trace files, folders of them, or run folders, as one job."""
    return explain_also(paths, cache=cache, progress=progress)[0]


def explain_also(
    paths: Sequence[str | Path],
    *,
    cache: bool = True,
    progress: Progress | None = None,
    also: Also | None = None,
) -> tuple[Explanation, list[Any]]:
    """As `explain_job`; `also(trace, rank)` runs where the trace is; its results are returned."""
    if not paths:
        raise UsageError("nothing to explain: give a trace file, a folder of them or a run folder")
    files = [file for path in paths for file in find_traces(path)]
    named = [file for path in paths if not Path(path).is_dir() for file in [Path(path)]]
    outcomes = _each(files, cache, progress, also)
    failures = [(file, error) for file, error in outcomes if isinstance(error, Exception)]
    for file, error in failures:
        if file in named or len(failures) == len(files):
            raise error
    done = [outcome for _, outcome in outcomes if not isinstance(outcome, Exception)]
    ranks, notes = _number([rank for rank, _ in done])
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i].rank or 0, ranks[i].path))
    left_out = [Note(id="left-out", detail=str(error)) for _, error in failures]
    explanation = _judge(tuple(ranks[i] for i in order), (*notes, *left_out))
    return explanation, [done[i][1] for i in order if also]


def _each(
    files: list[Path], cache: bool, progress: Progress | None, also: Also | None
) -> list[tuple[Path, Any]]:
    if len(files) == 1:
        return [(files[0], _one(files[0], cache, also, progress))]
    from concurrent.futures import ProcessPoolExecutor

    total = sum(file.stat().st_size for file in files)
    read = 0
    out = []
    with ProcessPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(_one, file, cache, also) for file in files]
        for file, job in zip(files, jobs, strict=True):
            out.append((file, job.result()))
            read += file.stat().st_size
            if progress:
                progress(read, total)
    return out


def _one(
    file: Path, cache: bool, also: Also | None, progress: Progress | None = None
) -> tuple[RankExplanation, Any] | Exception:
    try:
        trace = read_trace(file, cache=cache, progress=progress)
    except UnreadableInputError as error:
        return error
    rank = explain_rank(trace, read_truth(file))
    return rank, also(trace, rank) if also else None


def _number(ranks: list[RankExplanation]) -> tuple[list[RankExplanation], list[Note]]:
    """Files that do not say their rank get one from their name, else from their place."""
    out, notes = [], []
    for place, rank in enumerate(ranks):
        if rank.rank is None:
            match = _RANK_IN_NAME.search(Path(rank.path).name) or _RANK_IN_NAME.search(
                Path(rank.path).parent.name
            )
            rank = replace(rank, rank=int(match[1]) if match else place)
        out.append(rank)
    numbers = [rank.rank for rank in out]
    twice = sorted({n for n in numbers if n is not None and numbers.count(n) > 1})
    if twice:
        which = ", ".join(map(str, twice[:8]))
        notes.append(
            Note(id="duplicate-ranks", detail=f"more than one file says it is rank {which}")
        )
    worlds = {rank.world_size for rank in out if rank.world_size}
    if len(worlds) > 1:
        notes.append(
            Note(
                id="mixed-worlds",
                detail=f"files of jobs with different world sizes: {sorted(worlds)}",
            )
        )
    elif worlds and len(out) > 1 and len(out) < max(worlds):
        notes.append(Note(id="missing-ranks", detail=f"{len(out)} of {max(worlds)} ranks are here"))
    return out, notes


def _judge(ranks: tuple[RankExplanation, ...], notes: tuple[Note, ...]) -> Explanation:
    findings = _merge(ranks)
    top = findings[0]
    whose = f" (rank {top.rank})" if len(ranks) > 1 and top.rank is not None else ""
    first_remedy = top.remedies[0].summary if top.remedies else None
    return Explanation(
        verdict=f"{top.title}{whose}: {top.summary}",
        why=top.evidence[0] if top.evidence else "",
        next=first_remedy or "nothing to fix here: keep this trace to compare later runs with",
        ranks=ranks,
        budget=mean_budget(ranks),
        findings=findings,
        quality=notes,
    )


def _merge(ranks: tuple[RankExplanation, ...]) -> tuple[Finding, ...]:
    """One finding of each kind: the gravest rank's, with that rank's number."""
    worst: dict[str, Finding] = {}
    for rank in ranks:
        for finding in rank.findings:
            held = worst.get(finding.id)
            if held is None or finding.share > held.share:
                worst[finding.id] = replace(finding, rank=rank.rank)
    found = sorted(worst.values(), key=lambda f: (_SEVERITIES.index(f.severity), -f.share))
    if any(finding.severity in ("high", "medium") for finding in found):
        found = [finding for finding in found if finding.id != "healthy"]
    else:
        found.sort(key=lambda finding: finding.id != "healthy")
    return tuple(_cause_before_symptom(found, ranks))


def _cause_before_symptom(
    found: list[Finding], ranks: tuple[RankExplanation, ...]
) -> list[Finding]:
    """A rank that waits in a collective shows communication; the rank it waits for shows why.

    When the rank with the least exposed communication loses about as much to something of its own
    as the others wait longer, that something leads.
    """
    if found[0].id != _COMMUNICATION or len(ranks) < 2:
        return found
    exposed = {rank.rank: _exposed_share(rank) for rank in ranks}
    awaited = min(exposed, key=lambda number: exposed[number])
    waits = max(exposed.values()) - exposed[awaited]
    for place, finding in enumerate(found[1:], 1):
        own = finding.id in _OWN_TIME and finding.rank == awaited
        if own and finding.share >= waits / 2 and waits >= found[0].share / 2:
            waiting = f"rank {found[0].rank} spends {waits:.0%} more of the step waiting for it"
            lead = replace(finding, evidence=(*finding.evidence, waiting))
            return [lead, *found[:place], *found[place + 1 :]]
    return found


def _exposed_share(rank: RankExplanation) -> float:
    return sum(part.share for part in rank.budget.parts if part.id == "exposed_comm")
