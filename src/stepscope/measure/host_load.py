"""One rank's load over its plain steps: processor time, waits for a core, other programs.

Counters are read between stretches of plain steps, never inside one. A few values of parameters,
gradients and optimizer state are read as well: denormal numbers make a CPU slow.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from stepscope.measure.machine import (
    Counts,
    counters,
    growth,
    job_processes,
    machine_facts,
)
from stepscope.measure.never_raise import never_raise
from stepscope.measure.own_operators import unseen
from stepscope.measure.ranks import rank_and_world
from stepscope.records.processors import local_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_OTHERS = 3
_LEAST_CORES = 0.05
_MOST_TENSORS, _VALUES = 200, 2048  # read to find denormal numbers


class HostLoadMeter:
    """Counters over all plain steps so far. Call `resume` and `pause` between two steps."""

    def __init__(self) -> None:
        self._began: Counts | None = None
        self._from_step = 0
        self._sum: Counts = {}
        self._others: dict[str, int] = {}
        self._values = [0, 0]  # read, denormal
        self._started: Counts = {}
        self._several = False

    @never_raise
    def resume(self, step: int, *, plain: bool) -> None:
        """Count from the step that now begins, if it is plain."""
        self._started = self._started or machine_facts()
        # Once a group has existed, the job has several ranks, even if it is destroyed early.
        self._several = self._several or rank_and_world()[1] > 1
        self._began = counters(several=self._several) if plain else None
        self._from_step = step

    @never_raise
    def pause(self, step: int, optimizers: Iterable[Any] = ()) -> None:
        """A stretch of plain steps is over."""
        began, self._began = self._began, None
        if began is None or step <= self._from_step:
            return
        now = counters(several=self._several)
        self._add({"steps": step - self._from_step, **growth(began, now)})
        self._add_others(began, now)
        with unseen():
            for tensor in _tensors(optimizers):
                self._count_denormals(tensor)

    @never_raise
    def content(self) -> Counts | None:
        """For rank.json; None before the first stretch began."""
        if not self._started:
            return None
        values, denormal = self._values
        return {
            **self._started,
            "plain": {**self._sum, "others": self._top_others()} if self._sum else None,
            "denormal_share": denormal / values if values else None,
        }

    def _add(self, stretch: Counts) -> None:
        """A counter that is missing from one stretch is unknown for all of them."""
        if not self._sum:
            self._sum = stretch
            return
        self._sum = {
            name: None if value is None or stretch.get(name) is None else value + stretch[name]
            for name, value in self._sum.items()
        }

    def _add_others(self, before: Counts, now: Counts) -> None:
        """Processor time of processes outside the job, by the name of their program."""
        old, new = before["processes"], now["processes"]
        if old is None or new is None:
            return
        spent = {
            pid: max(0, process.cpu_ns - (old[pid].cpu_ns if pid in old else 0))
            for pid, process in new.items()
        }
        for pid in new.keys() - job_processes(new, several=self._several):
            name = new[pid].name
            self._others[name] = self._others.get(name, 0) + spent[pid]
        if local_ranks() is None and os.getpid() in new:
            parent = new[os.getpid()].parent
            least_ns = _LEAST_CORES * (now["wall_ns"] - before["wall_ns"])
            # Without a launcher's word, count the busy processes of this one's parent.
            siblings = [pid for pid in new if new[pid].parent == parent and spent[pid] > least_ns]
            ranks = len(siblings) if self._several else 1
            self._started["local_ranks"] = max(ranks, self._started["local_ranks"] or 1)

    def _top_others(self) -> list[Counts]:
        wall_ns = self._sum.get("wall_ns") or 1
        named = sorted(self._others.items(), key=lambda pair: -pair[1])[:_MOST_OTHERS]
        return [
            {"name": name, "cores": cpu_ns / wall_ns}
            for name, cpu_ns in named
            if cpu_ns >= _LEAST_CORES * wall_ns
        ]

    def _count_denormals(self, tensor: Any) -> None:
        torch = sys.modules["torch"]
        with torch.no_grad():
            flat = tensor.detach().reshape(-1)
            size = flat[:: max(1, flat.numel() // _VALUES)].abs()
            least = torch.finfo(flat.dtype).tiny
            self._values[0] += size.numel()
            self._values[1] += int(((size > 0) & (size < least)).sum())


def _tensors(optimizers: Iterable[Any]) -> list[Any]:
    """Parameters, gradients and optimizer state on the CPU, plain tensors only."""
    torch = sys.modules["torch"]
    plain = (torch.Tensor, torch.nn.Parameter)
    candidates = [
        tensor
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, parameter.grad, *(optimizer.state.get(parameter) or {}).values())
        if type(tensor) in plain and tensor.is_floating_point() and tensor.numel() > 1
    ]
    on_cpu = [t for t in candidates if t.device.type == "cpu" and t.layout == torch.strided]
    return on_cpu[:: max(1, len(on_cpu) // _MOST_TENSORS)]
