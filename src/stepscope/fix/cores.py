"""What remedies of the machine need to know about this process, such as a rank's CPU cores."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Any

from stepscope.records import processors
from stepscope.records.script_facts import VARIABLES

if TYPE_CHECKING:
    pass


def machine_facts() -> dict[str, Any]:
    """Fields of ScriptFacts."""
    return {
        "cores": processors.allowed_cores(),
        "machine_cores": os.cpu_count() or 0,
        "numa_nodes": max(1, len(processors.numa_nodes())),
        "local_ranks": ranks_here(),
        "flushes_denormals": processors.flushes_denormals(),
        "collects": gc.isenabled() and gc.get_freeze_count() == 0,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def ranks_here() -> int:
    """Ranks of the job on this machine: as the launcher says, else all that there are."""
    launched = processors.local_ranks()
    if launched:
        return launched
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return 1


def cores_per_rank() -> int:
    """Cores that a rank has if the machine's are shared out; a pinned rank has all of its own."""
    return share_of_cores(processors.allowed_cores(), os.cpu_count() or 0, ranks_here())


def share_of_cores(cores: int, machine_cores: int, ranks: int) -> int:
    """`cores` are those one rank may use: if all ranks together would use more than there are,
    they share them."""
    if ranks * cores <= machine_cores:
        return cores
    return max(1, cores // ranks)
