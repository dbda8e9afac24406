"""The colour classes of the page: one word each, shared by timeline, flame graphs and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.trace import DeviceKind, HostKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stepscope.records.explanation import RankExplanation
    from stepscope.records.trace import Trace

EVENT_CLASSES = (
    "compute",
    "comm",
    "memory",
    "device_sync",
    "device_annotation",
    "device_other",
    "operator",
    "annotation",
    "python_call",
    "runtime",
    "overhead",
    "host_other",
    "thread",
)
RUNTIME = EVENT_CLASSES.index("runtime")
THREAD = EVENT_CLASSES.index("thread")

_OF_HOST = {
    HostKind.OPERATOR: "operator",
    HostKind.ANNOTATION: "annotation",
    HostKind.PYTHON: "python_call",
    HostKind.RUNTIME: "runtime",
    HostKind.OVERHEAD: "overhead",
    HostKind.OTHER: "host_other",
}
_OF_DEVICE = {
    DeviceKind.KERNEL: "compute",
    DeviceKind.MEMCPY: "memory",
    DeviceKind.MEMSET: "memory",
    DeviceKind.SYNC: "device_sync",
    DeviceKind.ANNOTATION: "device_annotation",
    DeviceKind.OTHER: "device_other",
}
WORK = (DeviceKind.KERNEL, DeviceKind.MEMCPY, DeviceKind.MEMSET)


def host_classes(trace: Trace, rank: RankExplanation) -> NDArray[np.uint8]:
    """Class of every host event; on a CPU-only trace communication keeps its colour."""
    classes = _lookup(_OF_HOST)[trace.host.kind]
    if trace.kind != "cpu":
        return classes
    comm = _codes_of_kind(trace.host.name, trace.strings, rank, "comm")
    return np.where(np.isin(trace.host.name, comm), np.uint8(EVENT_CLASSES.index("comm")), classes)


def device_classes(trace: Trace, rank: RankExplanation) -> NDArray[np.uint8]:
    """Class of every device event; `explain` has already said which kernels communicate."""
    classes = _lookup(_OF_DEVICE)[trace.device.kind]
    work = is_work(trace.device.kind)
    for kind in ("compute", "comm", "memory"):
        codes = _codes_of_kind(trace.device.name, trace.strings, rank, kind)
        classes[work & np.isin(trace.device.name, codes)] = EVENT_CLASSES.index(kind)
    return classes


def is_work(kind: NDArray[np.int8]) -> NDArray[np.bool_]:
    """True for kernels, copies and memsets; the other device rows only describe."""
    return np.isin(kind, np.array(WORK, dtype=kind.dtype))


def _lookup(table: Mapping[HostKind, str] | Mapping[DeviceKind, str]) -> NDArray[np.uint8]:
    classes = [EVENT_CLASSES.index(name) for _, name in sorted(table.items())]
    return np.array(classes, dtype=np.uint8)


def _codes_of_kind(
    name: NDArray[np.int32], strings: tuple[str, ...], rank: RankExplanation, kind: str
) -> NDArray[np.int32]:
    wanted = {kernel.name for kernel in rank.kernels if kernel.kind == kind}
    codes = [code for code in np.unique(name).tolist() if code >= 0 and strings[code] in wanted]
    return np.array(codes, dtype=np.int32)
