"""Several contenders over all sizes: each pass visits every pair once, in a random order.

What is compared has to be measured side by side: a machine that slows down for a minute slows all
contenders and all sizes alike.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepscope.measure.calibrate.collectives import largest_of_ranks
from stepscope.measure.calibrate.stopwatch import time_call_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Contenders = Mapping[str, Callable[[int], Callable[[], object]]]  # name -> size -> call

_VISIT_NS = 15_000_000
_MIN_REPEATS, _MAX_REPEATS = 2, 15
_MIN_PASSES, _MAX_PASSES = 3, 12
_FEWEST_SIZES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedTimes:
    """By contender: for each pass, for each size, the slowest rank's time of each call."""

    sizes_bytes: list[int]
    passes_ns: dict[str, list[list[list[int]]]]


class InterleavedSweeper:
    """Measures in one group; every rank makes the same calls in the same order."""

    def __init__(self, contenders: Contenders, device: torch.device, group: Any) -> None:
        self._contenders, self._device, self._group = contenders, device, group

    def run(
        self, sizes: list[int], budget_ns: int, seed: str, progress: Callable[[float], None]
    ) -> InterleavedTimes:
        """As many passes as the budget allows; too few, and the largest sizes are dropped."""
        began = time.perf_counter_ns()
        repeats = self._choose_repeats(sizes, began, budget_ns)
        sizes = sizes[: len(repeats)]
        shuffle = random.Random(seed)
        pairs = [(name, place) for name in self._contenders for place in range(len(sizes))]
        passes: dict[str, list[list[list[int]]]] = {name: [] for name in self._contenders}
        spent = last = done = 0
        while done < _MIN_PASSES or (spent + last <= budget_ns and done < _MAX_PASSES):
            own: dict[tuple[str, int], list[int]] = {}
            for name, place in shuffle.sample(pairs, len(pairs)):
                # The first call after another one meets cold caches and a sleeping peer.
                own[name, place] = self._visit(name, sizes[place], repeats[place][name] + 1)[1:]
            now = time.perf_counter_ns() - began
            *slowest, now = self._agree([*(ns for pair in pairs for ns in own[pair]), now])
            taken = iter(slowest)
            times = {pair: [next(taken) for _ in own[pair]] for pair in pairs}
            for name, by_pass in passes.items():
                by_pass.append([times[name, place] for place in range(len(sizes))])
            spent, last, done = now, now - spent, done + 1
            progress(min(1.0, spent / budget_ns))
        return InterleavedTimes(sizes_bytes=sizes, passes_ns=passes)

    def _choose_repeats(self, sizes: list[int], began: int, budget_ns: int) -> list[dict[str, int]]:
        """Calls per visit, by size and contender; sizes for which there is no time are left out."""
        repeats: list[dict[str, int]] = []
        one_pass = 0
        for size in sizes:
            quickest = [min(self._visit(name, size, 2)) for name in self._contenders]
            *pilot, spent = self._agree([*quickest, time.perf_counter_ns() - began])
            counts = [max(_MIN_REPEATS, min(_MAX_REPEATS, _VISIT_NS // max(ns, 1))) for ns in pilot]
            one_pass += sum((n + 1) * ns for n, ns in zip(counts, pilot, strict=True))
            enough = len(repeats) >= _FEWEST_SIZES
            if enough and spent + _MIN_PASSES * one_pass > budget_ns:
                break
            repeats.append(dict(zip(self._contenders, counts, strict=True)))
        return repeats

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
