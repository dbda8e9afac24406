"""One rank's trace as columns: the record that `trace` makes and every other room reads.

Time is int64 nanoseconds since the Unix epoch (or since an arbitrary zero in very old files).
Strings are codes into `Trace.strings`; -1 means absent in every column that can be absent.

Host events are sorted by (thread, start, longest first), so that an event's descendants are the
rows right after it. Device events are sorted by (start, end).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.quality import Note
from stepscope.text.notebook import line
from stepscope.text.words import counted

Int8 = NDArray[np.int8]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Flags = NDArray[np.bool_]
Columns = dict[str, NDArray[Any]]

ABSENT = -1


class HostKind(IntEnum):
    OPERATOR = 0
    ANNOTATION = 1
    PYTHON = 2
    RUNTIME = 3
    OVERHEAD = 4
    OTHER = 5


class DeviceKind(IntEnum):
    """What a device event is. The first three are work; the others only describe it."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    SYNC = 3
    ANNOTATION = 4
    OTHER = 5


class HostEvents(msgspec.Struct, frozen=True, kw_only=True):
    """What ran on the CPU: operators, annotations, Python functions, runtime calls."""

    kind: Int8
    name: Int32
    thread: Int32  # index into Trace.threads
    start_ns: Int64
    dur_ns: Int64
    correlation: Int64  # joins a runtime call to its device events
    sequence: Int64  # autograd's sequence number
    forward_thread: Int32  # >0 on backward operators
    shapes: Int32  # string code of the JSON text of "Input Dims"
    dtypes: Int32  # string code of the JSON text of "Input type"
    strides: Int32  # string code of the JSON text of "Input Strides"
    concrete: Int32  # string code of the JSON text of "Concrete Inputs": those that are not tensors
    collective: Int32  # index into Trace.collectives
    parent: Int32  # nearest enclosing host event of the same thread
    forward_of: Int32  # a backward operator's forward operator

    def __len__(self) -> int:
        return len(self.start_ns)


class DeviceEvents(msgspec.Struct, frozen=True, kw_only=True):
    """What ran on the accelerator: kernels, copies, memsets, and rows that describe them."""

    kind: Int8
    name: Int32
    device: Int32
    stream: Int32
    start_ns: Int64
    dur_ns: Int64
    correlation: Int64
    size_bytes: Int64
    grid: Int32  # string code of the JSON text
    graph_node: Int64  # CUDA graph node id
    collective: Int32
    launch: Int32  # the host event that launched it

    def __len__(self) -> int:
        return len(self.start_ns)


class MemoryEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Allocator events (`[memory]` instants): a positive size allocates, a negative one frees."""

    time_ns: Int64
    thread: Int32
    size_bytes: Int64
    address: Int64
    allocated_bytes: Int64
    reserved_bytes: Int64
    device_type: Int32  # 0 CPU, 1 CUDA, as c10::DeviceType numbers them
    device: Int32

    def __len__(self) -> int:
        return len(self.time_ns)


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """One host lane. Ids are text because some writers use names."""

    pid: str
    tid: str
    name: str = ""


class CollectiveArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What the profiler recorded about one collective call; lists stay text, as in the file."""

    name: str
    in_elements: int = ABSENT
    out_elements: int = ABSENT
    dtype: str = ""
    group: str = ""
    group_description: str = ""
    group_size: int = ABSENT
    group_ranks: str = ""
    in_split: str = ""
    out_split: str = ""
    source_rank: int = ABSENT
    destination_rank: int = ABSENT
    sequence: int = ABSENT


class Device(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    memory_bytes: int = ABSENT
    multiprocessors: int = ABSENT


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything read from one file, linked. `events` counts all event objects in the file."""

    path: str
    format: str
    kind: str  # cuda, rocm, xpu, mtia or cpu
    rank: int | None
    world_size: int | None
    backend: str | None
    groups: tuple[dict[str, Any], ...]
    devices: tuple[Device, ...]
    facts: dict[str, Any]  # schemaVersion, record_shapes, with_stack, versions, ...
    events: int
    strings: tuple[str, ...]
    threads: tuple[Thread, ...]
    collectives: tuple[CollectiveArgs, ...]
    host: HostEvents
    device: DeviceEvents
    memory: MemoryEvents
    quality: tuple[Note, ...] = ()

    def __repr__(self) -> str:
        return line("Trace", self.path, counted(self.events, "event"))

    @property
    def device_name(self) -> str | None:
        """The accelerator that ran this rank's events, as the driver prints it."""
        for device in self.devices:
            if (self.device.device == device.id).any():
                return device.name or None
        return None
