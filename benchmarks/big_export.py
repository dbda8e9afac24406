"""An Nsight Systems export of any size, made inside SQLite: N kernels and their launches.

Each `ProfilerStep` range holds 1,000 kernels; every hundredth launch is inside an operator's range.
Names, grids and streams are drawn from small sets, as in a real training. The same arguments give
the same rows.

    python big_export.py TARGET [--kernels N] [--kernels-only]
    python big_export.py TARGET --read [--explain]         time and peak memory of reading it
"""

from __future__ import annotations

import argparse
import resource
import sqlite3
import time
from contextlib import closing
from pathlib import Path

KERNELS_PER_STEP = 1000
_PROCESS = 1 << 48 | 100 << 24
_THREAD = _PROCESS | 101
_NAMES = [f"void kernel_{i}<float, {i % 7}>(float*, int)" for i in range(200)]
_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER,
    registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL,
    gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL,
    blockZ INTEGER NOT NULL, gridId INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER,
    textId INTEGER);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, totalMemory INTEGER, smCount INTEGER);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
"""
_COUNT = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ? - 1) "
_KERNELS = f"""
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL {_COUNT}
SELECT 4000 + i * 5000, 4000 + i * 5000 + 1000 + i * 7 % 3500, 0, 1, NULL, 7 + i % 3 * 6, i + 1,
    {_PROCESS}, 100 + i * 13 % 200, 100, NULL, 1, 0, 32, 1 + i % 100, 1 + i % 4, 1, 128, 1, 1,
    i, NULL
FROM n
"""
_CALLS = f"""
INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME {_COUNT}
SELECT i * 5000 + 500, i * 5000 + 3500, 0, {_THREAD}, i + 1, 1, 0, NULL FROM n
"""
_STEPS = f"""
INSERT INTO NVTX_EVENTS {_COUNT}
SELECT i * 5000 * {KERNELS_PER_STEP}, (i + 1) * 5000 * {KERNELS_PER_STEP} - 1, 59,
    'ProfilerStep#' || i, {_THREAD}, NULL
FROM n
"""
_OPERATORS = f"""
INSERT INTO NVTX_EVENTS {_COUNT}
SELECT i * 500000 + 100, i * 500000 + 4800, 59,
    'aten::mul, seq = ' || i || ', op_id = ' || i || ', sizes = [[8, ' || i % 50 || ']]',
    {_THREAD}, NULL
FROM n
"""


def write(target: Path, kernels: int, *, calls: bool) -> None:
    target.unlink(missing_ok=True)
    with closing(sqlite3.connect(target)) as database:
        database.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;" + _SCHEMA)
        names = [(1, "cudaLaunchKernel_v7000"), *((100 + i, n) for i, n in enumerate(_NAMES))]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
        database.execute(_KERNELS, (kernels,))
        if calls:
            database.execute(_CALLS, (kernels,))
            database.execute(_STEPS, (max(1, kernels // KERNELS_PER_STEP),))
            database.execute(_OPERATORS, (max(1, kernels // 100),))
        gpu = (0, "NVIDIA H200", 150_109_880_320, 132)
        database.execute("INSERT INTO TARGET_INFO_GPU VALUES (?, ?, ?, ?)", gpu)
        database.execute("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 0, 100)")
        start = (1_700_000_000_000_000_000,)
        database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", start)
        database.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.20.3')")
        database.commit()


def measure(target: Path, *, explain: bool) -> None:
    from stepscope import explain_rank, read_trace

    began = _clocks()
    trace = read_trace(target, cache=False)
    _report("read", began, trace.events)
    if explain:
        began = _clocks()
        explain_rank(trace)
        _report("explain", began, trace.events)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _report(what: str, began: tuple[float, float], events: int) -> None:
    wall, cpu = (now - then for now, then in zip(_clocks(), began, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{what}: {wall:.1f} s (CPU {cpu:.1f} s), {events:,} events, peak {peak:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--kernels-only", action="store_true", help="no launches and no ranges")
    parser.add_argument("--read", action="store_true", help="read TARGET instead of writing it")
    parser.add_argument("--explain", action="store_true", help="explain what was read, too")
    options = parser.parse_args()
    if options.read:
        measure(options.target, explain=options.explain)
    else:
        write(options.target, options.kernels, calls=not options.kernels_only)


if __name__ == "__main__":
    main()
