"""CUDA graphs in a trace: the work that they launched, what they recorded, and the
profiler's cost inside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.compiled import CapturedGraph, CapturedOperator
from stepscope.records.explanation import StepTime
from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT, DeviceKind, HostEvents, HostKind, Thread, Trace
from stepscope.step.arrays import Bools, Indices, Int64s
from stepscope.step.graph import CallKind, Flags, StepGraph
from stepscope.step.work import named, one_of
from stepscope.trace.links import is_among

is_graph_launch = one_of("graphlaunch")
MOSTLY = 0.5  # of the device's time: such a step is that of its graphs


def find_replayed(trace: Trace) -> Bools:
    """Per device event: a graph launch started it.

    The launches of the window's first replays were often not recorded. Their kernels still have
    the number of a graph's node, or share the number of their launch: other launches start one.
    """
    device = trace.device
    linked = device.launch >= 0
    names = trace.host.name[np.maximum(device.launch, 0)] if linked.any() else device.name
    replayed = named(trace, names, linked, is_graph_launch)
    work = device.kind <= DeviceKind.MEMSET
    lost = np.flatnonzero(work & ~linked & (device.correlation > 0))
    if len(lost):
        _, which, count = np.unique(
            device.correlation[lost], return_inverse=True, return_counts=True
        )
        replayed[lost] = count[which.reshape(-1)] > 1
    replayed |= work & (device.graph_node > 0)
    return replayed


def replayed_share(trace: Trace) -> float:
    """Of the device's time, the part that graphs launched."""
    device = trace.device
    whole = int(device.dur_ns[device.kind <= DeviceKind.MEMSET].sum())
    return int(device.dur_ns[find_replayed(trace)].sum()) / whole if whole else 0.0


def find_gaps_in_replays(trace: Trace, end_ns: Int64s) -> Bools:
    """Gaps, by their ends, before a graph's kernel that is not its first: no launch fills them."""
    device = trace.device
    rows = np.flatnonzero(find_replayed(trace))
    if not len(rows):
        return np.zeros(len(end_ns), np.bool_)
    start = device.start_ns[rows]
    replays, which = np.unique(device.correlation[rows], return_inverse=True)
    first = np.full(len(replays), np.iinfo(np.int64).max)
    np.minimum.at(first, which.reshape(-1), start)
    return is_among(end_ns, start[start > first[which.reshape(-1)]])


# What CUDA graphs recorded, as rows of the trace: operators, their phases and their source lines.
#
# A capture of the run noted the operators of every graph, long before the trace began. They become
# host rows of a thread of their own right before the trace, without a duration: as if the profiler
# had been on. So kernels of a replay can be joined to operators like all others.

RECORDED = "recorded by CUDA graphs"  # the thread's name
_STEP_MARK = "Optimizer.step#recorded"
_NS = 1  # from one operator to the next


class GraphRecording(NamedTuple):
    """The operators of one graph, and their host rows."""

    operators: tuple[CapturedOperator, ...]
    rows: Indices


class _Row(NamedTuple):
    kind: HostKind
    name: str
    start: int  # in places of operators
    parent: int = ABSENT
    operator: CapturedOperator | None = None


def add_recordings(
    trace: Trace, captures: Sequence[CapturedGraph]
) -> tuple[Trace, tuple[GraphRecording, ...]]:
    """The trace with the operators of every distinct capture as host rows after its own."""
    distinct = list({msgspec.json.encode(one): one for one in captures if one.operators}.values())
    if not distinct or not len(trace.host):
        return trace, ()
    rows: list[_Row] = []
    recordings: list[GraphRecording] = []
    for capture in distinct:
        # Runs of the optimizer's operators lie inside its mark, runs of one line inside
        # its frame.
        before = len(trace.host)
        places: list[int] = []
        at = rows[-1].start + 1 if rows else 0
        for stepping, phase in groupby(capture.operators, key=lambda one: one.optimizer):
            mark = ABSENT
            if stepping:
                mark = before + len(rows)
                rows.append(_Row(HostKind.ANNOTATION, _STEP_MARK, at))
            for place, in_line in groupby(phase, key=lambda one: one.place):
                parent = mark
                if place is not None:
                    parent = before + len(rows)
                    name = f"{place.file}({place.line}): {place.function or '<module>'}"
                    rows.append(_Row(HostKind.PYTHON, name, at, mark))
                for one in in_line:
                    places.append(before + len(rows))
                    rows.append(_Row(HostKind.OPERATOR, one.name, at, parent, one))
                    at += 1
        recordings.append(GraphRecording(capture.operators, np.array(places, np.intp)))
    return _extend(trace, rows), tuple(recordings)


