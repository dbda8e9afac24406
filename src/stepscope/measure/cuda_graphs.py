"""Whether a CUDA graph is being captured, so that nothing of ours touches the device
meanwhile; and the operators that each capture recorded (graphs.jsonl).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from stepscope.measure.folder import GRAPHS
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.patches import has_compiled, when_imported, wrap
from stepscope.measure.writer import packed_text, try_append

# While a graph is captured, CUDA refuses many calls of every thread, even whether an event has
# happened, and the capture fails with them. `is_current_stream_capturing` knows one stream of one
# thread. So whatever of ours touches the device asks here first. Threads beside the training keep
# captures waiting meanwhile, so that none begins between their question and their call.
#
# Calls of make_graphed_callables count as a whole: the passes before its captures train nothing.

_LONGEST_S = 1.0  # that a capture waits for a call of ours, which takes microseconds


class CaptureGate:
    """Told of captures by hooks.py."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A graph whose capture was never ended is no longer captured when nobody holds it.
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forked)

    def begin(self, graph: Any) -> None:
        """Call before the capture begins."""
        held = self._lock.acquire(timeout=_LONGEST_S)
        self._graphs.add(graph)
        if held:
            self._lock.release()

    def end(self, graph: Any) -> None:
        """Call after the capture has ended or failed."""
        self._graphs.discard(graph)

    @property
    def is_capturing(self) -> bool:
        """Whether any thread captures."""
        return len(self._graphs) > 0

    def lets_through(self) -> bool:
        """In the training thread, once CUDA is initialised: whether the device may be touched."""
        if self.is_capturing:
            return False
        return not sys.modules["torch"].cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[bool]:
        """In other threads: whether the device may be touched. No capture begins inside."""
        with self._lock:
            yield not self.is_capturing

    def _forked(self) -> None:
        self._lock = threading.Lock()


gate = CaptureGate()


# graphs.jsonl: the operators of every CUDA graph, in the order in which its capture recorded them.
#
# A replay launches kernels without operators. What made them is seen only once, while the graph is
# captured inside `torch.cuda.graph`, by the script or by make_graphed_callables. A dispatch mode
# notes each operator's name, arguments and source line there, as values of Python: it reads no
# memory, allocates nothing on the device and never waits for it. The compiler captures its own
# graphs: their operators are in compiler.jsonl, and no mode is put around them. Compiled functions
# inside a capture of the script's run as they are: the mode sees the library's calls of their code.
# Versions of torch that would run them uncompiled below a mode record nothing once something was
# compiled.

MOST_CAPTURES = 256  # compiled code of many shapes has many
MOST_OPERATORS = 200_000  # of one capture
_MOST_TEXT = 200  # of a plain value
_COMPILERS = "cudagraph_trees.py"
_MODE = "_stepscope_records"  # attribute of a `torch.cuda.graph` while it captures

Row = tuple[str, list[Any], list[str], list[str], bool]
Where = tuple[str, int, str]  # file, line, function
_MOST_DEPTH = 200


class CaptureRows:
    """What one capture recorded, in order."""

    def __init__(self) -> None:
        self.operators: list[Row] = []
        self.places: list[Where | None] = []
        self.in_optimizer: list[bool] = []


