"""Time the job's collectives: the groups inside the world, one call of each kind, all sizes
in random order, and all-reduce beside compute.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepscope.measure.calibrate.ceilings import time_call_ns

if TYPE_CHECKING:
    Contenders = Mapping[str, Callable[[int], Callable[[], object]]]  # a size to its call

# Calls over all sizes, in random order, pass after pass.
#
# A pass visits every size of every contender once, in an order of its own: a machine that slows
# down slows all of them alike. Each call starts after a barrier, and a call's time is that of its
# slowest rank. Ranks agree on every decision through the numbers they share, never through their
# own clocks.


class NotOfferedError(Exception):
    """The backend does not know this collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLimits:
    """How often to call; both ends of the ranges are included."""

    visit_ns: int = 25_000_000  # how long one visit of a size should take
    repeats: tuple[int, int] = (3, 25)
    passes: tuple[int, int] = (4, 16)
    always_bytes: int = 1 << 20  # sizes up to this are never left out: they cost next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptTimes:
    """By contender: for each pass, for each size, the slowest rank's time of each call."""

    sizes_bytes: list[int]  # the largest ones are left out when the time budget has no room
    passes_ns: dict[str, list[list[list[int]]]]


class Sweeper:
    """Measures in one group; every rank makes the same calls in the same order."""

    def __init__(
        self,
        contenders: Contenders,
        device: torch.device,
        *,
        group: Any = None,
        limits: SweepLimits = SweepLimits(),
    ) -> None:
        self._contenders, self._device, self._group = contenders, device, group
        self._limits = limits

    def probe(self, size: int) -> None:
        """Raises NotOfferedError if a rank refuses a call."""
        why = ""
        try:
            for call in self._contenders.values():
                call(size)()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            why = str(error).strip().split("\n")[0][:200] or type(error).__name__
        (refusing,) = self._agree([1 if why else 0])
        if refusing:
            raise NotOfferedError(why or "another rank refused it")

    def run(
        self, sizes: list[int], budget_ns: int, seed: str, progress: Callable[[float], None]
    ) -> SweptTimes:
        """As many passes as the budget allows; too few, and the largest sizes are dropped."""
        began = time.perf_counter_ns()
        pilot = self._pilot(sizes, began, budget_ns)
        repeats = choose_repeats(sizes, pilot, budget_ns, self._limits)
        shuffle = random.Random(seed)
        least, most = self._limits.passes
        pairs = [(name, place) for place in range(len(repeats)) for name in self._contenders]
        counts = dict(zip(pairs, itertools.chain(*repeats), strict=True))
        passes: dict[str, list[list[list[int]]]] = {name: [] for name in self._contenders}
        spent = last = done = 0
        # The next pass is expected to take as long as the last one.
        while done < least or (spent + last <= budget_ns and done < most):
            own: dict[tuple[str, int], list[int]] = {}
            for name, place in shuffle.sample(pairs, len(pairs)):
                # The first call after another one meets cold caches and a sleeping peer.
                own[name, place] = self._visit(name, sizes[place], counts[name, place] + 1)[1:]
            now = time.perf_counter_ns() - began
            *slowest, now = self._agree([*(ns for pair in pairs for ns in own[pair]), now])
            taken = iter(slowest)
            times = {pair: [next(taken) for _ in own[pair]] for pair in pairs}
            for name, by_pass in passes.items():
                by_pass.append([times[name, place] for place in range(len(repeats))])
            spent, last, done = now, now - spent, done + 1
            progress(min(1.0, spent / budget_ns))
        return SweptTimes(sizes_bytes=sizes[: len(repeats)], passes_ns=passes)

    def _pilot(self, sizes: list[int], began: int, budget_ns: int) -> list[list[int]]:
        """About how long a call of each size takes, by contender; stops when a third of the budget
        is gone."""
        pilot = []
        for size in sizes:
            quickest = [min(self._visit(name, size, 2)) for name in self._contenders]
            *slowest, spent = self._agree([*quickest, time.perf_counter_ns() - began])
            pilot.append(slowest)
            if len(pilot) > 1 and 3 * spent > budget_ns and size >= self._limits.always_bytes:
                break
        return pilot

    def _visit(self, name: str, size: int, repeats: int) -> list[int]:
        call = self._contenders[name](size)
        times = []
        for _ in range(repeats):
            self._start_together()
            times.append(time_call_ns(call, self._device))
        return times

    def _start_together(self) -> None:
        if self._device.type == "cpu":
            dist.barrier(self._group)
        else:
            self._agree([0])

    def _agree(self, values: list[int]) -> list[int]:
        return largest_of_ranks(values, group=self._group, device=self._device)


