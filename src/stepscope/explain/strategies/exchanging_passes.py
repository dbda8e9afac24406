"""Which backward passes of a step exchange gradients.

A pass is known from the forward of DDP before it. Several passes belong to one update only if the
same buckets come again and no optimizer steps in between.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.work import rows_named
from stepscope.records.trace import HostKind
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.strategies.evidence import Bools, Int64, StrategyEvidence
    from stepscope.records.trace import Trace

FORWARD = "DistributedDataParallel.forward"
_UPDATE = re.compile(r"^Optimizer\.step#")


def find_exchanging_passes(evidence: StrategyEvidence, reduces: Bools) -> tuple[int, Bools]:
    """How many passes of a usual step exchange gradients, and the calls of all but the last."""
    early = np.zeros(len(evidence), bool)
    forwards = forward_times(evidence.trace)
    if not len(forwards):
        return 1, early
    pass_of = np.searchsorted(forwards, evidence.made_ns, side="right") - 1
    updates = _update_ends(evidence.trace)
    counts: list[int] = []
    for step in distinct(evidence.step[reduces]).tolist():
        calls = np.flatnonzero(reduces & (evidence.step == step))
        passes = distinct(pass_of[calls])
        times = forwards[passes]
        is_one_update = (
            passes[0] >= 0
            and not ((updates > times[0]) & (updates < times[-1])).any()
            and _same_sizes(evidence.size_bytes[calls], pass_of[calls])
        )
        counts.append(len(passes) if is_one_update else 1)
        if is_one_update:
            early[calls] = pass_of[calls] < passes[-1]
    usual = int(np.bincount(counts).argmax()) if counts else 1
    return usual, early if usual > 1 else np.zeros(len(evidence), bool)


def forward_times(trace: Trace) -> Int64:
    """When the host began each forward of DDP."""
    host = trace.host
    named = rows_named(trace, host, host.kind == HostKind.ANNOTATION, lambda s: s == FORWARD)
    return np.sort(host.start_ns[named])


def _update_ends(trace: Trace) -> Int64:
    host = trace.host
    named = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _UPDATE.match)
    return (host.start_ns + host.dur_ns)[named]


def _same_sizes(sizes: Int64, pass_of: Int64) -> bool:
    """Whether every pass exchanges buckets of the same sizes."""
    passes = [sorted(sizes[pass_of == one].tolist()) for one in distinct(pass_of).tolist()]
    return all(one == passes[0] for one in passes)
