"""What the operating system knows about this process and its machine, and the load over
plain steps: processor time, waits for a core, other programs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from stepscope.measure.never_raise import never_raise
from stepscope.measure.patches import unseen
from stepscope.measure.ranks import rank_and_world
from stepscope.measure.settings import VARIABLE
from stepscope.records.processors import (
    control_groups,
    flushes_denormals,
    local_ranks,
    quota_cores,
    usable_cores,
)

# On Linux most of it comes from /proc and the control groups; what a system does not offer is None.

_PROC = Path("/proc")
_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY", "KMP_BLOCKTIME", "ATEN_CPU_CAPABILITY",
)  # fmt: skip
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
        "capability": str(torch.backends.cpu.get_cpu_capability()),  # vectors, such as AVX512
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


def free_host_bytes() -> int:
    """Memory that the machine has free, or the container if that has less."""
    free = 4 << 30  # where the system does not say: a modest guess
    with contextlib.suppress(OSError, KeyError, ValueError):
        fields = dict(line.split(":") for line in (_PROC / "meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) << 10
    with contextlib.suppress(OSError, ValueError):  # no such limit
        limit, used = (
            int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current")
        )
        free = min(free, max(0, limit - used))
    return free


# One rank's load over its plain steps: processor time, waits for a core, other programs.
#
# Counters are read between stretches of plain steps, never inside one. A few values of parameters,
# gradients and optimizer state are read as well: denormal numbers make a CPU slow.

_MOST_OTHERS = 3
_LEAST_CORES = 0.05
_MOST_TENSORS, _VALUES = 200, 2048  # read to find denormal numbers


class HostLoadMeter:
    """Counters over all plain steps so far. Call `resume` and `pause` between two steps."""

    def __init__(self) -> None:
        self._began: Counts | None = None
        self._from_step = 0
        self._sum: Counts = {}
        self._others: dict[str, int] = {}
        self._values = [0, 0]  # read, denormal
        self._started: Counts = {}
        self._several = False

    @never_raise
    def resume(self, step: int, *, plain: bool) -> None:
        """Count from the step that now begins, if it is plain."""
        self._started = self._started or machine_facts()
        # Once a group has existed, the job has several ranks, even if it is destroyed early.
        self._several = self._several or rank_and_world()[1] > 1
        self._began = counters(several=self._several) if plain else None
        self._from_step = step

    @never_raise
    def pause(self, step: int, optimizers: Iterable[Any] = ()) -> None:
        """A stretch of plain steps is over."""
        began, self._began = self._began, None
        if began is None or step <= self._from_step:
            return
        now = counters(several=self._several)
        self._add({"steps": step - self._from_step, **growth(began, now)})
        self._add_others(began, now)
        with unseen():
            for tensor in _tensors(optimizers):
                torch = sys.modules["torch"]
                with torch.no_grad():
                    flat = tensor.detach().reshape(-1)
                    size = flat[:: max(1, flat.numel() // _VALUES)].abs()
                    least = torch.finfo(flat.dtype).tiny
                    self._values[0] += size.numel()
                    self._values[1] += int(((size > 0) & (size < least)).sum())

    @never_raise
    def content(self) -> Counts | None:
        """For rank.json; None before the first stretch began."""
        if not self._started:
            return None
        values, denormal = self._values
        return {
            **self._started,
            "plain": {**self._sum, "others": self._top_others()} if self._sum else None,
            "denormal_share": denormal / values if values else None,
        }

    def _add(self, stretch: Counts) -> None:
        """A counter that is missing from one stretch is unknown for all of them."""
        if not self._sum:
            self._sum = stretch
            return
        self._sum = {
            name: None if value is None or stretch.get(name) is None else value + stretch[name]
            for name, value in self._sum.items()
        }

    def _add_others(self, before: Counts, now: Counts) -> None:
        """Processor time of processes outside the job, by the name of their program."""
        old, new = before["processes"], now["processes"]
        if old is None or new is None:
            return
        spent = {
            pid: max(0, process.cpu_ns - (old[pid].cpu_ns if pid in old else 0))
            for pid, process in new.items()
        }
        for pid in new.keys() - job_processes(new, several=self._several):
            name = new[pid].name
            self._others[name] = self._others.get(name, 0) + spent[pid]
        if local_ranks() is None and os.getpid() in new:
            parent = new[os.getpid()].parent
            least_ns = _LEAST_CORES * (now["wall_ns"] - before["wall_ns"])
            # Without a launcher's word, count the busy processes of this one's parent.
            siblings = [pid for pid in new if new[pid].parent == parent and spent[pid] > least_ns]
            ranks = len(siblings) if self._several else 1
            self._started["local_ranks"] = max(ranks, self._started["local_ranks"] or 1)

    def _top_others(self) -> list[Counts]:
        wall_ns = self._sum.get("wall_ns") or 1
        named = sorted(self._others.items(), key=lambda pair: -pair[1])[:_MOST_OTHERS]
        return [
            {"name": name, "cores": cpu_ns / wall_ns}
            for name, cpu_ns in named
            if cpu_ns >= _LEAST_CORES * wall_ns
        ]


def _tensors(optimizers: Iterable[Any]) -> list[Any]:
    """Parameters, gradients and optimizer state on the CPU, plain tensors only."""
    torch = sys.modules["torch"]
    plain = (torch.Tensor, torch.nn.Parameter)
    candidates = [
        tensor
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, parameter.grad, *(optimizer.state.get(parameter) or {}).values())
        if type(tensor) in plain and tensor.is_floating_point() and tensor.numel() > 1
    ]
    on_cpu = [t for t in candidates if t.device.type == "cpu" and t.layout == torch.strided]
    return on_cpu[:: max(1, len(on_cpu) // _MOST_TENSORS)]


# What the system counts for the calling thread: time on a core, time without one, and its waits.
#
# One reading takes about 3 us. The training's own threads are counted together.

_SCHEDULER = "/proc/thread-self/schedstat"


class ThreadCounters(NamedTuple):
    """All but `switches` in nanoseconds."""

    wall_ns: int
    computing_ns: int
    queue_ns: int  # ready, but without a core
    process_ns: int  # computing of all threads
    switches: int  # times it gave its core away to wait


def counters_reader() -> Callable[[], ThreadCounters] | None:
    """To be called and used in one thread; None where the system does not count.

    The scheduler counts the time on a core up to its last tick; the clock, up to now.
    """
    try:
        thread = resource.RUSAGE_THREAD
        file = os.open(_SCHEDULER, os.O_RDONLY)
    except (AttributeError, OSError):
        return None

    def read() -> ThreadCounters:
        return ThreadCounters(
            wall_ns=time.perf_counter_ns(),
            computing_ns=time.thread_time_ns(),
            queue_ns=int(os.pread(file, 96, 0).split()[1]),
            process_ns=time.process_time_ns(),
            switches=resource.getrusage(thread).ru_nvcsw,
        )

    try:
        read()
    except (OSError, ValueError, IndexError):  # a kernel that counts nothing
        return None
    return read
