"""Which rank this process is and of how many, where its host stands in the network, and
which ranks record a trace.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from stepscope.errors import UsageError
from stepscope.measure.never_raise import note
from stepscope.records.processors import local_rank
from stepscope.text.words import counted

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
    dist = initialised_groups()
    if dist is not None:
        return int(dist.get_rank()), int(dist.get_world_size())
    numbers = _read_numbers("RANK", "WORLD_SIZE")
    if numbers is not None:
        return numbers
    tasks = (_read_numbers(*names) for names in _TASKS)
    return next((task for task, _ in filter(None, tasks)), 0), 1


def initialised_groups() -> Any | None:
    """torch.distributed, if the script has imported it and a process group exists."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


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


# Rack and switch of this host, from the environment: Slurm's topology, or the user's own words.
#
# Slurm sets both variables when a topology plugin is configured:
#
#     SLURM_TOPOLOGY_ADDR=s0.s2.node1
#     SLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node

_LONGEST = 200  # of a name, and of all switches: more is no topology


def network_place(environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """None if nothing tells. STEPSCOPE_RACK and STEPSCOPE_SWITCH outrank Slurm's names."""
    switches = _slurm_switches(environment)
    rack = _name(environment, "STEPSCOPE_RACK")
    switch = _name(environment, "STEPSCOPE_SWITCH")
    if switch and switch not in switches[-1:]:
        switches = [switch]
    if not rack and not switches:
        return None
    return {"rack": rack, "switch": switches[-1] if switches else None, "switches": switches}


def _slurm_switches(environment: Mapping[str, str]) -> list[str]:
    """From the top down; a node's name may contain dots, a switch's may not."""
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")[:_LONGEST].split(".")
    names = environment.get("SLURM_TOPOLOGY_ADDR", "")[:_LONGEST].split(".", len(kinds) - 1)
    if len(names) != len(kinds):
        return []
    pairs = zip(names, kinds, strict=True)
    return [name for name, kind in pairs if kind == "switch" and name]


def _name(environment: Mapping[str, str], variable: str) -> str | None:
    return environment.get(variable, "").strip()[:_LONGEST] or None


# Which ranks are traced. Each rank decides for itself, from numbers that all of them know.
#
# A trace costs a file of megabytes, so of a large job only some ranks record one. All ranks keep
# their steps, their clock rounds and the flight recorder's collectives.

Rule = Literal["auto", "all", "one-per-host", "listed"]
MOST_TRACED = 64
_RANGE = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?")
_EXAMPLES = "write numbers and ranges as in 0,7,64-71, or one-per-host, all or auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRanks:
    """What `--ranks` asks for; `ranges` are those of a list, both ends included."""

    rule: Rule
    ranges: tuple[tuple[int, int], ...] = ()

    def holds(self, rank: int) -> bool:
        return any(first <= rank <= last for first, last in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """Whether this rank records a trace; `problem` is said where the request did not fit."""

    traced: bool
    rule: Rule
    problem: str = ""


def parse_ranks(text: str) -> ChosenRanks:
    """Raises UsageError."""
    words = text.strip()
    for rule in ("auto", "all", "one-per-host"):
        if words == rule:
            return ChosenRanks(rule=rule)
    ranges = []
    for word in words.split(","):
        match = _RANGE.fullmatch(word.strip())
        if match is None:
            raise UsageError(f"--ranks {text}: {word.strip()!r} is not a rank: {_EXAMPLES}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"--ranks {text}: a range goes up: write {last}-{first}")
        ranges.append((first, last))
    return ChosenRanks(rule="listed", ranges=tuple(ranges))


def choose_here(text: str, rank: int, world_size: int) -> TraceChoice:
    """This rank's own choice. Never raises; rank 0 notes what does not fit the job."""
    try:
        choice = choose_trace(parse_ranks(text), rank, world_size)
    except UsageError as error:
        traced = _by_default(rank, world_size)
        choice = TraceChoice(traced=traced, rule="auto", problem=f"{error}; auto is used")
    if choice.problem and rank == 0:
        note("ranks", choice.problem)
    return choice


def choose_trace(wanted: ChosenRanks, rank: int, world_size: int) -> TraceChoice:
    """Never raises. A request that fits no rank of the job is answered as `auto`."""
    if wanted.rule == "all":
        return TraceChoice(traced=True, rule="all")
    if wanted.rule == "one-per-host":
        local = local_rank(rank)
        if local is not None or world_size == 1:
            return TraceChoice(traced=not local, rule="one-per-host")
        problem = "the launcher does not say which ranks share a host, so --ranks auto is used"
        return TraceChoice(traced=_by_default(rank, world_size), rule="auto", problem=problem)
    if wanted.rule == "auto":
        return TraceChoice(traced=_by_default(rank, world_size), rule="auto")
    problem = _outside(wanted, world_size)
    if all(first >= world_size for first, _ in wanted.ranges):
        traced, problem = _by_default(rank, world_size), f"{problem}, so --ranks auto is used"
        return TraceChoice(traced=traced, rule="auto", problem=problem)
    return TraceChoice(traced=wanted.holds(rank), rule="listed", problem=problem)


def spread_evenly(world_size: int, most: int = MOST_TRACED) -> list[int]:
    """At most so many ranks, one from each of as many equal stretches.

    Neighbouring ranks share a host, so stretches spread over hosts; ranks that were dealt out to
    hosts in turn are spread as well. The place inside its stretch moves on each time: the first
    ranks of all hosts alone would show no other device.
    """
    if world_size <= most:
        return list(range(world_size))
    inside = world_size // most
    return [
        place * world_size // most + (place + place // inside) % inside for place in range(most)
    ]


def _by_default(rank: int, world_size: int) -> bool:
    return world_size <= MOST_TRACED or rank in spread_evenly(world_size)


def _outside(wanted: ChosenRanks, world_size: int) -> str:
    """What of the list is no rank of the job."""
    beyond = [(max(first, world_size), last) for first, last in wanted.ranges if last >= world_size]
    if not beyond:
        return ""
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in beyond[:4])
    more = f" and {len(beyond) - 4} more" if len(beyond) > 4 else ""
    return f"--ranks names {words}{more}, but the job has {counted(world_size, 'rank')}"
