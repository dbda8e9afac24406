"""Host time by Python function, where stacks were recorded."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.explain.call_tree import children_sum, enclosing, group, outermost, sum_by
from stepscope.explain.work import rows_named
from stepscope.records.explanation import Place, PythonFunction
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.records.trace import ABSENT, HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.arrays import Int32s
    from stepscope.explain.device_time import DeviceTime
    from stepscope.records.trace import Trace

MOST_ROWS = 500
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
        for i in np.argsort(-own_total, kind="stable")[:MOST_ROWS].tolist()
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
