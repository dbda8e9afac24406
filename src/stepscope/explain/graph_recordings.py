"""What CUDA graphs recorded, as rows of the trace: operators, their phases and their source lines.

A capture of the run noted the operators of every graph, long before the trace began. They become
host rows of a thread of their own right before the trace, without a duration: as if the profiler
had been on. So kernels of a replay can be joined to operators like all others.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.trace import ABSENT, HostEvents, HostKind, Thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.explain.arrays import Bools, Indices
    from stepscope.records.compiled import CapturedGraph, CapturedOperator
    from stepscope.records.trace import Trace

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
        places = _add_rows(rows, capture.operators, len(trace.host))
        recordings.append(GraphRecording(capture.operators, np.array(places, np.intp)))
    return _extend(trace, rows), tuple(recordings)


def _add_rows(rows: list[_Row], operators: Sequence[CapturedOperator], before: int) -> list[int]:
    """Runs of the optimizer's operators lie inside its mark, runs of one line inside its frame."""
    places: list[int] = []
    at = rows[-1].start + 1 if rows else 0
    for stepping, phase in groupby(operators, key=lambda one: one.optimizer):
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
    return places


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
