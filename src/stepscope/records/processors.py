"""The processors that this process may use: cores, quotas, NUMA nodes, and ranks beside it.

Linux reports all of it; what a system does not report is None, or one node of all cores.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")


def processor_name() -> str:
    """Return what the processor calls itself; else its architecture."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or "cpu"


def clock_mhz() -> float | None:
    """The mean clock of all cores now; None where the system does not report it."""
    clocks = []
    for file in _CPUS.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        with contextlib.suppress(OSError, ValueError):
            clocks.append(int(file.read_text()) / 1e3)
    if not clocks:
        with contextlib.suppress(OSError, ValueError):
            rows = (_PROC / "cpuinfo").read_text().splitlines()
            clocks = [float(row.partition(":")[2]) for row in rows if row.startswith("cpu MHz")]
    return sum(clocks) / len(clocks) if clocks else None


def local_ranks() -> int | None:
    """Ranks on this machine, if the launcher says so."""
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return None


def usable_cores() -> int | None:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux knows
        return os.cpu_count()


def quota_cores() -> float | None:
    """The smallest processor quota of this process's control groups; None without one."""
    quotas = [quota for folder in control_groups() if (quota := quota_of(folder)) is not None]
    return min(quotas, default=None)


def allowed_cores() -> int:
    """Cores that this process can keep busy: its affinity, or its quota if that is less."""
    return max(1, int(min(usable_cores() or 1, quota_cores() or sys.maxsize)))


def quota_of(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        limit, period = (folder / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = (
            int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
        )
        return quota_us / period_us if quota_us > 0 else None
    return None


def control_groups() -> list[Path]:
    """This process's control group for processors and its parents, innermost first."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = _CGROUP / controllers if controllers else _CGROUP
        inner = base / path.lstrip("/")
        outer = (folder for folder in inner.parents if base in (folder, *folder.parents))
        folders += [inner, *outer]
    return folders


def numa_nodes() -> dict[int, tuple[int, ...]]:
    """Node -> those of its cores that this process may run on; nodes without any are left out."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:
        return {}
    nodes: dict[int, tuple[int, ...]] = {}
    for folder in _NODES.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            cores = read_core_list((folder / "cpulist").read_text())
            node = int(folder.name.removeprefix("node"))
            nodes[node] = tuple(core for core in cores if core in usable)
    return {node: nodes[node] for node in sorted(nodes) if nodes[node]} or {
        0: tuple(sorted(usable))
    }


def first_sibling(core: int) -> int:
    """The first of the cores that share arithmetic units with this one (SMT)."""
    with contextlib.suppress(OSError, ValueError):
        text = (_CPUS / f"cpu{core}/topology/thread_siblings_list").read_text()
        return min(read_core_list(text), default=core)
    return core


# A launcher's own number of the process, and its number among those of the same host.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_LOCALID"),
)


def local_rank(rank: int | None = None) -> int | None:
    """This process's number among the ranks of its host; None where no launcher says so. A launcher
    whose own number is not `rank` started something else, such as one process per host."""
    for whole, local in _LAUNCHERS:
        is_ours = rank is None or os.environ.get(whole) == str(rank)
        if is_ours and os.environ.get(local, "").isdecimal():
            return int(os.environ[local])
    return None


def node_of_device(pci_address: str) -> int | None:
    """The NUMA node that a PCI device (such as 0000:3b:00.0) is attached to."""
    with contextlib.suppress(OSError, ValueError):
        node = int(Path(f"/sys/bus/pci/devices/{pci_address.lower()}/numa_node").read_text())
        return node if node >= 0 else None
    return None


def read_core_list(text: str) -> list[int]:
    """Read a list as Linux writes it: 0-3,8,10-11."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def write_core_list(cores: tuple[int, ...]) -> str:
    """Write a list as taskset -c takes it: 0-3,8,10-11."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in parts)


def loaded_libraries() -> str:
    """The files that are mapped into this process, as Linux lists them; empty if it does not."""
    with contextlib.suppress(OSError):
        return (_PROC / "self/maps").read_text()
    return ""


def flushes_denormals() -> bool:
    """The processor's mode applies to Python's floats as to tensors."""
    smallest = sys.float_info.min
    return smallest / 4 == 0.0