def choose_repeats(
    sizes: list[int], pilot_ns: list[list[int]], budget_ns: int, limits: SweepLimits
) -> list[list[int]]:
    """Calls per visit, by size and contender; shorter than the pilot if the largest sizes do not
    fit."""
    fewest, most = limits.repeats
    repeats = [
        [max(fewest, min(most, limits.visit_ns // max(ns, 1))) for ns in pilot]
        for pilot in pilot_ns
    ]
    while len(repeats) > 2 and sizes[len(repeats) - 1] > limits.always_bytes:
        calls = zip(itertools.chain(*repeats), itertools.chain(*pilot_ns), strict=False)
        if limits.passes[0] * sum((count + 1) * ns for count, ns in calls) <= budget_ns:
            break
        repeats.pop()
    return repeats


# One call of each kind of collective. Bytes are the total: output of an all-gather, else input.

_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """This rank's process group and the world ranks in it."""

    handle: Any
    ranks: tuple[int, ...]
    rank: int

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Two flat tensors that every size is a slice of."""

    first: torch.Tensor
    second: torch.Tensor

    @classmethod
    def allocate(cls, count: int, device: torch.device) -> Buffers:
        """Written once, so that no page is touched for the first time while the clock runs."""
        first, second = (torch.empty(count, device=device).zero_() for _ in range(2))
        return cls(first=first, second=second)


def elements(size_bytes: int, group_size: int) -> int:
    """As many elements as fit, the same number for every rank."""
    return max(1, size_bytes // _ELEMENT_BYTES // group_size) * group_size


def actual_bytes(size_bytes: int, group_size: int) -> int:
    """A sweep's size, rounded so that every rank has the same share."""
    return elements(size_bytes, group_size) * _ELEMENT_BYTES


def make_call(
    kind: str, place: GroupPlace | None, buffers: Buffers, size_bytes: int
) -> Callable[[], object]:
    """This rank's part of the collective; nothing for a rank that is in no group."""
    if place is None:
        return lambda: None
    ranks = len(place.ranks)
    whole = buffers.first[: elements(size_bytes, ranks)]
    other = buffers.second[: len(whole)]
    share = other[: len(whole) // ranks]
    group = place.handle
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: _all_gather()(whole, share, group=group),
        "reduce_scatter": lambda: _reduce_scatter()(share, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, src=place.ranks[0], group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": _send_or_receive(place, whole),
    }
    return calls[kind]


def largest_of_ranks(
    values: list[int], *, group: Any = None, device: torch.device | None = None
) -> list[int]:
    """The largest of each value over the group's ranks, equal on all of them."""
    shared = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    largest: list[int] = shared.tolist()
    return largest


def _all_gather() -> Callable[..., object]:
    """torch 2.13 renamed it."""
    renamed: Callable[..., object] | None = getattr(dist, "all_gather_single", None)
    return renamed or dist.all_gather_into_tensor


def _reduce_scatter() -> Callable[..., object]:
    renamed: Callable[..., object] | None = getattr(dist, "reduce_scatter_single", None)
    return renamed or dist.reduce_scatter_tensor


def _send_or_receive(place: GroupPlace, tensor: torch.Tensor) -> Callable[[], object]:
    """Pairs of neighbours, one way: even ranks send, odd ones receive, a last one rests."""
    index = place.index
    if index % 2:
        source = place.ranks[index - 1]
        return lambda: dist.recv(tensor, src=source, group=place.handle)
    if index + 1 == len(place.ranks):
        return lambda: None
    target = place.ranks[index + 1]
    return lambda: dist.send(tensor, dst=target, group=place.handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSweeper:
    """Measures one kind of collective in one group."""

    kind: str
    group: NamedGroup
    buffers: Buffers
    device: torch.device

    def run(
        self, sizes: list[int], budget_ns: int, seed: int, progress: Callable[[float], None]
    ) -> dict[str, Any]:
        """Raw times as JSON has them. Raises NotOfferedError."""
        call = partial(make_call, self.kind, self.group.place, self.buffers)
        sweeper = Sweeper({self.kind: call}, self.device)
        sweeper.probe(sizes[0])
        group = self.group
        times = sweeper.run(sizes, budget_ns, f"{seed} {self.kind} {group.name}", progress)
        return {
            "kind": self.kind,
            "group": group.name,
            "group_size": group.size,
            "sizes_bytes": [actual_bytes(size, group.size) for size in times.sizes_bytes],
            "passes_ns": times.passes_ns[self.kind],
            "left_out_bytes": sizes[len(times.sizes_bytes) :],
        }


# The world and the groups inside it, each under a name.
#
# All groups of a name work at the same time, as in a training, and share the machine's links.

_ENOUGH_FOR_PAIRS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGroup:
    """A name, the size of its groups, and this rank's place in one of them (if any)."""

    name: str
    size: int
    place: GroupPlace | None


def make_groups() -> list[NamedGroup]:
    """world; intra-host and inter-host where there are several hosts; pairs from 4 ranks on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = tuple(range(world))
    everywhere = GroupPlace(handle=dist.group.WORLD, ranks=everyone, rank=rank)
    groups = [NamedGroup(name="world", size=world, place=everywhere)]
    for name, parts in partitions(gather_hosts()).items():
        place = None
        for ranks in parts:
            handle = dist.new_group(list(ranks))  # every rank has to make every group
            if rank in ranks:
                place = GroupPlace(handle=handle, ranks=ranks, rank=rank)
        groups.append(NamedGroup(name=name, size=len(parts[0]), place=place))
    return groups


def gather_hosts() -> list[str]:
    """Which host each rank is on: the launcher's number for it, else its name."""
    world = dist.get_world_size()
    mine = os.environ.get("GROUP_RANK") or socket.gethostname()
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, mine)
    return hosts


def ranks_by_host(hosts: list[str]) -> list[tuple[int, ...]]:
    """The ranks of each host, hosts in the order of their first rank."""
    return [
        tuple(rank for rank in range(len(hosts)) if hosts[rank] == host)
        for host in dict.fromkeys(hosts)
    ]


def partitions(hosts: list[str]) -> dict[str, list[tuple[int, ...]]]:
    """Groups by name, given every rank's host; no grouping appears under two names."""
    world = len(hosts)
    by_host = ranks_by_host(hosts)
    groupings: dict[str, list[tuple[int, ...]]] = {}
    if len(by_host) > 1 and len({len(ranks) for ranks in by_host}) == 1:
        groupings["intra-host"] = by_host
        groupings["inter-host"] = list(zip(*by_host, strict=True))
    if world >= _ENOUGH_FOR_PAIRS:
        groupings["pairs"] = [(rank, rank + 1) for rank in range(0, world - 1, 2)]
    seen: list[list[tuple[int, ...]]] = [[tuple(range(world))]]
    for name in list(groupings):
        if groupings[name] in seen or len(groupings[name][0]) < 2:
            del groupings[name]
        else:
            seen.append(groupings[name])
    return groupings


# How much an all-reduce and compute slow each other down on CPU tensors.
#
# There the threads that communicate need the cores that compute. Ranks compute with as many threads
# as their launcher gave them. The three parts (all-reduce alone, compute alone, both) take turns,
# so that a machine that slows down slows all three.

SIZES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
_REPEATS, _QUICK_REPEATS = 5, 3
_ROWS, _WIDTH = 64, 256  # a matmul of a fraction of a millisecond
_AT_LEAST_NS = 8_000_000  # of compute: several of a scheduler's turns
_TIMES_ALONE = 4  # compute lasts this many times as long as the all-reduce, to hold all of it


class ContentionTimer:
    """Measures in one group; every rank makes the same calls."""

    def __init__(self, place: GroupPlace, buffers: Buffers) -> None:
        self._place, self._buffers = place, buffers
        self._left = torch.randn(_ROWS, _WIDTH)
        self._right = torch.randn(_WIDTH, _WIDTH)
        self._out = torch.empty(_ROWS, _WIDTH)

    def run(self, largest: int, *, quick: bool) -> list[dict[str, Any]]:
        """For each size: the all-reduce and compute, each alone and both at once."""
        self._compute(20, None)
        unit = self._agree([max(1, self._compute(50, None)[0] // 50)])[0]
        room = min(largest, len(self._buffers.first) * self._buffers.first.element_size())
        return [
            self._one_size(size, unit, _QUICK_REPEATS if quick else _REPEATS)
            for size in SIZES
            if size <= room
        ]

    def _one_size(self, size: int, unit_ns: int, repeats: int) -> dict[str, Any]:
        ranks = len(self._place.ranks)
        tensor = self._buffers.first[: elements(size, ranks)]
        self._alone(tensor)
        pilot = self._agree([min(self._alone(tensor) for _ in range(2))])[0]
        count = max(_AT_LEAST_NS, _TIMES_ALONE * pilot) // unit_ns + 1
        times_ns: dict[str, list[int]] = {"alone": [], "compute": [], "slowed": [], "lasts": []}
        for _ in range(repeats):
            alone = self._alone(tensor)
            dist.barrier(self._place.handle)
            compute, _ = self._compute(count, None)
            dist.barrier(self._place.handle)
            handle = dist.all_reduce(tensor, group=self._place.handle, async_op=True)
            slowed, lasts = self._compute(count, handle)
            for name, ns in zip(
                times_ns, self._agree([alone, compute, slowed, lasts]), strict=True
            ):
                times_ns[name].append(ns)
        return {
            "size_bytes": actual_bytes(size, ranks),
            **{f"{name}_ns": round(median(times)) for name, times in times_ns.items()},
        }

    def _alone(self, tensor: torch.Tensor) -> int:
        dist.barrier(self._place.handle)
        began = time.perf_counter_ns()
        dist.all_reduce(tensor, group=self._place.handle)
        return time.perf_counter_ns() - began

    def _compute(self, count: int, handle: Any) -> tuple[int, int]:
        """Run `count` products: how long they took, and when the all-reduce was done."""
        began = time.perf_counter_ns()
        done = 0
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)
            if handle is not None and not done and handle.is_completed():
                done = time.perf_counter_ns() - began
        took = time.perf_counter_ns() - began
        if handle is not None and not done:
            handle.wait()
            done = time.perf_counter_ns() - began
        return took, done

    def _agree(self, values: list[int]) -> list[int]:
        return largest_of_ranks(values, group=self._place.handle)
