"""Steps that measure something more than their time: memory by category, and the host's own
time without waits for the device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.cuda_graphs import gate
from stepscope.measure.memory.memory_step import MemoryStep
from stepscope.measure.never_raise import never_raise
from stepscope.measure.patches import has_compiled, replace_until
from stepscope.measure.ranks import rank_and_world

if TYPE_CHECKING:
    from stepscope.measure.profiler.schedule import Schedule
    from stepscope.measure.settings import Settings


class SpecialSteps:
    """At most one of them runs at a time."""

    def __init__(self) -> None:
        self._memory: MemoryStep | None = None
        self._host: HostStep | None = None
        self._number = 0
        self._hosts: list[dict[str, Any]] = []

    @property
    def mark(self) -> str | None:
        """What steps.jsonl says of the running step; None for a plain one."""
        return "memory" if self._memory is not None else "host" if self._host is not None else None

    def begin(
        self, number: int, schedule: Schedule, optimizers: Iterable[Any], settings: Settings
    ) -> None:
        if schedule.measures_memory(number):
            self._memory = MemoryStep(list(optimizers), lines=settings.lines)
            self._memory.begin()
        else:
            self._begin_host(number, fine=schedule.stops_in_forward(number))

    @never_raise
    def _begin_host(self, number: int, *, fine: bool) -> None:
        if HostStep.is_possible():
            self._number = number
            self._host = HostStep(fine=fine, alone=rank_and_world()[1] == 1)
            self._host.begin()

    def phase(self, name: str, *, entering: bool) -> None:
        if self._memory is not None:
            self._memory.phase(name, entering=entering)
        elif self._host is not None:
            self._host.phase(name, entering=entering)

    @never_raise
    def pass_begins(self, roots: Any) -> None:
        if self._host is not None:
            self._host.pass_begins(roots)

    def end(self, folder: Path) -> bool:
        """Keep what the step that ended has measured; whether rank.json has to be written again."""
        memory, self._memory = self._memory, None
        if memory is not None:
            layout.try_write_json(folder / layout.MEMORY, memory.end())
        return bool(self._end_host())

    @never_raise
    def _end_host(self) -> bool:
        host, self._host = self._host, None
        measured = host.end() if host is not None else None
        if measured is None:
            return False
        self._hosts.append({"step": self._number, **measured})
        return True

    @never_raise
    def abandon(self) -> None:
        """The script ends in the middle of such a step."""
        memory, host = self._memory, self._host
        self.forget()
        if memory is not None:
            memory.end()
        if host is not None:
            host.leave()

    def forget(self) -> None:
        """In a forked child."""
        self._memory = self._host = None

    def content(self) -> list[dict[str, Any]]:
        """The host's own times, for rank.json."""
        return self._hosts


# The host's own time of a step: how long it needs when it never waits for the device.
#
# A device that decides the step hides how fast its host is: launches wait once about a thousand are
# queued, and calls like `.item()` wait for results. So in a few steps the queue is emptied where a
# phase begins, in the middle of backward, before such calls and, in every second of these steps,
# after some modules of forward. The host then always runs ahead of the device, and the waits, which
# are known, do not count. Nothing is computed differently; the steps take longer, and are marked.

PHASES = ("data", "forward", "backward", "optimizer")
_BLOCKING = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")
# Few enough that their launches never fill the queue, many enough that stopping costs little.
_MODULES, _NODES = 16, 64
_MOST_NODES = 50_000  # a larger graph would take too long to walk


