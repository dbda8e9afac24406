"""Time the job's collectives: the groups inside the world, one call of each kind, all sizes
in random order, and all-reduce beside compute.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from stepscope.measure.calibrate.ceilings import time_call_ns

# One collective over all sizes, in random order, pass after pass.
#
# A pass visits every size once, in an order of its own, so that a machine that slows down slows all
# sizes alike. Each call starts after a barrier, and a call's time is that of its slowest rank.
# Ranks agree on every decision through the numbers they share, never through their own clocks.

_VISIT_NS = 25_000_000  # how long one visit of a size should take
_MIN_REPEATS, _MAX_REPEATS = 3, 25
_MIN_PASSES, _MAX_PASSES = 4, 16
_ALWAYS_BYTES = 1 << 20  # sizes up to this are never left out: they cost next to nothing


class NotOfferedError(Exception):
    """The backend does not know this collective."""


@dataclass(slots=True)
class Sweep:
    """Raw times: for each pass, for each size, the slowest rank's time of each call."""

    kind: str
    group: str
    group_size: int
    sizes_bytes: list[int]
    passes_ns: list[list[list[int]]] = field(default_factory=list)
    left_out_bytes: list[int] = field(default_factory=list)  # sizes the time budget had no room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeper:
    """Measures one kind in one group."""

    kind: str
    group: NamedGroup
    buffers: Buffers
    device: torch.device

    def run(
        self, sizes: list[int], budget_ns: int, seed: int, progress: Callable[[float], None]
    ) -> Sweep:
        """As many passes as the budget allows; too few, and the largest sizes are dropped."""
        self._probe(sizes[0])
        began = time.perf_counter_ns()
        pilot = self._pilot(sizes, began, budget_ns)
        repeats = choose_repeats(sizes, pilot, budget_ns)
        chosen = sizes[: len(repeats)]
        sweep = Sweep(
            kind=self.kind,
            group=self.group.name,
            group_size=self.group.size,
            sizes_bytes=[actual_bytes(size, self.group.size) for size in chosen],
            left_out_bytes=sizes[len(chosen) :],
        )
        shuffle = random.Random(f"{seed} {self.kind} {self.group.name}")
        spent = last = 0
        # The next pass is expected to take as long as the last one.
        while len(sweep.passes_ns) < _MIN_PASSES or spent + last <= budget_ns:
            times, now = self._one_pass(chosen, repeats, shuffle, began)
            sweep.passes_ns.append(times)
            spent, last = now, now - spent
            progress(min(1.0, spent / budget_ns))
            if len(sweep.passes_ns) == _MAX_PASSES:
                break
        return sweep

    def _probe(self, size: int) -> None:
        why = ""
        try:
            self._call(size)()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            why = str(error).strip().split("\n")[0][:200] or type(error).__name__
        (refusing,) = self._agree([1 if why else 0])
        if refusing:
            raise NotOfferedError(why or "another rank refused it")

    def _pilot(self, sizes: list[int], began: int, budget_ns: int) -> list[int]:
        """About how long a call of each size takes; stops when a third of the budget is gone."""
        times_ns = []
        for size in sizes:
            times = self._visit(size, 2)
            slowest, spent = self._agree([min(times), time.perf_counter_ns() - began])
            times_ns.append(slowest)
            if 3 * spent > budget_ns and size >= _ALWAYS_BYTES:
                break
        return times_ns

    def _one_pass(
        self, sizes: list[int], repeats: list[int], shuffle: random.Random, began: int
    ) -> tuple[list[list[int]], int]:
        """Times by size, and what the whole sweep has taken until now."""
        own: list[list[int]] = [[] for _ in sizes]
        for number in shuffle.sample(range(len(sizes)), len(sizes)):
            # The first call after another size meets cold caches and a sleeping peer.
            own[number] = self._visit(sizes[number], repeats[number] + 1)[1:]
        flat = [ns for times in own for ns in times]
        *slowest, spent = self._agree([*flat, time.perf_counter_ns() - began])
        taken = iter(slowest)
        return [[next(taken) for _ in times] for times in own], spent

    def _visit(self, size: int, repeats: int) -> list[int]:
        call = self._call(size)
        times = []
        for _ in range(repeats):
            self._barrier()
            times.append(time_call_ns(call, self.device))
        return times

    def _call(self, size: int) -> Callable[[], object]:
        return make_call(self.kind, self.group.place, self.buffers, size)

    def _barrier(self) -> None:
        if self.device.type == "cpu":
            dist.barrier()
        else:
            self._agree([0])

    def _agree(self, values: list[int]) -> list[int]:
        return largest_of_ranks(values, device=self.device)


def choose_repeats(sizes: list[int], pilot_ns: list[int], budget_ns: int) -> list[int]:
    """Calls per visit of each size; shorter than the pilot if the largest sizes do not fit."""
    repeats = [max(_MIN_REPEATS, min(_MAX_REPEATS, _VISIT_NS // max(ns, 1))) for ns in pilot_ns]
    while len(repeats) > 2 and sizes[len(repeats) - 1] > _ALWAYS_BYTES:
        one_pass = sum((n + 1) * ns for n, ns in zip(repeats, pilot_ns, strict=False))
        if _MIN_PASSES * one_pass <= budget_ns:
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
        unit = self._agree([self._unit_ns()])[0]
        room = min(largest, len(self._buffers.first) * self._buffers.first.element_size())
        return [
            self._one_size(size, unit, _QUICK_REPEATS if quick else _REPEATS)
            for size in SIZES
            if size <= room
        ]

    def _unit_ns(self) -> int:
        self._compute(20, None)
        return max(1, self._compute(50, None)[0] // 50)

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
