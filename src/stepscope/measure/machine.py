"""What the operating system knows about this process and its machine: cores, use, waits, others.

On Linux most of it comes from /proc and the control groups; what a system does not offer is None.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from stepscope.measure.ranks import rank_and_world
from stepscope.measure.settings import VARIABLE
from stepscope.records.processors import (
    control_groups,
    flushes_denormals,
    local_ranks,
    quota_cores,
    usable_cores,
)

_PROC = Path("/proc")
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "ATEN_CPU_CAPABILITY",
)
_MOST_PROCESSES = 2000  # reading more would take longer than a step
Counts = dict[str, Any]


def machine_facts() -> Counts:
    """What does not change while the job runs."""
    torch = sys.modules["torch"]
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "cores": usable_cores(),
        "quota_cores": quota_cores(),
        "machine_cores": os.cpu_count(),
        "local_ranks": local_ranks(),
        "flush_denormal": flushes_denormals(),
        "capability": _used_vectors(torch),
        "offered": _widest_vectors(),
        "onednn": bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
    }


def counters(*, several: bool | None = None) -> Counts:
    """Every growing counter now; `several`: the job has more ranks than this process."""
    counts: Counts = {"wall_ns": perf_counter_ns(), **_own_use(), **_own_waits()}
    counts |= _machine_use()
    counts["throttled_ns"] = _throttled_ns()
    counts["processes"] = processes = _processes()
    counts["job_ns"] = None
    if processes is not None:
        job = job_processes(processes, several=several)
        counts["job_ns"] = sum(processes[pid].cpu_ns for pid in job)
    return counts


def growth(before: Counts, now: Counts) -> Counts:
    return {
        name: None if value is None or before[name] is None else max(0, value - before[name])
        for name, value in now.items()
        if name != "processes"
    }


def _own_use() -> Counts:
    """Use by all threads of this process."""
    names = ("user_ns", "system_ns", "voluntary", "involuntary")
    try:
        import resource
    except ImportError:  # not Unix
        return dict.fromkeys(names)
    use = resource.getrusage(resource.RUSAGE_SELF)
    values = (round(use.ru_utime * 1e9), round(use.ru_stime * 1e9), use.ru_nvcsw, use.ru_nivcsw)
    return dict(zip(names, values, strict=True))


def _own_waits() -> Counts:
    """How long runnable threads waited for a core: all of them, and the training thread."""
    waits: dict[int, int] = {}
    for task in _PROC.glob("self/task/*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            waits[int(task.name)] = int((task / "schedstat").read_text().split()[1])
    trains = waits.get(threading.get_native_id())
    return {"waiting_ns": sum(waits.values()) if waits else None, "training_waiting_ns": trains}


def _machine_use() -> Counts:
    """Busy time of the cores that this process may use, whichever program used them. Interrupts
    belong to no program: they may be the job's own network traffic."""
    try:
        lines = (_PROC / "stat").read_text().splitlines()
        usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in lines if line.split(" ", 1)[0] in usable]
        fields = [[int(value) for value in row[1:9]] for row in rows]
    except (OSError, ValueError, AttributeError):
        return {"busy_ns": None, "stolen_ns": None}
    tick_ns = _tick_ns()
    busy = sum(sum(row[:3]) for row in fields)
    return {"busy_ns": busy * tick_ns, "stolen_ns": sum(row[7] for row in fields) * tick_ns}


def _tick_ns() -> int:
    return round(1e9 / os.sysconf("SC_CLK_TCK"))


class RunningProcess(NamedTuple):
    name: str
    parent: int
    cpu_ns: int


def _processes() -> dict[int, RunningProcess] | None:
    """Every visible process; None if there are none or too many."""
    try:
        names = [entry for entry in os.listdir(_PROC) if entry.isdigit()]  # noqa: PTH208
    except OSError:
        return None
    if len(names) > _MOST_PROCESSES:
        return None
    running, tick_ns = {}, _tick_ns()
    for pid in names:
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, rest = (_PROC / pid / "stat").read_text(errors="replace").rpartition(")")
            fields = rest.split()
            # With that of children that have ended: a loader's workers live for an epoch.
            cpu = sum(map(int, fields[11:15])) * tick_ns
            running[int(pid)] = RunningProcess(head.partition("(")[2], int(fields[1]), cpu)
    return running or None


def job_processes(processes: dict[int, RunningProcess], *, several: bool | None = None) -> set[int]:
    """This process and everything it started; with several ranks, everything their launcher did."""
    root = os.getpid()
    if several is None:
        several = rank_and_world()[1] > 1
    if several and root in processes:
        root = processes[root].parent
    while root in processes and _captured(root):
        root = processes[root].parent
    known, children = {os.getpid()}, {root}
    while children:
        known |= children
        children = {pid for pid, process in processes.items() if process.parent in children} - known
    return known & processes.keys()


def _captured(pid: int) -> bool:
    """Whether `stepscope run` started it."""
    try:
        return f"{VARIABLE}=".encode() in (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False


def _throttled_ns() -> int | None:
    """How long the quota stopped the control group."""
    for folder in control_groups():
        with contextlib.suppress(OSError, ValueError):
            rows = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            if "throttled_usec" in rows:
                return int(rows["throttled_usec"]) * 1000
            if "throttled_time" in rows:
                return int(rows["throttled_time"])
    return None


def _used_vectors(torch: Any) -> str | None:
    """The vector instructions that torch's kernels use, such as AVX512."""
    try:
        return str(torch.backends.cpu.get_cpu_capability())
    except AttributeError:  # older torch
        return None


def _widest_vectors() -> str | None:
    """The widest vector instructions of the processor, in torch's words; None if unknown."""
    try:
        text = (_PROC / "cpuinfo").read_text()
    except OSError:
        return None
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    for flag, name in (("avx512f", "AVX512"), ("avx2", "AVX2")):
        if flag in flags:
            return name
    return None
