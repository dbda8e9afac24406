"""How much an all-reduce and compute slow each other down on CPU tensors.

There the threads that communicate need the cores that compute. Ranks compute with as many threads
as their launcher gave them. The three parts (all-reduce alone, compute alone, both) take turns, so
that a machine that slows down slows all three.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepscope.measure.calibrate.collectives import actual_bytes, elements, largest_of_ranks

if TYPE_CHECKING:
    from stepscope.measure.calibrate.collectives import Buffers, GroupPlace

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
