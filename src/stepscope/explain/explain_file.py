"""One trace file, explained where it is read: in this process, a worker, or another machine.

What comes back is all that is ever held of a rank, so it is small: no columns of gaps, and tables
that are shortened where there are many ranks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.explain.explain_rank import explain_rank
from stepscope.explain.memory.account import look_beside
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.explain.truncate_tables import shorten
from stepscope.trace.discover import on_disk
from stepscope.trace.measured_steps import read_measured_steps
from stepscope.trace.profiles import find_profile
from stepscope.trace.rank_folder import read_rank_folder
from stepscope.trace.read import read_trace
from stepscope.trace.regular_files import read_head
from stepscope.trace.snapshot_pickle import is_pickle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope.records.explanation import RankExplanation
    from stepscope.records.job import RankFolder
    from stepscope.records.profile import Profile
    from stepscope.records.trace import Trace
    from stepscope.trace.discover import TraceFile
    from stepscope.trace.files import Progress

    Also = Callable[[Trace, RankExplanation], Any]
    Alone = Callable[[RankAnalysis, RankExplanation], Any]
    Outcome = tuple[RankExplanation, Any] | Exception


def explain_file(
    file: TraceFile,
    *,
    cache: bool,
    also: Also | None = None,
    alone: Alone | None = None,
    most_rows: int | None = None,
    progress: Progress | None = None,
    memory_limit: int | None = None,
    slowest: Path | None = None,
) -> Outcome:
    """The rank and what `also` or `alone` made of it; an error where the file cannot be read.
    `slowest` is the trace of the rank whose steps are the whole job's."""
    try:
        with on_disk(file) as path:
            if is_pickle(read_head(path)):
                from stepscope.explain.snapshot_rank import explain_snapshot

                return explain_snapshot(path, str(file), memory_limit), None
            trace = replace(read_trace(path, cache=cache, progress=progress), path=str(file))
            folder, analysis = read_rank_folder(path), RankAnalysis(trace)
            rank = explain_rank(
                trace,
                read_measured_steps(path, slowest),
                folder,
                _calibration(trace, folder),
                look_beside(path, memory_limit),
                analysis,
            )
    except UnreadableInputError as error:
        return error
    except MemoryError:
        return UnreadableInputError(f"{file}: there is not enough memory to read it")
    made = alone(analysis, rank) if alone else also(trace, rank) if also else None
    rank = replace(rank, gaps=None)
    return (rank if most_rows is None else shorten(rank, most_rows)), made


def _calibration(trace: Trace, folder: RankFolder | None) -> Profile | None:
    """Of the machine that the rank ran on; a bare trace does not say which that was."""
    if folder is None or folder.host is None:
        return None
    return find_profile(folder.host, kind=trace.kind, device=trace.device_name, skip_broken=True)


def explain_one_of_many(
    file: TraceFile,
    *,
    cache: bool,
    also: Also | None = None,
    most_rows: int | None = None,
    memory_limit: int | None = None,
    slowest: Path | None = None,
) -> Outcome:
    """As `explain_file`, but a defect of ours costs this file only."""
    try:
        return explain_file(
            file,
            cache=cache,
            also=also,
            most_rows=most_rows,
            memory_limit=memory_limit,
            slowest=slowest,
        )
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        return StepscopeError(
            f"{file}: a defect in stepscope: {type(error).__name__}: {error}; "
            "set STEPSCOPE_DEBUG=1 to see where"
        )
