"""Pin each rank to cores of its own, on the NUMA node of its device where that is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.errors import RefusedError
from stepscope.fix.cores import ranks_here
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.records import processors
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

    Cores = tuple[int, ...]

# Which cores each rank of a machine gets, so that none shares its cores or spans NUMA nodes.


def share_cores(
    nodes: Mapping[int, Cores],
    ranks: int,
    first_sibling: Callable[[int], int],
    homes: Sequence[int | None] = (),
) -> list[Cores]:
    """Cores of rank 0, 1, ...; empty if there are fewer physical cores than ranks.

    `homes` are the nodes of the ranks' devices. Without them ranks are spread over the nodes in
    order. Cores that share arithmetic units (SMT) go to the same rank.
    """
    known = [node for node in homes if node is not None and node in nodes]
    if len(known) == ranks:
        return _share_at_home(nodes, known, first_sibling)
    if ranks % len(nodes) == 0 or ranks == 1:
        order = list(nodes)
        return _share_at_home(
            nodes, [order[rank * len(order) // ranks] for rank in range(ranks)], first_sibling
        )
    return _split([core for node in nodes.values() for core in node], ranks, first_sibling)


def _share_at_home(
    nodes: Mapping[int, Cores], homes: Sequence[int], first_sibling: Callable[[int], int]
) -> list[Cores]:
    shares: dict[int, list[Cores]] = {
        node: _split(nodes[node], homes.count(node), first_sibling) for node in set(homes)
    }
    if not all(shares.values()):
        return []
    return [shares[node].pop(0) for node in homes]


def _split(cores: Sequence[int], parts: int, first_sibling: Callable[[int], int]) -> list[Cores]:
    """Whole physical cores, neighbours together; the first parts may have one more."""
    physical: dict[int, list[int]] = {}
    for core in cores:
        physical.setdefault(first_sibling(core), []).append(core)
    groups = list(physical.values())
    if len(groups) < parts:
        return []
    each, more = divmod(len(groups), parts)
    shares, start = [], 0
    for part in range(parts):
        end = start + each + (part < more)
        shares.append(tuple(sorted(core for group in groups[start:end] for core in group)))
        start = end
    return shares


# Each rank keeps to cores of its own, on the NUMA node of its device where that is known.


def fits(facts: ScriptFacts, value: str) -> str | None:
    ranks = facts.local_ranks
    if ranks == 1 and facts.numa_nodes == 1:
        return "the only rank has this machine's only NUMA node to itself"
    if facts.cores < ranks:
        return f"{ranks} ranks have {facts.cores} cores, fewer than one each"
    if ranks > 1 and ranks * facts.cores <= facts.machine_cores:
        return "each rank already has its own cores"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    """At once, before memory is used; once more when the rank's device is known."""
    import torch

    if not hasattr(os, "sched_setaffinity"):
        raise RefusedError("this system cannot bind a process to cores")
    ranks, rank = ranks_here(), processors.local_rank()
    if rank is None and ranks == 1:
        rank = 0
    nodes = processors.numa_nodes()
    shares = share_cores(nodes, ranks, processors.first_sibling)
    if rank is None or rank >= len(shares):
        raise RefusedError("stepscope does not know which of the machine's ranks this is")
    tell = training.telling()

    def pin(cores: tuple[int, ...]) -> None:
        _pin_all_threads(cores)
        threads = min(torch.get_num_threads(), len(cores))
        if threads < torch.get_num_threads():
            torch._C.set_num_threads(threads)
        tell(f"local rank {rank} is bound to cores {processors.write_core_list(cores)}")

    def move_to_device(module: Any) -> None:
        homes = _nodes_of_devices(ranks) if _is_on_cuda(module) else []
        better = share_cores(nodes, ranks, processors.first_sibling, homes)
        if better and better[rank] != shares[rank]:
            pin(better[rank])

    pin(shares[rank])
    training.when_root(move_to_device)


def _pin_all_threads(cores: tuple[int, ...]) -> None:
    """Threads that exist, and through them all that they start."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]  # noqa: PTH208
    except OSError:
        threads = [0]
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cores)
        except OSError:  # it has ended meanwhile
            continue


def _is_on_cuda(module: Any) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


def _nodes_of_devices(ranks: int) -> list[int | None]:
    """Empty unless this process sees a device for each rank of the machine."""
    import torch

    if torch.cuda.device_count() < ranks:
        return []
    addresses = []
    for index in range(ranks):
        device: Any = torch.cuda.get_device_properties(index)
        if not hasattr(device, "pci_bus_id"):
            return []
        addresses.append(
            f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
        )
    return [processors.node_of_device(address) for address in addresses]


def patch(script: Script, value: str) -> Proposal:
    ranks = script.facts.local_ranks
    shares = share_cores(processors.numa_nodes(), ranks, processors.first_sibling)
    lists = [processors.write_core_list(cores) for cores in shares]
    if ranks == 1 and lists:
        return Proposal(by_hand=(f"start the command with `taskset -c {lists[0]}`",))
    words = ", ".join(f"{cores} for local rank {rank}" for rank, cores in enumerate(lists[:4]))
    more = ", and so on" if len(lists) > 4 else ""
    return Proposal(
        by_hand=(
            "start each rank with `taskset -c` and its own "
            f"cores{f' ({words}{more})' if words else ''}, or use torchrun (2.9 and later) "
            "with --numa-binding=node",
        )
    )


FIX = Fix(id="pin-ranks", effect=Effect.ROUNDING, fits=fits, apply=apply, patch=patch)