class _Texts:
    """Codes of texts, old and new."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.all = list(strings)
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        if text not in self._codes:
            self._codes[text] = len(self.all)
            self.all.append(text)
        return self._codes[text]

    def json(self, value: object) -> int:
        return self.code(msgspec.json.encode(value).decode())


def _extend(trace: Trace, rows: Sequence[_Row]) -> Trace:
    host = trace.host
    texts = _Texts(trace.strings)
    end_ns = int(host.start_ns.min())
    first_ns = end_ns - _NS * (rows[-1].start + 1)
    more: dict[str, list[int]] = {
        "kind": [row.kind for row in rows],
        "name": [texts.code(row.name) for row in rows],
        "thread": [len(trace.threads)] * len(rows),
        "start_ns": [first_ns + _NS * row.start for row in rows],
        "dur_ns": [0] * len(rows),
        "parent": [row.parent for row in rows],
        "forward_thread": [int(row.operator is not None and row.operator.backward) for row in rows],
    }
    for name in ("shapes", "dtypes", "concrete"):
        more[name] = [
            ABSENT if row.operator is None else texts.json(getattr(row.operator, name))
            for row in rows
        ]
    columns = {}
    for name in HostEvents.__struct_fields__:
        own = getattr(host, name)
        values = more.get(name) or [ABSENT] * len(rows)
        columns[name] = np.concatenate((own, np.array(values, own.dtype)))
    pid = trace.threads[0].pid if trace.threads else ""
    thread = Thread(pid=pid, tid=RECORDED, name=RECORDED)
    return replace(
        trace,
        host=HostEvents(**columns),
        strings=tuple(texts.all),
        threads=(*trace.threads, thread),
    )


def find_recorded(trace: Trace) -> Bools:
    """Per host row: it is of a recording that the trace did not see."""
    number = next((n for n, one in enumerate(trace.threads) if one.tid == RECORDED), ABSENT)
    recorded: Bools = trace.host.thread == number
    return recorded


# The profiler's cost inside a CUDA graph: time between the kernels, not the host's.
#
# A graph is one call of the host, so a trace of it has no operators that show how slow recording
# was, and needs none: the device decides how long a graph takes. There the profiler notes the start
# and the end of each kernel, and the kernels come further apart. It cannot have cost more than all
# the time between them, nor less than nothing: those are the ends of the interval. In between lies
# what two graphs on an H200 took without it (docs/records/predictions.md).

# Time between a graph's kernels without the profiler, over that with it: 0.41 and 0.76 were
# measured.
NODE_SPACING = 0.58


def has_graphs(trace: Trace) -> bool:
    """A CUDA graph launched some of the device's work."""
    return bool(find_replayed(trace).any())


def note_uncorrected(trace: Trace, step_ms: StepTime) -> Iterator[Note]:
    """Why a step of CUDA graphs is shown as the profiler recorded it."""
    if step_ms.corrected is None and has_graphs(trace):
        yield Note(
            id="graphs-not-corrected",
            detail="CUDA graphs ran in this window, and what the profiler cost them is not known: "
            "record two or more whole steps (profiler.step() after each, or `stepscope run`)",
        )


def find_graph_tasks(graph: StepGraph, trace: Trace) -> Flags:
    """Tasks that a graph launch started."""
    calls = graph.calls
    launching = (calls.kind == CallKind.LAUNCH) & (calls.row >= 0)
    if not launching.any():
        return np.zeros(len(graph.tasks), np.bool_)
    launches = launching & named(trace, trace.host.name[calls.row], launching, is_graph_launch)
    chosen: Flags = launches[graph.tasks.call]
    return chosen


def is_of_graphs(graph: StepGraph, trace: Trace) -> bool:
    """CUDA graphs run most of the step's device time."""
    dur_ns = graph.tasks.dur_ns
    return float(dur_ns[find_graph_tasks(graph, trace)].sum()) > MOSTLY * float(dur_ns.sum())


def scale_node_spacing(graph: StepGraph, trace: Trace, factor: float) -> StepGraph:
    """Kernels inside a graph come `factor` times as far apart; graphs themselves do not move."""
    chosen = find_graph_tasks(graph, trace)
    if not chosen.any():
        return graph
    tasks = graph.tasks
    inside = chosen & (np.diff(tasks.call, prepend=-1) == 0)
    spacing_ns = np.where(inside, factor * tasks.spacing_ns, tasks.spacing_ns)
    return replace(graph, tasks=replace(tasks, spacing_ns=spacing_ns))
