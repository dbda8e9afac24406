"""What the autograd graph keeps for backward, by module and by the user's line that created
the node, read from the graph itself.
"""

from __future__ import annotations

import functools
import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from stepscope.measure.memory.autograd_graph import (
    BackwardGraph,
    OperatorNode,
    describe,
    is_leaf,
    is_parameter,
    node_of,
    saved_by,
)
from stepscope.measure.memory.storages import Form, Key, TensorStorage, form_of, pieces, tensors_in
from stepscope.measure.patches import is_tracing, replace_until, surrounds
from stepscope.measure.source_lines import LineWatch, UserLine

# `saved_tensors_hooks` would be the obvious way, but changes the training: under default hooks
# PyTorch stops checking for in-place changes, hands custom functions other tensor objects than they
# saved (their attributes are gone), refuses torch.func and recompiles compiled code. Reading the
# nodes, from the outputs of the outermost modules and from the roots of every backward call,
# changes nothing.
#
# A node's sequence number says when it was created, and so inside which module. Nodes created while
# the script's own hooks are active (checkpointing, offloading) are not opened: that would run them.

_MOST_CALLS = 32  # of outermost modules that differ, and of their tensors
OUTSIDE = 0  # the module id of work that no module does


@dataclass(slots=True)
class Saved:
    """One storage that the graph holds."""

    size_bytes: int
    alive: StorageWeakRef
    number: int  # of the first node that saved it
    module: int  # that created this node
    tensors: int
    seen_at: int
    counted: bool = False  # as an activation
    made: int | None = None  # number of the node that made it; None: a leaf


@dataclass(slots=True)
class ThreadHistory:
    """One thread's sequence numbers: which module ran when, and when the script had hooks."""

    first: int
    starts: list[int] = field(default_factory=list)
    modules: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    hooked_from: list[int] = field(default_factory=list)
    hooked_to: list[int | None] = field(default_factory=list)
    depth: int = 0  # of hooks
    forward: bool = True  # not a thread that autograd runs backward in
    walked: set[int] = field(default_factory=set)

    def mark(self, number: int) -> None:
        """From this number on, the innermost running module creates the nodes."""
        self.starts.append(number)
        self.modules.append(self.running[-1] if self.running else OUTSIDE)

    def module_of(self, number: int) -> int:
        place = bisect_right(self.starts, number) - 1
        return self.modules[place] if place >= 0 else OUTSIDE

    def hooks(self, active: bool, number: int) -> None:
        is_open = bool(self.hooked_to) and self.hooked_to[-1] is None
        if active and not is_open:
            self.hooked_from.append(number)
            self.hooked_to.append(None)
        elif is_open and not active:
            self.hooked_to[-1] = number

    def is_hooked(self, number: int) -> bool:
        place = bisect_right(self.hooked_from, number) - 1
        if place < 0:
            return False
        end = self.hooked_to[place]
        return end is None or number < end


