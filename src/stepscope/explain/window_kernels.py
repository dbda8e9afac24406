"""The device's work in a window, with the operator that launched each piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.work import named
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.explain.arrays import Bools, Indices, Int8s, Int32s, Int64s
    from stepscope.explain.flops import Costs
    from stepscope.explain.work import Work
    from stepscope.records.trace import Trace


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels, copies and memsets that began in the window, in order of their start."""

    rows: Indices  # of Trace.device
    kind: Int8s
    dur_ns: Int64s
    # Host row of the innermost operator around the launch, or -1; of a CUDA graph's kernel, the
    # operator that it was joined to.
    operator: Int32s

    def __len__(self) -> int:
        return len(self.rows)


def launched_in(
    trace: Trace, work: Work, start_ns: int, end_ns: int, costs: Costs | None = None
) -> Launched:
    """Everything that began between these times; nothing where the CPU is the device."""
    device, host = trace.device, trace.host
    began = (work.start_ns >= start_ns) & (work.start_ns < end_ns)
    chosen = np.flatnonzero(began & (not work.on_host))
    rows = work.rows[chosen]
    operator = nearest_of(host, host.kind == HostKind.OPERATOR, device.launch[rows])
    if costs is not None and not work.on_host:
        operator = np.where(costs.replayed[rows], costs.operator[rows], operator)
    return Launched(
        rows=rows,
        kind=work.kind[chosen],
        dur_ns=device.dur_ns[rows],
        operator=operator,
    )


def by_operator(trace: Trace, launched: Launched, matches: Callable[[str], object]) -> Bools:
    """Pieces whose operator's name matches; each name is looked at once."""
    known = launched.operator >= 0
    if not known.any():
        return known
    return named(trace, trace.host.name[launched.operator], known, matches)


def by_kernel(trace: Trace, launched: Launched, matches: Callable[[str], object]) -> Bools:
    """Pieces whose own name matches; each name is looked at once."""
    every = np.ones(len(launched), np.bool_)
    return named(trace, trace.device.name[launched.rows], every, matches)


def callers(trace: Trace, launched: Launched) -> Int32s:
    """The host row to look for the user's code from: of work in backward, its forward operator."""
    host = trace.host
    launch = trace.device.launch[launched.rows]
    if not len(host):
        return launch
    backward = nearest_of(host, host.forward_of >= 0, launch)
    forward = host.forward_of[np.maximum(backward, 0)]
    return np.where(backward >= 0, forward, launch).astype(np.int32)
