"""Time by what the host called: operators, modules, Python functions, blocking calls, with
the device time that each of them launched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.explanation import Module, Operator, Place, PythonFunction, SyncCall
from stepscope.records.trace import ABSENT, HostEvents, HostKind, Trace
from stepscope.step.arrays import Floats, Indices, Int32s, Int64s
from stepscope.step.call_tree import Levels, children_sum, enclosing, group, outermost, sum_by
from stepscope.step.cuda_graphs import find_recorded
from stepscope.step.work import Work, rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.flops.costs import Costs

# More distinct (operator, shapes) rows than this are of no use to a reader.
MOST_OPERATORS = 1000


def list_operators(trace: Trace, device: DeviceTime) -> tuple[Operator, ...]:
    """Longest device time first, then longest own host time."""
    host = trace.host
    is_operator = host.kind == HostKind.OPERATOR
    rows = np.flatnonzero(is_operator & (device.calls > 0))
    if not len(rows):
        return ()
    above = enclosing(host, rows)
    own_host = host.dur_ns[rows] - children_sum(above, host.dur_ns[rows])
    # Per host row, device time of launches whose innermost operator it is.
    total = np.zeros(len(host), np.int64)
    launching = np.flatnonzero(device.direct > 0)
    near = nearest_of(host, is_operator, launching)
    np.add.at(total, near[near >= 0], device.direct[launching[near >= 0]])
    own_device = total[rows]
    first, inverse, count = group(host.name[rows], host.shapes[rows], host.dtypes[rows])
    outer = outermost(above, inverse)
    calls = np.rint(np.bincount(inverse, weights=device.calls[rows], minlength=count)).astype(int)
    host_total = sum_by(inverse, np.where(outer, host.dur_ns[rows], 0), count)
    host_self = sum_by(inverse, own_host, count)
    device_total = sum_by(inverse, np.where(outer, device.inclusive[rows], 0), count)
    device_self = sum_by(inverse, own_device, count)
    order = np.lexsort((-host_self, -device_self))[:MOST_OPERATORS]
    sample = rows[first[order]]
    texts = (host.name, host.shapes, host.dtypes)
    sums = (calls, host_total, host_self, device_total, device_self)
    columns = [column[sample] for column in texts] + [column[order] for column in sums]
    return tuple(
        Operator(
            name=trace.strings[name],
            shapes=trace.strings[shapes] if shapes >= 0 else "",
            dtypes=trace.strings[dtypes] if dtypes >= 0 else "",
            calls=count,
            host_total_ns=in_all,
            host_self_ns=own,
            device_total_ns=on_device,
            device_self_ns=own_on_device,
        )
        for name, shapes, dtypes, count, in_all, own, on_device, own_on_device in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )


# Time by nn.Module, where Python stacks were recorded: forward as called, backward as linked.

PREFIX = "nn.Module: "


def list_modules(trace: Trace, device: DeviceTime) -> tuple[Module, ...]:
    """Longest device time (or, on the CPU, host time) first."""
    host = trace.host
    python = host.kind == HostKind.PYTHON
    rows = np.flatnonzero(rows_named(trace, host, python, lambda s: s.startswith(PREFIX)))
    if not len(rows):
        return ()
    above = enclosing(host, rows)
    own = host.dur_ns[rows] - children_sum(above, host.dur_ns[rows])
    outer = outermost(above, host.name[rows])
    first, inverse, count = group(host.name[rows])
    calls = np.bincount(inverse, minlength=count)
    total = sum_by(inverse, np.where(outer, host.dur_ns[rows], 0), count)
    forward = sum_by(inverse, np.where(outer, device.inclusive[rows], 0), count)
    backward = sum_by(inverse, np.where(outer, device.backward[rows], 0), count)
    own_total = sum_by(inverse, own, count)
    return tuple(
        Module(
            name=trace.strings[host.name[rows[first[i]]]].removeprefix(PREFIX),
            calls=int(calls[i]),
            host_total_ns=int(total[i]),
            host_self_ns=int(own_total[i]),
            forward_device_ns=int(forward[i]),
            backward_device_ns=int(backward[i]),
        )
        for i in np.lexsort((-total, -(forward + backward))).tolist()
    )


# Host time by Python function, where stacks were recorded.

MOST_LINES = 500
_CACHED_NAMES = 1 << 14  # the same few names are looked up many times
_FRAME = lazy_pattern(r"^(?P<file>.+?)\((?P<line>\d{1,9})\): (?P<function>.*)$")
_LIBRARY = lazy_pattern(
    r"^(?:stepscope[/\\]measure|torch|torchvision|numpy|transformers|lightning|accelerate|deepspeed)[/\\]"
    r"|site-packages|dist-packages|[/\\]lib[/\\]python\d|^<|^(?:threading|contextlib|runpy"
    r"|functools|typing|copy|enum|abc|weakref|logging|random|queue|selectors)\b"
)


@lru_cache(maxsize=_CACHED_NAMES)
def place_of(name: str) -> Place | None:
    """`train.py(12): main` as a place; None for built-ins and modules."""
    match = _FRAME.match(name)
    if not match:
        return None
    return Place(file=match["file"], line=int(match["line"]), function=match["function"])


@lru_cache(maxsize=_CACHED_NAMES)
def is_library(name: str) -> bool:
    """Whether a frame's name belongs to an installed library rather than to the user's code."""
    return bool(_LIBRARY.search(name)) or not place_of(name)


def is_library_frame(frame: Place) -> bool:
    return is_library(f"{frame.file}({frame.line}): {frame.function}")


def list_lines(trace: Trace, device: DeviceTime) -> tuple[PythonFunction, ...]:
    """Longest own time first."""
    host = trace.host
    rows = np.flatnonzero(rows_named(trace, host, host.kind == HostKind.PYTHON, place_of))
    if not len(rows):
        return ()
    own = (host.dur_ns - children_sum(host.parent, host.dur_ns))[rows]
    outer = outermost(enclosing(host, rows), host.name[rows])
    first, inverse, count = group(host.name[rows])
    calls = np.bincount(inverse, minlength=count)
    total = sum_by(inverse, np.where(outer, host.dur_ns[rows], 0), count)
    on_device = sum_by(inverse, np.where(outer, device.inclusive[rows], 0), count)
    own_total = sum_by(inverse, own, count)
    return tuple(
        PythonFunction(
            file=place.file,
            line=place.line,
            function=place.function,
            calls=int(calls[i]),
            host_total_ns=int(total[i]),
            host_self_ns=int(own_total[i]),
            device_ns=int(on_device[i]),
        )
        for i in np.argsort(-own_total, kind="stable")[:MOST_LINES].tolist()
        if (place := place_of(trace.strings[host.name[rows[first[i]]]]))
    )


def user_frames(trace: Trace, rows: NDArray[Any]) -> Int32s:
    """The nearest frame of the user's code around each host row, else of any code, else -1."""
    host = trace.host
    python = host.kind == HostKind.PYTHON
    if not python.any():
        return np.full(len(rows), ABSENT, np.int32)
    user = rows_named(trace, host, python, lambda name: not is_library(name))
    frames = nearest_of(host, user, rows)
    lost = np.flatnonzero(frames < 0)
    if len(lost):
        frames[lost] = nearest_of(host, rows_named(trace, host, python, place_of), rows[lost])
    return frames


