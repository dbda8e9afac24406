"""Blocking runtime calls: what waited for the device, called from where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.call_tree import group, sum_by
from stepscope.explain.python_functions import place_of, user_frames
from stepscope.records.explanation import SyncCall
from stepscope.records.trace import ABSENT, HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.arrays import Indices, Int32s
    from stepscope.records.trace import HostEvents, Trace


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
