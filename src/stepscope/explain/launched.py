"""The device's work in a window, with the operator that launched each piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.records.trace import DeviceKind, HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stepscope.records.trace import Trace


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels, copies and memsets that began in the window, in order of their start."""

    rows: NDArray[np.intp]  # of Trace.device
    dur_ns: NDArray[np.int64]
    operator: NDArray[np.int32]  # host row of the innermost operator around the launch, or -1

    def __len__(self) -> int:
        return len(self.rows)


def launched_in(trace: Trace, start_ns: int, end_ns: int) -> Launched:
    """Everything that began between these times."""
    device, host = trace.device, trace.host
    rows = np.flatnonzero(
        (device.kind <= DeviceKind.MEMSET)
        & (device.start_ns >= start_ns)
        & (device.start_ns < end_ns)
    )
    return Launched(
        rows=rows,
        dur_ns=device.dur_ns[rows],
        operator=nearest_of(host, host.kind == HostKind.OPERATOR, device.launch[rows]),
    )


def by_operator(
    trace: Trace, launched: Launched, matches: Callable[[str], object]
) -> NDArray[np.bool_]:
    """Pieces whose operator's name matches; each name is looked at once."""
    known = launched.operator >= 0
    if not known.any():
        return known
    return _matching(trace, trace.host.name[launched.operator], known, matches)


def by_kernel(
    trace: Trace, launched: Launched, matches: Callable[[str], object]
) -> NDArray[np.bool_]:
    """Pieces whose own name matches; each name is looked at once."""
    every = np.ones(len(launched), np.bool_)
    return _matching(trace, trace.device.name[launched.rows], every, matches)


def _matching(
    trace: Trace,
    names: NDArray[np.int32],
    among: NDArray[np.bool_],
    matches: Callable[[str], object],
) -> NDArray[np.bool_]:
    found = np.zeros(len(trace.strings), np.bool_)
    codes = np.unique(names[among]).tolist()
    found[codes] = [bool(matches(trace.strings[code])) for code in codes]
    return among & found[names]


def callers(trace: Trace, launched: Launched) -> NDArray[np.int32]:
    """The host row to look for the user's code from: of work in backward, its forward operator."""
    host = trace.host
    launch = trace.device.launch[launched.rows]
    if not len(host):
        return launch
    backward = nearest_of(host, host.forward_of >= 0, launch)
    forward = host.forward_of[np.maximum(backward, 0)]
    return np.where(backward >= 0, forward, launch).astype(np.int32)
