"""Communication in a CPU's trace: tasks next to the host's lane, and where the host waits for them.

gloo's spans lie on threads of their own. The c10d:: call with as many elements starts a span. The
host waits for a span that ends in a gap of its lane, and for one that covers a long gap: then the
result is there, the host continues, and only later does gloo's thread end its span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.call_tree import distinct_places
from stepscope.explain.collective_calls import find_callers
from stepscope.explain.replay.graph import CallKind, Calls, Tasks
from stepscope.records.trace import ABSENT, HostKind
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.work import Work
    from stepscope.records.trace import Trace

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int32]

_SHORTEST_WAIT_NS = 20_000
_LONG_GAP_NS = 200_000
_SPANNED = 0.8  # of the gap


def communicate(
    trace: Trace, work: Work, calls: Calls, start_ns: Floats, others: NDArray[np.intp]
) -> tuple[Calls, Tasks, int]:
    """The host's calls with their waits, the tasks, and the number of streams.

    `start_ns` are the calls' starts on the trace's clock, `others` is the work of other threads.
    """
    if not len(calls):
        others = others[:0]
    call = _launching(trace, work, calls, start_ns, others)
    order = np.lexsort((work.start_ns[others], call))
    others, call = others[order], call[order]
    lanes = distinct_places(trace.host.thread[work.rows[others]])[1]
    begun = work.start_ns[others].astype(np.float64)
    end = work.end_ns[others].astype(np.float64)
    count = len(others)
    tasks = Tasks(
        call=call,
        stream=lanes.astype(np.int32).reshape(-1),
        dur_ns=end - begun,
        spacing_ns=np.zeros(count),
        latency_ns=begun - start_ns[call] if count else np.zeros(0),
        kind=work.kind[others],
        row=work.rows[others].astype(np.int32),
        after=np.full(count, ABSENT, np.int32),
        after_ns=np.zeros(count),
    )
    kind = calls.kind.copy()
    kind[call] = CallKind.LAUNCH
    calls = replace(calls, kind=kind)
    streams = int(tasks.stream.max(initial=-1)) + 1
    end = _really_ended(calls, tasks, start_ns, begun, end)
    tasks = replace(tasks, dur_ns=end - begun)
    return *_with_waits(calls, tasks, start_ns, end), streams


def _launching(
    trace: Trace, work: Work, calls: Calls, start_ns: Floats, others: NDArray[np.intp]
) -> Ints:
    """The call that started each task: its c10d:: call, else the last call before it."""
    call = np.searchsorted(start_ns, work.start_ns[others], side="right").astype(np.int32) - 1
    spans = trace.host.kind[work.rows[others]] == HostKind.ANNOTATION
    place = np.full(len(trace.host) + 1, ABSENT, np.int32)
    place[calls.row] = np.arange(len(calls), dtype=np.int32)
    caller = np.full(len(others), ABSENT, np.int32)
    caller[spans] = find_callers(trace, work.rows[others[spans]])
    known = place[caller]  # caller -1 reads the last place, which is absent
    return np.maximum(np.where(known >= 0, known, call), 0).astype(np.int32)


def _really_ended(
    calls: Calls, tasks: Tasks, start_ns: Floats, begun: Floats, end: Floats
) -> Floats:
    """The tasks' ends; one that the host waited for ends no later than the host continues.

    Where another task ends as the host continues, the host waited for that one.
    """
    ended = end.copy()
    for number in np.flatnonzero(calls.gap_ns > _LONG_GAP_NS).tolist():
        gap, resumed = calls.gap_ns[number], start_ns[number]
        earlier = tasks.call < number
        if (earlier & (end <= resumed) & (end >= resumed - (1 - _SPANNED) * gap)).any():
            continue
        running = earlier & (ended > resumed)
        running &= begun <= resumed - _SPANNED * gap
        ended[running] = resumed
    return ended


def _with_waits(
    calls: Calls, tasks: Tasks, start_ns: Floats, end_ns: Floats
) -> tuple[Calls, Tasks]:
    """Insert a WAIT before every call in whose gap a task ended; the rest of the gap follows it."""
    if not len(tasks):
        return calls, tasks
    before = start_ns - calls.gap_ns
    order = np.argsort(end_ns, kind="stable")
    last = np.searchsorted(end_ns[order], start_ns, side="right") - 1
    task = order[np.maximum(last, 0)]
    ended = end_ns[task]
    waited = np.where((last >= 0) & (tasks.call[task] < np.arange(len(calls))), ended - before, 0.0)
    waits = np.flatnonzero(waited > _SHORTEST_WAIT_NS)
    if not len(waits):
        return calls, tasks
    gaps = calls.gap_ns.copy()
    gaps[waits] -= waited[waits]
    source = np.sort(np.concatenate((np.arange(len(calls)), waits)), kind="stable")
    new = np.zeros(len(source), np.bool_)
    new[waits + np.arange(len(waits))] = True  # before the call it delays
    columns = {
        name: getattr(calls, name)[source]
        for name in calls.__struct_fields__
        if name not in ("awaits", "gap_ns")
    }
    columns["gap_ns"] = gaps[source]
    for name in ("gap_ns", "call_ns", "tail_ns", "frames"):
        columns[name][new] = 0.0
    columns["kind"][new] = CallKind.WAIT
    awaits: list[tuple[int, ...]] = [()] * len(source)
    for place, number in zip(np.flatnonzero(new).tolist(), waits.tolist(), strict=True):
        launched = (tasks.call < number) & (end_ns <= start_ns[number])
        awaits[place] = tuple(distinct(tasks.stream[launched]).tolist())
    places = np.flatnonzero(~new).astype(np.int32)
    return Calls(**columns, awaits=tuple(awaits)), replace(tasks, call=places[tasks.call])
