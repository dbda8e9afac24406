"""Which line of the user's code each event of a trace belongs to, and in which part of the step."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.optimizer_steps import in_optimizer
from stepscope.explain.python_functions import place_of
from stepscope.explain.work import DATA_LOADING, rows_named
from stepscope.records.trace import ABSENT, HostKind
from stepscope.trace.links import find_parents, nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.arrays import Bools, Indices, Int32s, Int64s
    from stepscope.records.place import Place
    from stepscope.records.trace import Trace

# As measure/line_watch.py names them, before file(line): function; the second one for a line that
# was already running when its step began.
MARK, RUNNING = "stepscope line ", "stepscope in line "
NODE = "autograd::engine::evaluate_function: "


class LinePhase(IntEnum):
    """The part of a step that a line's time is counted under."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    OTHER = 3


class HostLines(msgspec.Struct, frozen=True, kw_only=True):
    """For every host row: its line, as a string code of the mark's name (-1: none), and phase."""

    line: Int32s
    phase: NDArray[np.int8]
    is_mark: Bools
    operator: Bools  # rows of torch's own operators
    node: Int32s  # the node of the backward graph around each row, or -1


def find_lines(trace: Trace) -> HostLines:
    """Backward belongs to the line that its forward ran on, unless a line runs inside of it."""
    host = trace.host
    every = np.arange(len(host), dtype=np.intp)
    named = host.kind <= HostKind.ANNOTATION
    is_mark = rows_named(trace, host, named, _names_line)
    is_node = rows_named(trace, host, named, lambda name: name.startswith(NODE))
    operator = (host.kind == HostKind.OPERATOR) & ~is_mark
    mark = nearest_of(host, is_mark, every)
    node = nearest_of(host, is_node, every)
    forward = _forward_rows(trace, node)
    # A parent's row comes before its children's: a mark after the node lies inside of it.
    elsewhere = (forward >= 0) & (mark < node)
    of_forward = np.where(forward >= 0, mark[np.maximum(forward, 0)], ABSENT)
    mark = np.where(elsewhere & (of_forward >= 0), of_forward, mark)
    marked_thread = host.thread[is_mark][:1].sum()  # there is one, if any
    other_thread = (mark < 0) & (host.thread != marked_thread)
    mark = np.where(other_thread, _mark_at(trace, is_mark, host.start_ns), mark)
    line = np.where(mark >= 0, host.name[np.maximum(mark, 0)], ABSENT).astype(np.int32)
    return HostLines(
        line=line,
        phase=_phases(trace, every, operator, node),
        is_mark=is_mark,
        operator=operator,
        node=node,
    )


def _forward_rows(trace: Trace, node: Int32s) -> Int32s:
    """The forward operator of the node around each row, or -1."""
    host = trace.host
    known = host.forward_of >= 0
    rows = np.flatnonzero(known)
    by_node = np.full(len(host) + 1, ABSENT, np.int32)
    by_node[node[rows]] = host.forward_of[rows]  # a node without number writes the last place
    by_node[-1] = ABSENT
    own = nearest_of(host, known, np.arange(len(host), dtype=np.intp))
    direct = np.where(own >= 0, host.forward_of[np.maximum(own, 0)], ABSENT)
    return np.where(direct >= 0, direct, by_node[node]).astype(np.int32)


def _mark_at(trace: Trace, is_mark: Bools, times: Int64s) -> Int32s:
    """The innermost mark that is open at each time, or -1: autograd's threads work for the line
    that waits for them."""
    host = trace.host
    rows = np.flatnonzero(is_mark)
    if not len(rows):
        return np.full(len(times), ABSENT, np.int32)
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    last = rows[np.maximum(np.searchsorted(host.start_ns[rows], times, side="right") - 1, 0)]
    mark: Int32s = np.where(times < host.start_ns[rows[0]], ABSENT, last).astype(np.int32)
    around = nearest_of(host, is_mark, host.parent)
    active = np.flatnonzero(mark >= 0)
    while len(active):
        over = host.start_ns[mark[active]] + host.dur_ns[mark[active]] <= times[active]
        active = active[over]
        mark[active] = around[mark[active]]
        active = active[mark[active] >= 0]
    return mark


def _phases(trace: Trace, rows: Indices, operator: Bools, node: Int32s) -> NDArray[np.int8]:
    host = trace.host
    inside = nearest_of(host, operator, rows) >= 0
    phase = np.where(inside, LinePhase.FORWARD, LinePhase.OTHER).astype(np.int8)
    phase[(node >= 0) | (host.forward_of >= 0)] = LinePhase.BACKWARD
    phase[in_optimizer(trace, rows)] = LinePhase.OPTIMIZER
    named = host.kind <= HostKind.ANNOTATION
    loading = rows_named(trace, host, named, DATA_LOADING.search)
    phase[nearest_of(host, loading, rows) >= 0] = LinePhase.OTHER
    return phase


def place_of_mark(name: str) -> Place | None:
    """The line that a mark stands for."""
    return place_of(name.removeprefix(MARK).removeprefix(RUNNING))


def _names_line(name: str) -> bool:
    return name.startswith((MARK, RUNNING))


def nest(trace: Trace) -> Trace:
    """End every event with the line that it began on.

    A step ends inside its optimizer's step, and with it the marks: the optimizer's own events end a
    little later.
    """
    host = trace.host
    is_mark = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _names_line)
    around = _mark_at(trace, is_mark, host.start_ns)
    ends = host.start_ns + host.dur_ns
    here = np.maximum(around, 0)
    cut = (around >= 0) & ~is_mark & (host.thread == host.thread[here])
    cut &= around < np.arange(len(host))  # of those that begin together, the earlier is outside
    ends = np.where(cut, np.minimum(ends, ends[here]), ends)
    parent = find_parents(host.thread, host.start_ns, ends)
    return replace(trace, host=replace(host, dur_ns=ends - host.start_ns, parent=parent))
