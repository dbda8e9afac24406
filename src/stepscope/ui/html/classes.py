"""Classes of events, one colour each: shared by timeline, flame graphs and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.trace import DeviceKind, HostKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stepscope.records.explanation import RankExplanation
    from stepscope.records.trace import Trace

# class -> (what a tip calls an event of it, what the legend calls its colour)
_WORDS = {
    "compute": ("compute kernel", "Compute"),
    "comm": ("communication", "Communication"),
    "memory": ("copy or memset", "Copies"),
    "device_sync": ("device sync", ""),
    "device_annotation": ("device annotation", ""),
    "device_other": ("device", ""),
    "operator": ("operator", "Operator"),
    "annotation": ("annotation", "Annotation"),
    "python_call": ("Python function", "Python"),
    "runtime": ("runtime call", "Runtime call"),
    "overhead": ("profiler overhead", "Profiler work"),
    "host_other": ("host", ""),
    "thread": ("thread", ""),
}
EVENT_CLASSES = tuple(_WORDS)
CLASS_WORDS = {name: tip for name, (tip, _) in _WORDS.items()}
LEGEND = {name: label for name, (_, label) in _WORDS.items() if label}
RUNTIME = EVENT_CLASSES.index("runtime")
THREAD = EVENT_CLASSES.index("thread")

_HOST_CLASSES = {
    HostKind.OPERATOR: "operator",
    HostKind.ANNOTATION: "annotation",
    HostKind.PYTHON: "python_call",
    HostKind.RUNTIME: "runtime",
    HostKind.OVERHEAD: "overhead",
    HostKind.OTHER: "host_other",
}
_DEVICE_CLASSES = {
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
    classes = _lookup(_HOST_CLASSES)[trace.host.kind]
    if trace.kind != "cpu":
        return classes
    comm = _codes_of_kind(trace.host.name, trace.strings, rank, "comm")
    return np.where(np.isin(trace.host.name, comm), np.uint8(EVENT_CLASSES.index("comm")), classes)


def device_classes(trace: Trace, rank: RankExplanation) -> NDArray[np.uint8]:
    """Class of every device event; the explanation knows which kernels communicate."""
    classes = _lookup(_DEVICE_CLASSES)[trace.device.kind]
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