class GraphCaptures:
    """Collects until there is a rank folder to write to."""

    def __init__(self) -> None:
        self._finished: list[CaptureRows] = []
        self._count = 0
        self._forward: dict[int, Where] = {}  # autograd's number of a forward operator: its line
        self._lock = threading.Lock()
        self.is_wanted = True  # without a trace nothing could be joined to the operators

    def attach(self) -> None:
        when_imported("torch.cuda.graphs", self._watch)

    def _watch(self, module: Any) -> None:
        capture: Any = getattr(module, "graph", None)
        if not hasattr(capture, "__enter__") or not hasattr(capture, "__exit__"):
            note("graph captures", "this version of torch captures graphs in another way")
            return
        enter, leave = capture.__enter__, capture.__exit__

        def entered(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = enter(graph, *args, **kwargs)
            if not sys._getframe(1).f_code.co_filename.endswith(_COMPILERS):
                self._begin(graph)
            return result

        def left(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._end(graph, failed=any(args))
            return leave(graph, *args, **kwargs)

        wrap(capture, "__enter__", entered)
        wrap(capture, "__exit__", left)

    @never_raise
    def _begin(self, graph: Any) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        if not self.is_wanted or self._count >= MOST_CAPTURES:
            return
        if has_compiled() and not hasattr(TorchDispatchMode, "ignore_compile_internals"):
            return  # this version of torch runs compiled functions uncompiled below any mode
        self._count += 1
        rows = CaptureRows()
        mode = _recorder(rows, self._forward)
        mode.__enter__()
        setattr(graph, _MODE, (mode, rows))

    @never_raise
    def _end(self, graph: Any, *, failed: bool) -> None:
        """A capture that failed is never replayed."""
        recorded = vars(graph).pop(_MODE, None)
        if recorded is None:
            return
        mode, rows = recorded
        mode.__exit__(None, None, None)
        if rows.operators and not failed:
            with self._lock:
                self._finished.append(rows)

    @never_raise
    def write(self, folder: Path) -> None:
        """Append what is new, in the writer's thread."""
        with self._lock:
            finished, self._finished = self._finished, []
        if not finished or not self.is_wanted:
            return
        try_append(folder / GRAPHS, map(_packed, finished))


def _recorder(rows: CaptureRows, forward: dict[int, Where]) -> Any:
    """A mode that notes operators and changes nothing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    in_backward = getattr(torch._C, "_current_autograd_node", lambda: None)

    class RecordOperators(TorchDispatchMode):  # type: ignore[misc]
        supports_higher_order_operators = True  # they run as without a mode

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Dynamo runs compiled functions uncompiled below a mode that does not say so."""
            return True

        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            if len(rows.operators) < MOST_OPERATORS:
                node = in_backward()
                _add_row(rows.operators, func, args, kwargs, node is not None)
                _add_place(rows, forward, node)
            return result

    return RecordOperators()


@never_raise
def _add_row(
    rows: list[Row], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool
) -> None:
    """Arguments by place, as the profiler describes them."""
    import torch

    schema = getattr(func, "_schema", None)
    values = list(args)
    if schema is not None:
        values += [kwargs.get(one.name, one.default_value) for one in schema.arguments[len(args) :]]
    shapes, dtypes, concrete = [], [], []
    for value in values:
        shape: list[Any] = []
        dtype, text = "", ""
        if isinstance(value, torch.Tensor):
            shape, dtype = list(map(int, value.shape)), str(value.dtype).removeprefix("torch.")
        elif isinstance(value, list | tuple) and any(isinstance(it, torch.Tensor) for it in value):
            # Never its text: to print a tensor waits for the device, which ends the capture.
            shape = [list(map(int, one.shape)) for one in value if isinstance(one, torch.Tensor)]
            dtype = "TensorList"
        elif value is not None:
            dtype = "ScalarList" if isinstance(value, list | tuple) else "Scalar"
            text = str(value)[:_MOST_TEXT]
        shapes.append(shape)
        dtypes.append(dtype)
        concrete.append(text)
    name = schema.name if schema is not None else getattr(func, "__name__", str(func))
    rows.append((name, shapes, dtypes, concrete, backward))


@never_raise
def _add_place(rows: CaptureRows, forward: dict[int, Where], node: Any) -> None:
    """Backward operators have the line of the forward operator with their node's number."""
    missing = len(rows.operators) - len(rows.places)
    if missing != 1:  # the operator could not be described
        return
    rows.places.append(None)
    rows.in_optimizer.append(False)
    if node is not None:
        rows.places[-1] = forward.get(node._sequence_nr())
        return
    frame, rows.in_optimizer[-1] = outside_torch(sys._getframe(1))
    if frame is None:
        return
    place = rows.places[-1] = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
    if len(forward) < MOST_OPERATORS:
        # Of the node that autograd made last: an operator's own is made before it runs.
        import torch

        following = getattr(torch.autograd, "_get_sequence_nr", None)
        if following is not None:
            forward.setdefault(following() - 1, place)


def outside_torch(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """The innermost frame that is neither torch's nor ours, and whether an optimizer's step lies in
    between."""
    torchs, optimizers, ours = _library_folders()
    in_optimizer = False
    for _ in range(_MOST_DEPTH):
        if frame is None:
            break
        file = frame.f_code.co_filename
        in_optimizer = in_optimizer or file.startswith(optimizers)
        if not file.startswith((torchs, ours, "<")):
            return frame, in_optimizer
        frame = frame.f_back
    return None, in_optimizer


@functools.cache
def _library_folders() -> tuple[str, str, str]:
    """Of torch, of its optimizers, and our own."""
    import torch

    folder = str(torch.__file__).rpartition(os.sep)[0] + os.sep
    return folder, f"{folder}optim{os.sep}", __file__.rpartition(os.sep)[0] + os.sep


def _packed(rows: CaptureRows) -> dict[str, Any]:
    places = {place: number for number, place in enumerate(dict.fromkeys(rows.places))}
    where = {
        "places": list(places),
        "at": [places[place] for place in rows.places],
        "optimizer": rows.in_optimizer,
    }
    return {
        "what": "capture",
        "count": len(rows.operators),
        "operators": packed_text(rows.operators),
        "where": packed_text(where),
    }
