"""Threads per operator, and the cores that each rank keeps to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.errors import RefusedError
from stepscope.fix.cores import cores_per_rank, ranks_here, share_of_cores
from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.records import processors
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

    Cores = tuple[int, ...]


# As many threads per operator as a rank has cores, or half as many.
#
# Cores that share their arithmetic units in pairs (SMT) often train faster with half. How work is
# split decides the order of sums: results are the same up to rounding.

_ALL, _HALF = "cores", "half"
_OMP, _MKL = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


def _number(value: str, cores: int) -> int:
    if value.isdecimal():
        return int(value)
    return cores if value == _ALL else max(1, cores // 2)


def _number_here(facts: ScriptFacts, value: str) -> int:
    cores = share_of_cores(facts.cores, facts.machine_cores, facts.local_ranks)
    return _number(value, cores)


def _why_not_threads(facts: ScriptFacts, value: str) -> str | None:
    number = _number_here(facts, value)
    if number == 1 and not value.isdecimal():
        return "a rank has one core, so one-thread does the same"
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if facts.threads == number:
        return f"operators already use {number} {'thread' if number == 1 else 'threads'}"
    return None


def _environment_threads(value: str, variables: Mapping[str, str]) -> dict[str, str | None]:
    """Only a number is known before the ranks are: the rest is set in the process."""
    return _variables_for(int(value), variables) if value.isdecimal() else {}


def _variables_for(number: int, users: Mapping[str, str]) -> dict[str, str | None]:
    """MKL's own variable would win over OpenMP's: it is changed where the user has set it."""
    names = (_OMP, _MKL) if users.get(_MKL) else (_OMP,)
    return dict.fromkeys(names, str(number))


def _apply_threads(training: TrainingProcess, value: str) -> None:
    """Now, and again at the first forward: the script may set threads itself, and only then is it
    known how many ranks there are."""
    import torch

    tell = training.telling()
    set_threads: Any = torch._C.set_num_threads  # torch's own: nobody watches it

    def switch(_module: Any = None) -> None:
        before, wanted = torch.get_num_threads(), _number(value, cores_per_rank())
        if before != wanted:
            set_threads(wanted)
        if before != wanted or _module is not None:
            tell(f"{wanted} {'thread' if wanted == 1 else 'threads'} per operator")

    switch()
    training.when_root(switch)


def _patch_threads(script: Script, value: str) -> Proposal:
    """The script's own call wins over variables: where there is one, it is changed."""
    facts = script.facts
    number = _number_here(facts, value)
    for frame in facts.set_threads[:1]:
        source = script.source(frame.file)
        call = source.call_at(frame.line, "set_num_threads") if source is not None else None
        if source is None or call is None or len(call.args) != 1:
            continue
        if source.called(call) == "set_num_threads":  # not a library's call that leads there
            return Proposal(edits=(source.replace(call.args[0], str(number)),))
    if facts.set_threads:
        where = facts.set_threads[0].words
        return Proposal(by_hand=(f"call torch.set_num_threads({number}) (see {where})",))
    changes = _variables_for(number, facts.variables)
    return Proposal(variables={name: str(value) for name, value in changes.items()})


THREADS = Fix(
    accepts=lambda value: value in (_ALL, _HALF) or (value.isdecimal() and int(value) > 0),
    fits=_why_not_threads,
    apply=_apply_threads,
    environment=_environment_threads,
    patch=_patch_threads,
)


# One thread per operator: short operators wait longer for each other than they compute.


ONE_THREAD = Fix(
    fits=lambda facts, _: _why_not_threads(facts, "1"),
    apply=lambda training, _: _apply_threads(training, "1"),
    environment=lambda _, variables: _environment_threads("1", variables),
    patch=lambda script, _: _patch_threads(script, "1"),
)


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


def _why_not_pin_ranks(facts: ScriptFacts, value: str) -> str | None:
    ranks = facts.local_ranks
    if ranks == 1 and facts.numa_nodes == 1:
        return "the only rank has this machine's only NUMA node to itself"
    if facts.cores < ranks:
        return f"{ranks} ranks have {facts.cores} cores, fewer than one each"
    if ranks > 1 and ranks * facts.cores <= facts.machine_cores:
        return "each rank already has its own cores"
    return None


def _apply_pin_ranks(training: TrainingProcess, value: str) -> None:
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


def _patch_pin_ranks(script: Script, value: str) -> Proposal:
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


PIN_RANKS = Fix(fits=_why_not_pin_ranks, apply=_apply_pin_ranks, patch=_patch_pin_ranks)