# Blocking runtime calls: what waited for the device, called from where.


def list_syncs(trace: Trace, rows: Indices) -> tuple[SyncCall, ...]:
    """These blocking calls by name, operator around them and place in the code; longest first."""
    host = trace.host
    if not len(rows):
        return ()
    operator = nearest_of(host, host.kind == HostKind.OPERATOR, rows)
    around = (host.name[rows], _names(host, operator), _names(host, user_frames(trace, rows)))
    first, inverse, count = group(*around)
    total = sum_by(inverse, host.dur_ns[rows], count)
    calls = np.bincount(inverse, minlength=count)
    out = []
    for i in np.argsort(-total, kind="stable").tolist():
        name, inside, frame = (int(codes[first[i]]) for codes in around)
        place = place_of(trace.strings[frame]) if frame >= 0 else None
        out.append(
            SyncCall(
                name=trace.strings[name],
                operator=trace.strings[inside] if inside >= 0 else "",
                count=int(calls[i]),
                total_ns=int(total[i]),
                file=place.file if place else None,
                line=place.line if place else None,
            )
        )
    return tuple(out)


def _names(host: HostEvents, rows: Int32s) -> Int32s:
    return np.where(rows >= 0, host.name[np.maximum(rows, 0)], ABSENT).astype(np.int32)


# Device time per host call: what it launched, what calls inside it launched, and for a forward
# operator what its backward launched.


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """Per host row, in ns."""

    direct: Int64s  # launched by exactly this call
    inclusive: Int64s  # launched by it or by anything inside it
    backward: Int64s  # launched by the backward of it or of anything inside it
    calls: Floats  # one, and those that CUDA graphs replay; a graph's recording is none


def sum_device_time(trace: Trace, work: Work, costs: Costs | None = None) -> DeviceTime:
    """Sum device durations onto host rows; all zero when the CPU is the device.

    What a CUDA graph replays counts for the operator that it was joined to, not for its launch.
    """
    host = trace.host
    nothing = np.zeros(len(host), np.int64)
    calls = (~find_recorded(trace)).astype(np.float64)
    if work.on_host or not len(host):
        return DeviceTime(direct=nothing, inclusive=nothing, backward=nothing, calls=calls)
    launch = trace.device.launch[work.rows]
    if costs is not None:
        replayed = costs.replayed[work.rows]
        launch = np.where(replayed, costs.operator[work.rows], launch)
        np.add.at(calls, launch[replayed], costs.call_part[work.rows[replayed]])
    linked = launch >= 0
    direct = nothing.copy()
    np.add.at(direct, launch[linked], trace.device.dur_ns[work.rows[linked]])
    levels = Levels.of(host.parent)
    return DeviceTime(
        direct=direct,
        inclusive=levels.inclusive(direct),
        backward=_sum_backward(trace, direct, levels),
        calls=calls,
    )


def _sum_backward(trace: Trace, direct: Int64s, levels: Levels) -> Int64s:
    host = trace.host
    mine = np.zeros(len(host), np.int64)
    known = host.forward_of >= 0
    if known.any():
        launching = np.flatnonzero(direct > 0)
        backward = nearest_of(host, known, launching)
        inside = backward >= 0
        np.add.at(mine, host.forward_of[backward[inside]], direct[launching[inside]])
        return levels.inclusive(mine)
    return mine
