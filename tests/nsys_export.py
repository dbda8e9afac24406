"""Writes databases as `nsys export --type sqlite` does, in two versions of its documented schema.

The columns are those of Nsight Systems 2025.3 (schema 3.20) and of 2019 to early 2021, where no
column could be null and missing values were zeros and empty texts.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, Any]

SESSION_START_NS = 1_700_000_000_000_000_000
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
DRIVER = "CUPTI_ACTIVITY_KIND_DRIVER"
SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NVTX = "NVTX_EVENTS"

_OLD_DEVICE = "start end deviceId contextId streamId correlationId globalPid"
_NEW_DEVICE = "start end deviceId contextId greenContextId streamId correlationId globalPid"
_EXTENT = "gridX gridY gridZ blockX blockY blockZ"
_NVTX = "start end eventType rangeId category color text globalTid endGlobalTid textId domainId"
OLD = {
    "StringIds": "id value",
    KERNEL: f"{_OLD_DEVICE} demangledName shortName registersPerThread {_EXTENT} gridId",
    MEMCPY: f"{_OLD_DEVICE} bytes copyKind deprecatedSrcId srcKind dstKind",
    MEMSET: f"{_OLD_DEVICE} value bytes memKind",
    RUNTIME: "start end eventClass globalTid correlationId nameId returnValue",
    DRIVER: "start end eventClass globalTid correlationId nameId returnValue",
    SYNC: f"{_OLD_DEVICE} syncType eventId",
    NVTX: _NVTX,
    "ThreadNames": "nameId priority globalTid",
    "TARGET_INFO_CUDA_GPU": "deviceId name globalMemorySize numMultiprocessors",
}
NEW = {
    "StringIds": "id value",
    KERNEL: f"{_NEW_DEVICE} demangledName shortName mangledName launchType cacheConfig "
    f"registersPerThread {_EXTENT} gridId sharedMemoryExecuted graphNodeId",
    MEMCPY: f"{_NEW_DEVICE} bytes copyKind deprecatedSrcId srcKind dstKind srcDeviceId "
    "dstDeviceId migrationCause graphNodeId virtualAddress copyCount",
    MEMSET: f"{_NEW_DEVICE} value bytes graphNodeId memKind",
    RUNTIME: "start end eventClass globalTid correlationId nameId returnValue callchainId",
    SYNC: f"{_NEW_DEVICE} deprecatedSyncType syncType eventId eventSyncId",
    GRAPH: f"{_NEW_DEVICE} graphId graphExecId",
    NVTX: f"{_NVTX} uint64Value int64Value doubleValue jsonTextId jsonText binaryData",
    "PROFILER_OVERHEAD": "start end globalTid nameId returnValue",
    "ThreadNames": "nameId priority globalTid",
    "PROCESSES": "globalPid pid name",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime",
    "TARGET_INFO_GPU": "vmId id name busLocation totalMemory memoryBandwidth smCount uuid",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid",
    "META_DATA_EXPORT": "name value",
    "META_DATA_CAPTURE": "name value",
}
_TEXTS = {"value", "text", "name", "utcTime", "localTime", "busLocation", "uuid", "jsonText"}


def process(pid: int) -> int:
    return 1 << 48 | pid << 24


def thread(pid: int, tid: int) -> int:
    return process(pid) | tid


@dataclass
class Export:
    """Rows by table; a string gets its id at its first use."""

    tables: dict[str, list[Row]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)

    def string(self, text: str) -> int:
        if text not in self.strings:
            self.strings[text] = 10 + 7 * len(self.strings)
            self.add("StringIds", id=self.strings[text], value=text)
        return self.strings[text]

    def add(self, table: str, **row: Any) -> None:
        self.tables.setdefault(table, []).append(row)

    def call(self, name: str, span: tuple[int, int], on: int, correlation: int) -> None:
        names = {"nameId": self.string(name), "correlationId": correlation}
        self.add(RUNTIME, start=span[0], end=span[1], globalTid=on, **names)

    def range(self, text: str | None, span: tuple[int, Any], on: int, **row: Any) -> None:
        row = {"eventType": 59, "text": text, "globalTid": on} | row
        self.add(NVTX, start=span[0], end=span[1], **row)

    def device(
        self, table: str, span: tuple[int, Any], correlation: int, pid: int = 100, **row: Any
    ) -> None:
        row = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": process(pid)} | row
        self.add(table, start=span[0], end=span[1], correlationId=correlation, **row)

    def kernel(self, name: str, span: tuple[int, Any], correlation: int, **row: Any) -> None:
        names = {"demangledName": self.string(name), "shortName": self.string("short")}
        extents = dict(zip(_EXTENT.split(), (4, 2, 1, 128, 1, 1), strict=True))
        self.device(KERNEL, span, correlation, **(names | extents | row))

    def write(self, path: Path, schema: dict[str, str] = NEW, page_bytes: int = 4096) -> Path:
        there = {table: schema[table].split() for table in self.tables if table in schema}
        limit = " NOT NULL" if schema is OLD else ""
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(f"PRAGMA page_size={page_bytes}")
            for table, columns in there.items():
                spelt = (f'"{c}" {"TEXT" if c in _TEXTS else "INTEGER"}{limit}' for c in columns)
                database.execute(f"CREATE TABLE {table} ({', '.join(spelt)})")
            for table, columns in there.items():
                marks = ", ".join("?" * len(columns))
                values = [_values(row, columns, old=schema is OLD) for row in self.tables[table]]
                database.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        return path


def _values(row: Row, columns: list[str], *, old: bool) -> list[Any]:
    by_name = {name.lower(): value for name, value in row.items()}
    values = [by_name.get(column.lower()) for column in columns]
    if not old:
        return values
    blanks = ["" if column in _TEXTS else 0 for column in columns]
    return [b if v is None else v for v, b in zip(values, blanks, strict=True)]


MAIN, BACKWARD = thread(100, 101), thread(100, 102)
OPERATOR = "aten::addmm, seq = 12, op_id = 3, sizes = [[8], [4, 16], [16, 8]]"


def small() -> Export:
    """One step: a forward matmul, a copy, a memset, a wait, and a collective from the backward.

    main thread   ProfilerStep#1 [1000 ........................................ 9000]
                   iteration [1050 .................................... 8500]
                    aten::addmm [1100 .. 2000]
                      launch 1 [1200 1300]  copy 2 [2100 2200]  memset 3 [2300 2350]
                                            wait 4 [2400 ...... 4000]
    backward                                      AddmmBackward0 [5000 ... 6000]
                                                     launch 5 [5100 5200]
    stream 7       gemm [1500 2500]  HtoD [2600 3000]  memset [3100 3200]
    stream 13                                               ncclDevKernel [5500 ... 6500]
    """
    export = Export()
    export.range("ProfilerStep#1", (1000, 9000), MAIN)
    export.range(None, (1050, 8500), MAIN, eventType=60, textId=export.string("iteration"))
    export.range(OPERATOR, (1100, 2000), MAIN)
    export.range("marked", (1150, None), MAIN, eventType=34)
    export.range("AddmmBackward0, seq = 12, op_id = 9", (5000, 6000), BACKWARD)
    export.call("cudaLaunchKernel_v7000", (1200, 1300), MAIN, 1)
    export.call("cudaMemcpyAsync_v3020", (2100, 2200), MAIN, 2)
    export.call("cudaMemsetAsync_v3020", (2300, 2350), MAIN, 3)
    export.call("cudaStreamSynchronize_v3020", (2400, 4000), MAIN, 4)
    export.call("cudaLaunchKernelExC_v11060", (5100, 5200), BACKWARD, 5)
    export.kernel("void gemm<float>(float*)", (1500, 2500), 1)
    export.device(MEMCPY, (2600, 3000), 2, bytes=4096, copyKind=1, srcKind=0, dstKind=2)
    export.device(MEMSET, (3100, 3200), 3, bytes=512, memKind=2, value=0)
    export.device(SYNC, (2450, 3900), 4, syncType=2, streamId=2**32 - 1)
    export.kernel("ncclDevKernel_AllReduce", (5500, 6500), 5, streamId=13)
    export.add("ThreadNames", nameId=export.string("python3"), globalTid=MAIN)
    export.add("ThreadNames", nameId=export.string("pt_autograd_0"), globalTid=BACKWARD)
    export.add("PROCESSES", globalPid=process(100), pid=100, name="python3")
    export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=SESSION_START_NS)
    gpu = {"name": "NVIDIA H200"}
    export.add("TARGET_INFO_GPU", id=0, totalMemory=150_109_880_320, smCount=132, **gpu)
    export.add("TARGET_INFO_CUDA_GPU", deviceId=0, numMultiprocessors=132, **gpu)
    export.add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=100)
    export.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.20.3")
    return export
