"""One event as Kineto writes it, typed; and which category means what.

The decoder skips unused fields without making an object. `gc=False` hides a hundred thousand
short-lived records from the garbage collector. This file has no `from __future__ import
annotations`: the decoder would evaluate each annotation first, as long as reading a small trace.
"""

from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec

from stepscope.records.trace import ABSENT, DeviceKind, HostKind
from stepscope.trace.files import NAME_CHARACTERS

Number = int | float
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS)]  # longer ones are cut
NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments we keep, of all categories together.

    Numbers are `Any` because writers differ (ROCm quotes some); columns.py converts them.
    """

    correlation: Any = ABSENT
    sequence: Any = msgspec.field(default=ABSENT, name="Sequence number")
    forward_thread: Any = msgspec.field(default=ABSENT, name="Fwd thread id")
    dtypes: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    shapes: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    strides: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Strides")
    concrete: msgspec.Raw = msgspec.field(default=NOTHING, name="Concrete Inputs")
    device: Any = ABSENT
    stream: Any = ABSENT
    size_bytes: Any = msgspec.field(default=ABSENT, name="bytes")
    grid: msgspec.Raw = NOTHING
    graph_node: Any = msgspec.field(default=ABSENT, name="graph node id")
    allocated: Any = msgspec.field(default=ABSENT, name="Total Allocated")
    reserved: Any = msgspec.field(default=ABSENT, name="Total Reserved")
    memory_bytes: Any = msgspec.field(default=0, name="Bytes")
    memory_device: Any = msgspec.field(default=ABSENT, name="Device Id")
    memory_device_type: Any = msgspec.field(default=ABSENT, name="Device Type")
    address: Any = msgspec.field(default=ABSENT, name="Addr")
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=ABSENT, name="In msg nelems")
    out_elements: Any = msgspec.field(default=ABSENT, name="Out msg nelems")
    dtype: Any = ""
    group: Any = msgspec.field(default="", name="Process Group Name")
    group_description: Any = msgspec.field(default="", name="Process Group Description")
    group_size: Any = msgspec.field(default=ABSENT, name="Group size")
    group_ranks: Any = msgspec.field(default="", name="Process Group Ranks")
    in_split: Any = msgspec.field(default="", name="In split size")
    out_split: Any = msgspec.field(default="", name="Out split size")
    source_rank: Any = msgspec.field(default=ABSENT, name="Src Rank")
    destination_rank: Any = msgspec.field(default=ABSENT, name="Dst Rank")
    collective_sequence: Any = msgspec.field(default=ABSENT, name="Seq")
    name: Any = None  # of metadata events: the thread's name


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False, frozen=True):
    """One element of traceEvents."""

    ph: Name = ""
    cat: Name = ""
    name: Name = ""
    pid: int | Name = ABSENT
    tid: int | Name = ABSENT
    ts: Number | None = None
    dur: Number | None = None
    id: int | Name = ABSENT
    args: Args = NO_ARGS


class ExactEvent(Event, gc=False, frozen=True):
    """An event with `ts` as text, for files whose times a double cannot hold to the ns."""

    ts: msgspec.Raw = NOTHING  # type: ignore[assignment]


class Role(IntEnum):
    HOST = 0
    DEVICE = 1
    MEMORY = 2
    LAUNCH_FLOW = 3
    BACKWARD_FLOW = 4
    METADATA = 5
    IGNORED = 6


_Meaning = TypeVar("_Meaning")


def _by_category(categories: dict[_Meaning, str]) -> dict[str, _Meaning]:
    return {name: meaning for meaning, names in categories.items() for name in names.split()}


_HOST = _by_category(
    {
        HostKind.OPERATOR: "cpu_op operator",
        HostKind.ANNOTATION: "user_annotation",
        HostKind.PYTHON: "python_function",
        HostKind.RUNTIME: "cuda_runtime cuda_driver hip_runtime hip runtime xpu_runtime xpu_driver "
        "mtia_runtime glow_runtime privateuse1_runtime privateuse1_driver",
        HostKind.OVERHEAD: "overhead",
    }
)
_DEVICE = _by_category(
    {
        DeviceKind.KERNEL: "kernel concurrent_kernel mtia_ccp_events xpu_kernel hpu_op",
        DeviceKind.MEMCPY: "gpu_memcpy memcpy xpu_memcpy",
        DeviceKind.MEMSET: "gpu_memset memset xpu_memset",
        DeviceKind.SYNC: "cuda_sync xpu_sync",
        DeviceKind.ANNOTATION: "gpu_user_annotation",
        DeviceKind.OTHER: "cuda_event cuda_profiler_range mtia_insight",
    }
)
_FLOWS = _by_category(
    {
        Role.LAUNCH_FLOW: "ac2g async_cpu_to_gpu async_gpu",
        Role.BACKWARD_FLOW: "fwdbwd forward_backward",
    }
)


def classify(phase: str, category: str) -> tuple[Role, int]:
    """An event's role, and its HostKind or DeviceKind if it has one."""
    category = category.lower()
    if phase == "X":
        if category in _HOST:
            return Role.HOST, _HOST[category]
        if category in _DEVICE:
            return Role.DEVICE, _DEVICE[category]
        if category == "trace":
            return Role.IGNORED, 0
        return Role.HOST, HostKind.OTHER
    if phase in ("s", "f", "t"):
        return _FLOWS.get(category, Role.IGNORED), 0
    if phase in ("i", "I") and category == "cpu_instant_event":
        return Role.MEMORY, 0
    return (Role.METADATA if phase == "M" else Role.IGNORED), 0


def accelerator_family(categories: set[str]) -> str | None:
    """The kind of accelerator, if the categories alone show it."""
    for family in ("mtia", "xpu", "hip"):
        if any(category.lower().startswith(family) for category in categories):
            return "rocm" if family == "hip" else family
    return None
