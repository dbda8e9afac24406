"""One step that represents all steps of a trace: the median of each call and task.

Steps of one training make the same calls in the same order, so each call and task has a time in
every step, and the median drops what happened in one step only. If the steps differ, the one of
median length represents all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.errors import NotCapturedError
from stepscope.records.explanation import Steps
from stepscope.records.trace import Trace
from stepscope.step.graph import Calls, StepGraph, Tasks, build_graph, describe
from stepscope.step.statistics import median, medians
from stepscope.step.work import Work

if TYPE_CHECKING:
    from numpy.typing import NDArray


_Table = TypeVar("_Table", Calls, Tasks)
_CALL_TIMES = ("gap_ns", "call_ns", "tail_ns", "frames")
_TASK_TIMES = ("dur_ns", "spacing_ns", "latency_ns", "after_ns")


class Typical(msgspec.Struct, frozen=True, kw_only=True):
    graph: StepGraph
    steps: int  # that it represents
    alike: bool  # they made the same calls


def typical_step(trace: Trace, work: Work, steps: Steps, *, described: bool = True) -> Typical:
    """Raises NotCapturedError for a trace without work; `described` as in `build_graph`."""
    whole = build_graph(trace, work, described=False)
    if not whole.size:
        raise NotCapturedError(
            f"{trace.path}: there is no operator and no device event to replay; "
            "record with ProfilerActivity.CPU and CUDA"
        )
    typical = _one_of(trace, _pieces(trace, whole, steps))
    typical = typical or Typical(graph=whole, steps=1, alike=True)
    return replace(typical, graph=describe(trace, work, typical.graph)) if described else typical


def _pieces(trace: Trace, whole: StepGraph, steps: Steps) -> list[StepGraph]:
    """The graph of each step with calls; none if launches were not recorded."""
    if (whole.calls.row < 0).any():
        return []
    start = trace.host.start_ns[whole.calls.row]
    windows = [(step.start_ns, step.start_ns + step.dur_ns) for step in steps.steps]
    pieces = [_piece(trace, whole, start, window) for window in windows]
    return [piece for piece in pieces if len(piece.calls)]


def _one_of(trace: Trace, pieces: list[StepGraph]) -> Typical | None:
    if not pieces:
        return None
    # A step at the window's end may be cut off: leave out steps that did far less.
    most = max(piece.size for piece in pieces)
    pieces = [piece for piece in pieces if piece.size > most / 2]
    if all(_alike(trace, piece, pieces[-1]) for piece in pieces):
        return Typical(
            graph=replace(
                pieces[-1],
                calls=_medians([piece.calls for piece in pieces], _CALL_TIMES),
                tasks=_medians([piece.tasks for piece in pieces], _TASK_TIMES),
                end_ns=median([piece.end_ns for piece in pieces]),
            ),
            steps=len(pieces),
            alike=True,
        )
    order = sorted(pieces, key=lambda piece: piece.host_ns)
    return Typical(graph=order[(len(order) - 1) // 2], steps=len(pieces), alike=False)


def _piece(
    trace: Trace, whole: StepGraph, start: NDArray[np.int64], window: tuple[int, int]
) -> StepGraph:
    """The calls of one step with the tasks they launched."""
    first, last = np.searchsorted(start, window).tolist()
    calls = _some(whole.calls, slice(first, last))
    if not len(calls):
        return replace(whole, calls=calls, tasks=_some(whole.tasks, np.zeros(0, np.intp)))
    gaps = calls.gap_ns.copy()
    gaps[0] = min(gaps[0], float(start[first] - window[0]))
    ended = start[last - 1] + trace.host.dur_ns[calls.row[-1]]
    launched = np.flatnonzero((whole.tasks.call >= first) & (whole.tasks.call < last))
    if not whole.on_host:
        launched = launched[trace.device.launch[whole.tasks.row[launched]] >= 0]
    tasks = _some(whole.tasks, launched)
    place = np.full(len(whole.tasks) + 1, -1, np.int32)
    place[launched] = np.arange(len(launched), dtype=np.int32)
    return replace(
        whole,
        calls=replace(calls, gap_ns=gaps),
        tasks=replace(tasks, call=tasks.call - np.int32(first), after=place[tasks.after]),
        end_ns=float(max(0, window[1] - ended)),
    )


def _some(table: _Table, chosen: NDArray[np.intp] | slice[int, int]) -> _Table:
    columns = {name: getattr(table, name)[chosen] for name in table.__struct_fields__}
    return type(table)(**columns)


def _alike(trace: Trace, one: StepGraph, other: StepGraph) -> bool:
    if len(one.calls) != len(other.calls) or len(one.tasks) != len(other.tasks):
        return False
    host = trace.host.name
    same = np.array_equal(host[one.calls.row], host[other.calls.row])
    return same and np.array_equal(one.tasks.call, other.tasks.call)


def _medians(tables: list[_Table], names: tuple[str, ...]) -> _Table:
    """The last table with the median of these columns."""
    columns = {name: medians([getattr(table, name) for table in tables]) for name in names}
    return replace(tables[-1], **columns)