class SavedTensors:
    """Watches one step; calls `on_backward` before every backward pass, with the complete graph."""

    def __init__(
        self,
        notes: set[str],
        *,
        on_root: Callable[[Any], None],
        on_backward: Callable[[Sequence[Any]], None],
        now: Callable[[], int] = lambda: 0,
    ) -> None:
        self.records: dict[Key, Saved] = {}
        self.inputs: dict[Key, Saved] = {}
        self.given: list[tuple[Key, Saved]] = []  # every input of the step
        self.given_forms: set[Form] = set()
        # What outermost modules were called with: (class, shapes), as often as it came.
        self.calls: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
        self.leaves: set[int] = set()
        self.nodes: dict[int, OperatorNode] = {}  # by number
        self.seen: list[tuple[Key, Saved]] = []  # every storage, even if freed since
        self._notes = notes
        self._on_root, self._on_backward, self._now = on_root, on_backward, now
        self._lock = threading.RLock()
        self._timelines: dict[int, ThreadHistory] = {}
        self._kept: dict[int, Any] = {}  # modules that ran: their ids stay unique while they live
        self._undo: list[Callable[[], object]] = []
        self._backward_depth = 0
        self._main = threading.get_ident()
        self._on = False
        self._tick = 0

    # installing and removing

    def install(self, *, modules: bool) -> None:
        """Begin to watch; without `modules`, only backward passes are seen."""
        self._main = threading.get_ident()
        line = self._timeline()
        line.depth = int(_script_has_hooks())
        line.hooks(line.depth > 0, line.first)
        self._on = True
        self._patch(torch.autograd, "_engine_run_backward", self._around_backward)
        for name, by in (("push", 1), ("pop", -1)):
            around = functools.partial(self._around_hooks, by=by)
            self._patch(torch._C._autograd, f"_{name}_saved_tensors_default_hooks", around)
        if modules:
            hooks = torch.nn.modules.module
            entering = hooks.register_module_forward_pre_hook(self._enters)
            self._undo.append(entering.remove)
            leaving = hooks.register_module_forward_hook(
                self._leaves, with_kwargs=True, always_call=True
            )

            def undo() -> None:
                leaving.remove()
                # torch forgets to remove this one, and would warn about global hooks ever after.
                hooks._global_forward_hooks_with_kwargs.pop(leaving.id, None)

            self._undo.append(undo)
        elif (compiled := sys.modules.get("torch._dynamo.eval_frame")) is not None:
            # Outside compiled code, so nothing is guarded on it.
            around = self._around_compiled(compiled.OptimizedModule.__call__)
            self._undo.append(replace_until(compiled.OptimizedModule, "__call__", around))

    def remove(self) -> None:
        self._on = False
        while self._undo:
            self._undo.pop()()
        for held in (self._timelines, self._kept, self.records, self.inputs):
            held.clear()

    def _patch(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """A script that wraps ours meanwhile keeps its wrapper; ours inside it is inert."""
        self._undo.append(replace_until(owner, name, around(getattr(owner, name))))

    # what is seen

    def _around_compiled(self, original: Any) -> Any:
        @surrounds
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._on and not is_tracing():
                try:
                    self._notice_call(getattr(module, "_orig_mod", module), (args, kwargs))
                except Exception as error:
                    self._failed("reading the inputs", error)
            return original(module, *args, **kwargs)

        return call

    def _around_backward(self, original: Any) -> Any:
        @surrounds
        @functools.wraps(original)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._on or is_tracing():
                return original(outputs, *args, **kwargs)
            try:
                roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
                self.read(roots)
                self._on_backward(roots)
            except Exception as error:
                self._failed("reading the graph", error)
            self._backward_depth += 1
            try:
                return original(outputs, *args, **kwargs)
            finally:
                self._backward_depth -= 1

        return run

    def _around_hooks(self, original: Any, by: int) -> Any:
        def push_or_pop(*args: Any) -> Any:
            result = original(*args)
            self._hooks_changed(by)
            return result

        return push_or_pop

    def _hooks_changed(self, by: int) -> None:
        if is_compiling() or not self._on:
            return
        try:
            line = self._timeline()
            line.depth += by
            line.hooks(line.depth > 0 or _script_has_hooks(), _sequence_number())
            self._notes.add(
                "the script uses saved-tensor hooks (checkpointing, offloading): what is saved or "
                "recomputed under them is not counted as activations"
            )
        except Exception as error:
            self._failed("following the script's hooks", error)

    def _enters(self, module: Any, args: Any) -> None:
        del args
        if is_compiling() or not self._on:
            return
        try:
            line = self._timeline()
            if not line.running and not self._backward_depth:
                self._on_root(module)
            self._kept[id(module)] = module
            line.running.append(id(module))
            line.mark(_sequence_number())
        except Exception as error:
            self._failed("entering a module", error)

    def _leaves(self, module: Any, *passed: Any) -> None:
        """Called with kwargs, except where forward raised."""
        if is_compiling() or not self._on:
            return
        try:
            line = self._timeline()
            while line.running and line.running.pop() != id(module):
                pass  # a module in between was interrupted
            line.mark(_sequence_number())
            if not line.running and len(passed) == 3:
                self._tick = self._now()
                self._notice_inputs(passed[:2])
                self._notice_call(module, passed[:2])
                self.read(tensors_in(passed[2]))
        except Exception as error:
            self._failed("leaving a module", error)

    def _notice_call(self, module: Any, arguments: Any) -> None:
        """Without what another module made: its shapes say less about the batch."""
        tensors = tensors_in(arguments)
        shapes = tuple(tuple(one.shape) for one in tensors if one.dim() and one.grad_fn is None)
        if shapes and len(self.calls) < _MOST_CALLS:
            self.calls[type(module).__name__, shapes[:_MOST_CALLS]] += 1

    def _notice_inputs(self, arguments: Any) -> None:
        """The batch, not an activation: passed to an outermost module, computed by no forward."""
        for tensor in tensors_in(arguments):
            if tensor.requires_grad:
                continue
            for piece in pieces(tensor, self._notes):
                if any(_current(known, piece.key) for known in (self.records, self.inputs)):
                    continue
                self.inputs[piece.key] = self._new(piece, 0, OUTSIDE)
                self.given.append((piece.key, self.inputs[piece.key]))
                self.given_forms.add(form_of(tensor))

    # reading the graph

    def read(self, outputs: Iterable[Any]) -> None:
        """Record every storage that the graph of these tensors holds."""
        if torch._C._are_functorch_transforms_active():
            self._notes.add("torch.func transforms ran: the tensors they saved are not counted")
            return
        with self._lock:
            self._tick = self._now()
            line = self._timeline()
            todo = [node_of(output) for output in outputs]
            met: dict[int, Any] = {}  # a wrapper's id is unique only while it lives
            while todo:
                node = todo.pop()
                if node is None or id(node) in met:
                    continue
                met[id(node)] = node
                if is_leaf(node):
                    self.leaves.add(id(node.variable))
                    continue
                number = node._sequence_nr()
                if number < line.first or number in line.walked:
                    continue  # older than this step, or known
                line.walked.add(number)
                self.nodes[number] = describe(node)
                todo.extend(following for following, _ in node.next_functions)
                if not self._is_hooked(line, number):
                    self._open(node, number, line.module_of(number))

    def record_graph(self, outputs: Sequence[Any], states: Iterable[Key]) -> BackwardGraph | None:
        """All nodes that a backward pass from these tensors would run; `states` are the storages of
        parameters, gradients and the like. None inside of torch.func, whose tensors have none."""
        if torch._C._are_functorch_transforms_active():
            return None
        graph = BackwardGraph(states, self.inputs, self._notes)
        with self._lock:
            line = self._timeline()
            for node in graph.walk(outputs, first=line.first):
                number = node._sequence_nr()
                module = None if self._is_hooked(line, number) else line.module_of(number)
                graph.add(node, module)
        graph.forget()
        return graph

    def _is_hooked(self, line: ThreadHistory, number: int) -> bool:
        """Also by another thread's hooks: its forward (DataParallel) shares our numbers."""
        if line.is_hooked(number):
            return True
        others = [other for other in self._timelines.values() if other is not line]
        return any(other.forward and other.is_hooked(number) for other in others)

    def _open(self, node: Any, number: int, module: int) -> None:
        for _, tensor in saved_by(node, self._notes):
            if is_parameter(tensor):
                continue
            for piece in pieces(tensor, self._notes):
                known = _current(self.records, piece.key)
                if known is not None:
                    known.tensors += 1
                    if number < known.number:
                        known.number, known.module = number, module
                elif _current(self.inputs, piece.key) is None:
                    self.records[piece.key] = self._new(piece, number, module)
                    if tensor.grad_fn is not None:
                        self.records[piece.key].made = tensor.grad_fn._sequence_nr()
                    self.seen.append((piece.key, self.records[piece.key]))

    def _new(self, piece: TensorStorage, number: int, module: int) -> Saved:
        return Saved(
            size_bytes=piece.size_bytes,
            alive=StorageWeakRef(piece.storage),
            number=number,
            module=module,
            tensors=1,
            seen_at=self._tick,
        )

    def live(self) -> dict[Key, Saved]:
        with self._lock:
            return {
                key: saved for key in list(self.records) if (saved := _current(self.records, key))
            }

    def _timeline(self) -> ThreadHistory:
        ident = threading.get_ident()
        line = self._timelines.get(ident)
        if line is None:
            # Only the training thread can hold graphs from before this step.
            first = _sequence_number() if ident == self._main else 0
            line = ThreadHistory(first, forward=not self._backward_depth)
            self._timelines[ident] = line
        return line

    def _failed(self, where: str, error: Exception) -> None:
        self._notes.add(f"{where}: {type(error).__name__}: {error}")


def _current(records: dict[Key, Saved], key: Key) -> Saved | None:
    """The record of this storage, unless another storage had its address before."""
    known = records.get(key)
    if known is not None and known.alive.expired():
        del records[key]
        return None
    return known


def _sequence_number() -> int:
    """The number of the next node that this thread creates."""
    return int(torch.autograd._get_sequence_nr())


def _script_has_hooks() -> bool:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(False) is not None


# Which line of the user's code created which node of the autograd graph, in the memory step.


class LineHistory:
    """From each sequence number on, the line that creates the nodes; None: no line does."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._lines: list[UserLine | None] = []
        self._open: list[UserLine] = []
        self.watch = LineWatch(self._enter)

    def _enter(self, line: UserLine, running: bool) -> Callable[[], None]:
        del running
        self._open.append(line)
        self._note()
        return self._leave

    def _leave(self) -> None:
        self._open.pop()
        self._note()

    def _note(self) -> None:
        self._starts.append(int(torch.autograd._get_sequence_nr()))
        self._lines.append(self.running)

    @property
    def running(self) -> UserLine | None:
        """The innermost line that runs now."""
        return self._open[-1] if self._open else None

    def line_of(self, number: int) -> UserLine | None:
        place = bisect_right(self._starts, number) - 1
        return self._lines[place] if place >= 0 else None

    def bytes_by_line(self, saved: Iterable[Saved]) -> dict[UserLine, tuple[int, int]]:
        """Bytes and tensors that each line's nodes keep."""
        sums: dict[UserLine, tuple[int, int]] = {}
        for one in saved:
            line = self.line_of(one.number)
            if line is not None:
                size, tensors = sums.get(line, (0, 0))
                sums[line] = (size + one.size_bytes, tensors + one.tensors)
        return sums
