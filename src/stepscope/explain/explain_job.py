"""Several files, one verdict. One worker reads and explains a file; only summaries stay."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.explain.engines import Here, Pool, in_order
from stepscope.explain.explain_file import explain_file, explain_one_of_many
from stepscope.explain.verdict import judge
from stepscope.records.quality import Note
from stepscope.records.words import counted
from stepscope.trace.discover import find_traces, named_file
from stepscope.trace.measured_steps import slowest_in_step
from stepscope.trace.remote import is_url
from stepscope.trace.run_state import run_notes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.explain.engines import Engine
    from stepscope.explain.explain_file import Alone, Also, Outcome
    from stepscope.records.explanation import Explanation, NcclSummary, RankExplanation
    from stepscope.trace.discover import TraceFile
    from stepscope.trace.files import Progress

# With more ranks than this the tables of each are cut to so many rows: nobody reads a thousand
# tables to their ends, and all of them must fit in memory and in one report.
MANY_RANKS = 64
SHORT_ROWS = 100
_SHORT_TABLES = (
    f"more than {MANY_RANKS} ranks: the tables of each hold its longest {SHORT_ROWS} rows, and "
    "what is left out is summed in rows called (others)"
)
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,8})(?!\d)", re.IGNORECASE)


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
    also_for: int | None = None,
    alone: Alone | None = None,
    engine: Engine | None = None,
    memory_limit: int | None = None,
) -> tuple[Explanation, list[Any]]:
    """As `explain_job`; `also(trace, rank)` runs where the trace is; its results are returned.

    Of more than `also_for` ranks it is called for so many only: those the findings are about, and
    the first ones. Their files are then read a second time. A single file that is read in this
    process has `alone(analysis, rank)` called instead.
    """
    engine = engine or Pool()
    files = _find(paths, engine)
    named = {named_file(path) for path in paths}
    later = also is not None and also_for is not None and len(files) > also_for
    first = None if later else also
    outcomes = list(_each(files, cache, progress, first, engine, memory_limit, alone))
    failures = [(f, o) for f, o in zip(files, outcomes, strict=True) if isinstance(o, Exception)]
    for file, error in failures:
        if str(file) in named or len(failures) == len(files):
            raise error
    done = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    if len(done) > 1:
        from stepscope.explain.snapshot_rank import refuse_mixtures

        refuse_mixtures([rank for rank, _ in done])
    ranks, notes = _number([rank for rank, _ in done])
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i].rank or 0, ranks[i].path))
    notes += [Note(id="left-out", detail=str(error)) for _, error in failures]
    notes += _of_runs(paths)
    if len(files) > MANY_RANKS:
        notes.append(Note(id="short-tables", detail=_SHORT_TABLES))
    explanation = judge(tuple(ranks[i] for i in order), tuple(notes), _nccl(paths))
    if later and also and also_for:
        return explanation, _second_look(explanation, files, cache, also, also_for, engine)
    return explanation, [done[i][1] for i in order if done[i][1] is not None]


def explain_share(
    paths: Sequence[str | Path],
    *,
    engine: Engine,
    cache: bool = True,
    also: Also | None = None,
    also_for: int | None = None,
    memory_limit: int | None = None,
) -> None:
    """The part of `explain_also` of a process that takes part and does not lead."""
    files = _find(paths, engine)
    later = also_for is not None and len(files) > also_for
    for _ in _each(files, cache, None, None if later else also, engine, memory_limit):
        pass


def _find(paths: Sequence[str | Path], engine: Engine) -> list[TraceFile]:
    if not paths:
        raise UsageError("nothing to explain: give a trace file, a folder of them or a run folder")
    return engine.agree(lambda: [file for path in paths for file in find_traces(path)])


def _each(
    files: list[TraceFile],
    cache: bool,
    progress: Progress | None,
    also: Also | None,
    engine: Engine,
    memory_limit: int | None,
    alone: Alone | None = None,
) -> Iterable[Outcome]:
    if len(files) == 1 and isinstance(engine, Pool):
        return [
            explain_file(
                files[0],
                cache=cache,
                also=also,
                alone=alone,
                progress=progress,
                memory_limit=memory_limit,
            )
        ]
    most_rows = SHORT_ROWS if len(files) > MANY_RANKS else None
    work = partial(
        explain_one_of_many,
        cache=cache,
        also=also,
        most_rows=most_rows,
        memory_limit=memory_limit,
        slowest=_slowest(files),
    )
    return in_order(engine, work, files, progress)


def _slowest(files: list[TraceFile]) -> Path | None:
    """The rank whose step is the job's; what lies elsewhere is not fetched for it."""
    here = [file for file in files if isinstance(file, Path)]
    return slowest_in_step(here) if len(here) == len(files) else None


def _second_look(
    explanation: Explanation,
    files: list[TraceFile],
    cache: bool,
    also: Also,
    most: int,
    engine: Engine,
) -> list[Any]:
    """What `also` makes of the ranks that are worth it, in their order."""
    by_path = {str(file): file for file in files}
    told = [finding.rank for finding in explanation.findings]
    if explanation.job:
        told += [straggler.rank for straggler in explanation.job.stragglers.ranks]
    found = [rank.path for number in told for rank in explanation.ranks if rank.rank == number]
    ordered = dict.fromkeys([*found, *(rank.path for rank in explanation.ranks)])
    chosen = set([*ordered][:most])
    again = [by_path[rank.path] for rank in explanation.ranks if rank.path in chosen]
    work = partial(
        explain_one_of_many, cache=cache, also=also, most_rows=0, slowest=_slowest(files)
    )
    # Of a job's processes only the one that leads comes here.
    looks = in_order(Here() if engine.collective else engine, work, again)
    return [outcome[1] for outcome in looks if not isinstance(outcome, Exception)]


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
    if _are_processes(out):
        places = sorted(range(len(out)), key=lambda i: _folder_order(out[i].path))
        for number, place in enumerate(places):
            out[place] = replace(out[place], rank=number, name=f"process {number + 1}")
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
        notes.append(
            Note(
                id="missing-ranks", detail=f"{len(out)} of {counted(max(worlds), 'rank')} are here"
            )
        )
    return out, notes


def _folder_order(path: str) -> tuple[int, str]:
    """rank-00000, rank-00000.2, ..., rank-00000.10: as the processes came."""
    name = Path(path).parent.name
    return len(name), name


def _are_processes(ranks: list[RankExplanation]) -> bool:
    """Whether these ran side by side without being ranks of a job, so that all say rank 0."""
    members = [rank.part.member for rank in ranks]
    apart = {(rank.part.host, m.pid) for rank, m in zip(ranks, members, strict=True) if m}
    alone = all(member is not None and member.world_size == 1 for member in members)
    return alone and len(ranks) > 1 and len(apart) == len(ranks)


def _of_runs(paths: Sequence[str | Path]) -> list[Note]:
    """Runs that are not over, or were left open, or could not write all they had."""
    folders = [Path(path) for path in paths if not is_url(str(path)) and Path(path).is_dir()]
    return [note for folder in folders for note in run_notes(folder)]


def _nccl(paths: Sequence[str | Path]) -> NcclSummary | None:
    """NCCL's own logs, where one of the folders holds some."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    if not any(True for folder in folders for _ in folder.glob("*.log*")):
        return None
    from stepscope.explain.nccl import explain_nccl

    return explain_nccl(*folders)
