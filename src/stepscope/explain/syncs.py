"""Blocking runtime calls: what waited for the device, called from where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.idle import blocking_calls
from stepscope.explain.lines import place_of, user_frames
from stepscope.explain.tree import group, sum_by
from stepscope.records.explanation import SyncCall
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest

if TYPE_CHECKING:
    from stepscope.records.trace import Trace


def list_syncs(trace: Trace) -> tuple[SyncCall, ...]:
    """By call and the operator around it, longest first."""
    host = trace.host
    rows = blocking_calls(trace)
    if not len(rows):
        return ()
    operator = nearest(host, host.kind == HostKind.OPERATOR)[rows]
    named = np.where(operator >= 0, host.name[np.maximum(operator, 0)] + 1, 0).astype(np.int64)
    first, inverse, count = group(host.name[rows] * np.int64(len(trace.strings) + 1) + named)
    total = sum_by(inverse, host.dur_ns[rows], count)
    calls = np.bincount(inverse, minlength=count)
    frames = user_frames(trace, rows[first])
    out = []
    for i in np.argsort(-total, kind="stable").tolist():
        row = int(rows[first[i]])
        frame = int(frames[i])
        place = place_of(trace.strings[host.name[frame]]) if frame >= 0 else None
        inside = int(named[first[i]])
        out.append(
            SyncCall(
                name=trace.strings[host.name[row]],
                operator=trace.strings[inside - 1] if inside else "",
                count=int(calls[i]),
                total_ns=int(total[i]),
                file=place.file if place else None,
                line=place.line if place else None,
            )
        )
    return tuple(out)
