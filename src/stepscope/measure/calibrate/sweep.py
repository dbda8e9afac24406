"""One collective over all sizes, in random order, pass after pass.

A pass visits every size once, in an order of its own, so that a machine that slows down slows all
sizes alike. Each call starts after a barrier, and a call's time is that of its slowest rank. Ranks
agree on every decision through the numbers they share, never through their own clocks.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from stepscope.measure.calibrate.collectives import (
    Buffers,
    actual_bytes,
    largest_of_ranks,
    make_call,
)
from stepscope.measure.calibrate.stopwatch import time_call_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.measure.calibrate.groups import NamedGroup

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
