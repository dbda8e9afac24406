"""Which rank this process is, and of how many."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from operator import attrgetter
from typing import Any

from stepscope.measure.network_place import network_place

# Of tasks, which may well be trainings of their own: a sweep. In a Slurm job mpirun starts its
# daemons with srun, whose variables reach the tasks: mpirun first.
_TASKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # the second is set by srun only
)


def rank_and_world() -> tuple[int, int]:
    """From the process group, else from the launcher's variables, else 0 of 1.

    A task of srun or mpirun without a process group keeps its number, in a world of its own.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()), int(dist.get_world_size())
    numbers = _read_numbers("RANK", "WORLD_SIZE")
    if numbers is not None:
        return numbers
    tasks = (_read_numbers(*names) for names in _TASKS)
    return next((task for task, _ in filter(None, tasks)), 0), 1


def _read_numbers(own: str, all_of_them: str) -> tuple[int, int] | None:
    with suppress(KeyError, ValueError):
        number, count = int(os.environ[own]), int(os.environ[all_of_them])
        return (number, count) if 0 <= number < count else None
    return None


def facts() -> dict[str, Any]:
    """This process's machine and torch, from what torch already knows."""
    torch = sys.modules["torch"]
    known: dict[str, Any] = {
        "host": socket.gethostname(),
        "network_place": network_place(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "math": _math(torch),
        "device": None,
    }
    cuda = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        current = cuda.current_device()
        properties = cuda.get_device_properties(current)
        known["device"] = {
            "index": current,
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
        known["cuda"] = torch.version.cuda
        known["hip"] = torch.version.hip
    return known


# Where torch keeps its switches for products in fp32; scripts set the old or the new ones.
_SWITCHES = {
    "matmul_tf32": (("cuda.matmul.allow_tf32", True), ("cuda.matmul.fp32_precision", "tf32")),
    "cudnn_tf32": (("cudnn.allow_tf32", True), ("cudnn.conv.fp32_precision", "tf32")),
    "cudnn_benchmark": (("cudnn.benchmark", True),),
}


def _math(torch: Any) -> dict[str, bool]:
    """Those switches; one that torch does not tell is missing."""
    known: dict[str, bool] = {}
    for name, places in _SWITCHES.items():
        for place, on in places:
            # torch refuses to tell the old ones to a script that sets the new ones.
            with suppress(AttributeError, RuntimeError):
                known.setdefault(name, attrgetter(place)(torch.backends) == on)
    return known
