"""Count the CPU cores a rank has and set the threads of its operators."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stepscope.fix.proposal import Proposal, Script
from stepscope.records import processors
from stepscope.records.script_facts import VARIABLES, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

# What remedies of the machine need to know about this process.


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


# How many threads an operator may share its work with, as threads and one-thread set it.

_OMP, _MKL = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


def why_not_threads(facts: ScriptFacts, number: int) -> str | None:
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if facts.threads == number:
        return f"operators already use {number} {'thread' if number == 1 else 'threads'}"
    return None


def variables_for(number: int, users: Mapping[str, str]) -> dict[str, str | None]:
    """MKL's own variable would win over OpenMP's: it is changed where the user has set it."""
    names = (_OMP, _MKL) if users.get(_MKL) else (_OMP,)
    return dict.fromkeys(names, str(number))


def keep_threads(training: TrainingProcess, number: Callable[[], int]) -> None:
    """Now, and again at the first forward: the script may set threads itself, and only then is it
    known how many ranks there are."""
    import torch

    tell = training.telling()
    set_threads: Any = torch._C.set_num_threads  # torch's own: nobody watches it

    def switch(_module: Any = None) -> None:
        before, wanted = torch.get_num_threads(), number()
        if before != wanted:
            set_threads(wanted)
        if before != wanted or _module is not None:
            tell(f"{wanted} {'thread' if wanted == 1 else 'threads'} per operator")

    switch()
    training.when_root(switch)


def patch_threads(script: Script, number: int) -> Proposal:
    """The script's own call wins over variables: where there is one, it is changed."""
    facts = script.facts
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
    changes = variables_for(number, facts.variables)
    return Proposal(variables={name: str(value) for name, value in changes.items()})