class HostStep:
    """Begin before the step, end after it; called by the training thread and by autograd's."""

    def __init__(self, *, fine: bool, alone: bool) -> None:
        """`fine`: also stop inside forward. `alone`: no other rank trains; with others, only the
        step's start is free of waits, because stopping anywhere else might hold them up."""
        self._cuda: Any = sys.modules["torch"].cuda
        self._fine, self._alone = fine and alone and not has_compiled(), alone
        self._thread = get_ident()
        self._own_ns = dict.fromkeys(PHASES, 0)
        self._wait_ns = self._stops = self._modules = 0
        self._blocking = 0  # calls that would have waited
        self._stack = ["forward"]
        self._since = 0
        self._captured = False  # a CUDA graph was: nothing may wait then
        self._undo: list[Callable[[], Any]] = []

    @classmethod
    def is_possible(cls) -> bool:
        """A CPU has no queue: its step is the host's own time."""
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()

    def begin(self) -> None:
        self._since = perf_counter_ns()
        self._drain()
        if self._alone and not has_compiled():
            tensor = sys.modules["torch"].Tensor
            for name in _BLOCKING:
                drained = self._first_drained(getattr(tensor, name))
                self._undo.append(replace_until(tensor, name, drained))
        if self._fine:
            self._watch_modules()
        self._wait_ns = self._stops = 0
        self._own_ns = dict.fromkeys(PHASES, 0)
        self._since = perf_counter_ns()

    def phase(self, name: str, *, entering: bool) -> None:
        if name not in PHASES:
            return
        if self._alone and name != "data":
            self._drain()
        self._spend()
        if entering:
            self._stack.append(name)
        elif self._stack[-1] == name and len(self._stack) > 1:
            self._stack.pop()

    def pass_begins(self, roots: Any) -> None:
        """Before backward: choose the nodes that empty the queue first."""
        if not self._alone:
            return
        self._spend()
        nodes = _in_order(getattr(root, "grad_fn", None) for root in roots)
        for node in nodes[_NODES::_NODES]:
            self._undo.append(node.register_prehook(self._before_node).remove)
        self._since = perf_counter_ns()  # what this took is not the training's

    def end(self) -> dict[str, Any] | None:
        """None if the step could not be measured."""
        self._spend()
        self.leave()
        if self._captured:
            return None
        own = {f"{phase}_ns": spent for phase, spent in self._own_ns.items()}
        counts = {"stops": self._stops, "blocking": self._blocking, "wait_ns": self._wait_ns}
        return {"fine": self._fine, "alone": self._alone, **own, **counts}

    def leave(self) -> None:
        """Take everything back, the latest first."""
        while self._undo:
            self._undo.pop()()

    def _spend(self) -> None:
        now = perf_counter_ns()
        self._own_ns[self._stack[-1]] += now - self._since
        self._since = now

    def _drain(self) -> None:
        """Wait until the device is idle; that time is nobody's."""
        self._spend()
        if not gate.lets_through():
            self._captured = True
            return
        began = self._since
        self._cuda.synchronize()
        self._since = perf_counter_ns()
        self._stops += 1
        self._wait_ns += self._since - began

    @never_raise
    def _before_node(self, _gradients: Any) -> None:
        self._drain()

    @never_raise
    def _before_blocking(self) -> None:
        if get_ident() == self._thread:
            self._blocking += 1
            self._drain()

    def _first_drained(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(value: Any, *args: Any, **kwargs: Any) -> Any:
            if value.is_cuda:
                self._before_blocking()
            return original(value, *args, **kwargs)

        return call

    def _watch_modules(self) -> None:
        module = sys.modules["torch"].nn.Module
        original = module._call_impl

        @functools.wraps(original)
        def call(called: Any, *args: Any, **kwargs: Any) -> Any:
            self._module_begins()
            return original(called, *args, **kwargs)

        self._undo.append(replace_until(module, "_call_impl", call))

    @never_raise
    def _module_begins(self) -> None:
        self._modules += 1
        if self._modules % _MODULES == 0 and get_ident() == self._thread:
            self._drain()


def _in_order(roots: Iterable[Any]) -> list[Any]:
    """The nodes of the graph in about the order in which backward runs them."""
    nodes = list(_walk([root for root in roots if root is not None]))
    return sorted(nodes, key=lambda node: -node._sequence_nr())


def _walk(waiting: list[Any]) -> Iterator[Any]:
    """Without those that only accumulate gradients."""
    seen = set(waiting)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if not hasattr(node, "variable"):
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
