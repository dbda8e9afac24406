"""Copies and memsets by name: how many, how large, how fast, and how much of it is exposed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain import intervals
from stepscope.explain.work import Kind
from stepscope.records.explanation import Copy
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.work import Work
    from stepscope.records.trace import Trace


def list_copies(trace: Trace, work: Work) -> tuple[Copy, ...]:
    """Longest total first. Exposed time is what ran while neither compute nor comm did."""
    if work.on_host:
        return ()
    mine = work.kind == Kind.MEMORY
    name = trace.device.name[work.rows]
    others = intervals.union_all((work.compute, work.comm))
    out = []
    for code in distinct(name[mine]).tolist():
        rows = np.flatnonzero(mine & (name == code))
        total = int((work.end_ns[rows] - work.start_ns[rows]).sum())
        sizes = trace.device.size_bytes[work.rows[rows]]
        size = int(sizes.sum()) if (sizes >= 0).all() else None
        covered = intervals.union(work.start_ns[rows], work.end_ns[rows])
        out.append(
            Copy(
                name=trace.strings[code],
                count=len(rows),
                total_ns=total,
                size_bytes=size,
                gb_s=size / total if size is not None and total else None,
                exposed_ns=intervals.length_outside(covered, others),
            )
        )
    return tuple(sorted(out, key=lambda copy: -copy.total_ns))
