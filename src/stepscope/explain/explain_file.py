"""One trace file, explained where it is read: in this process, in a worker, or elsewhere.

Only the result is kept of a rank, so it is small: no columns of gaps, and truncated tables when
there are many ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.explain.explain_rank import explain_analysis
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.explain.truncate_tables import truncate_tables
from stepscope.records.explanation import RankExplanation
from stepscope.trace.discover import on_disk
from stepscope.trace.rank_inputs import AS_USUAL, ReadOptions, read_rank_inputs
from stepscope.trace.regular_files import read_head
from stepscope.trace.snapshot_pickle import is_pickle
from stepscope.trace.together_files import is_server_file

if TYPE_CHECKING:
    from stepscope.trace.discover import TraceFile
    from stepscope.trace.files import Progress

_R = TypeVar("_R")
# Called with a rank while its trace is in memory.
Visit = Callable[[RankAnalysis, RankExplanation], _R]


class ExplainedFile(NamedTuple, Generic[_R]):
    """A rank, and the result of the visit; a memory snapshot has no trace to visit."""

    rank: RankExplanation
    results: tuple[_R, ...] = ()


def explain_file(
    file: TraceFile,
    visit: Visit[_R] | None = None,
    *,
    options: ReadOptions = AS_USUAL,
    max_rows: int | None = None,
    progress: Progress | None = None,
) -> ExplainedFile[_R]:
    """Read and explain a file, then visit it. Raises UnreadableInputError."""
    try:
        with on_disk(file) as path:
            if is_pickle(read_head(path)):
                from stepscope.explain.snapshot_rank import explain_snapshot

                return ExplainedFile(explain_snapshot(path, str(file), options.memory_limit))
            if is_server_file(path):
                from stepscope.explain.server_rank import explain_server

                return ExplainedFile(explain_server(path, str(file)))
            inputs = read_rank_inputs(path, options, name=str(file), progress=progress)
            analysis = RankAnalysis(inputs)
            rank = explain_analysis(analysis)
    except MemoryError:
        raise UnreadableInputError(f"{file}: there is not enough memory to read it") from None
    results = (visit(analysis, rank),) if visit else ()
    rank = replace(rank, gaps=None)
    return ExplainedFile(rank if max_rows is None else truncate_tables(rank, max_rows), results)


def try_explain_file(
    file: TraceFile, *, visit: Visit[_R] | None, options: ReadOptions, max_rows: int | None = None
) -> ExplainedFile[_R] | Exception:
    """As `explain_file`, but returns the error, so that one bad file does not stop the others."""
    try:
        return explain_file(file, visit, options=options, max_rows=max_rows)
    except UnreadableInputError as error:
        return error
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        return StepscopeError(
            f"{file}: a defect in stepscope: {type(error).__name__}: {error}; "
            "set STEPSCOPE_DEBUG=1 to see where"
        )
