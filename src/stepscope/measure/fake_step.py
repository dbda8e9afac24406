"""Runs a script's first two training steps with fake tensors: shapes only, no data, no device work.

python -c "...; main()" < request   (JSON; see FakeRequest); the answer goes to its own file

The second step's operators are counted by the line of the user's code that they belong to; the
first one creates the optimizer's state. Nothing is computed, so values that the script reads are
made up, and a script whose shapes depend on values cannot be run so.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.measure.line_watch import is_user_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stepscope.measure.line_watch import UserLine

# As the profiler writes them.
_DTYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "int64": "long int",
    "int32": "int",
    "int16": "short",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "bool",
}
_NO_WORK = ("prim::", "profiler::")
_PASSES_WITHOUT_OPTIMIZER = 8
_MADE_UP = {"aten::equal": True, "aten::is_nonzero": False}
_IN_THIS_PROCESS = {
    "num_workers": 0,
    "pin_memory": False,
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "timeout": 0,
}


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """A script as the editor has it, and how it is started."""

    script: str
    text: str
    arguments: list[str]
    answer: str  # the file to write


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator, its tensors and the line that it belongs to."""

    file: str
    line: int
    function: str
    phase: str  # forward, backward or optimizer
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(slots=True)
class FakeStep:
    """What one step consists of."""

    calls: Counter[OperatorCall] = field(default_factory=Counter)
    kept: Counter[tuple[str, int]] = field(default_factory=Counter)  # bytes, by file and line
    parameter_bytes: int = 0

    def content(self) -> dict[str, Any]:
        return {
            "calls": [{**asdict(call), "count": count} for call, count in self.calls.items()],
            "kept": [[file, line, size] for (file, line), size in self.kept.items()],
            "parameter_bytes": self.parameter_bytes,
        }


class _SeenEnough(BaseException):
    """Ends the script; no Exception, so that the script does not catch it."""


def main() -> None:
    request = FakeRequest(**json.load(sys.stdin))
    answer: dict[str, Any] = {"failed": None}
    try:
        answer |= run_fake(request).content()
    except BaseException as error:
        answer["failed"] = _describe(error, request.script)
    finally:
        Path(request.answer).write_text(json.dumps(answer))
        sys.stdout.flush()
        os._exit(0)  # whatever the script started goes with this process


def run_fake(request: FakeRequest) -> FakeStep:
    """Raises what the script raises, and RuntimeError if it ends before its second step."""
    watched = _WatchedScript()
    sys.argv = [request.script, *request.arguments]
    sys.path.insert(0, str(Path(request.script).parent))
    code = compile(request.text, request.script, "exec")
    with watched.faked():
        main_module = runpy._TempModule("__main__")
        with contextlib.suppress(_SeenEnough), main_module as module:
            namespace = module.module.__dict__
            namespace |= {"__file__": request.script, "__builtins__": __builtins__}
            exec(code, namespace)
    if not watched.finished:
        raise RuntimeError(f"the script ended after {watched.steps} training steps: two are needed")
    return watched.step


class _WatchedScript:
    """Follows the script to the end of its second step."""

    def __init__(self) -> None:
        from stepscope.measure.line_history import LineHistory

        self.step = FakeStep()
        self.steps = 0
        self.finished = False
        self._lines = LineHistory()
        self._anchor: Any = None  # the optimizer that ends steps
        self._passes = 0
        self._in_optimizer = 0
        self._kept: dict[int, Any] = {}  # storages, held so that none gets another's address

    @contextlib.contextmanager
    def faked(self) -> Iterator[None]:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
        from torch.optim import optimizer as optimizers
        from torch.utils import _foreach_utils

        for types in (
            optimizers._foreach_supported_types,
            _foreach_utils._foreach_supported_types,
        ):
            types.append(FakeTensor)
        optimizers.register_optimizer_step_pre_hook(self._before_optimizer)
        optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        self._watch_passes(torch.autograd)
        _move_modules()
        _always_step()
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        _load_for_real(fake, self.given)
        with fake, _recorder(self), torch.autograd.graph.saved_tensors_hooks(self._pack, _same):
            try:
                yield
            finally:
                self._lines.watch.end()

    def _watch_passes(self, autograd: Any) -> None:
        """A script without a torch optimizer takes a step after each backward pass."""
        run_backward = autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            result = run_backward(*args, **kwargs)
            self._passes += 1
            if self._anchor is None and self._passes >= _PASSES_WITHOUT_OPTIMIZER:
                self._step_ends(())
            return result

        autograd._engine_run_backward = run

    def _before_optimizer(self, *_: Any) -> None:
        self._in_optimizer += 1

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._in_optimizer -= 1
        if self._anchor is None:
            self._anchor = optimizer
        if optimizer is self._anchor:
            self._step_ends([p for group in optimizer.param_groups for p in group["params"]])

    def _step_ends(self, parameters: Iterable[Any]) -> None:
        self.steps += 1
        if self.steps == 1:
            self._lines.watch.begin()
            return
        self._lines.watch.end()
        self.step.parameter_bytes = sum(parameter.nbytes for parameter in parameters)
        self.finished = True
        raise _SeenEnough

    def given(self, tensor: Any) -> None:
        """Part of a batch: the data loader made it, no line keeps it."""
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = storage

    def called(self, name: str, tensors: list[Any]) -> None:
        """An operator ran, with these tensors."""
        if self.steps != 1:
            return
        phase, line = self._where()
        if line is None:
            return
        self.step.calls[
            OperatorCall(
                file=line.file,
                line=line.line,
                function=line.function,
                phase=phase,
                name=name,
                shapes=tuple(tuple(map(int, tensor.shape)) for tensor in tensors),
                dtypes=tuple(_dtype(tensor) for tensor in tensors),
            )
        ] += 1

    def _where(self) -> tuple[str, UserLine | None]:
        import torch

        running = self._lines.running
        if self._in_optimizer:
            return "optimizer", running
        node = torch._C._current_autograd_node()
        if node is None:
            return "forward", running
        made_by = self._lines.line_of(node._sequence_nr())
        return "backward", made_by or running

    def _pack(self, tensor: Any) -> Any:
        import torch

        line = self._lines.running
        if self.steps == 1 and line is not None and not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            base = tensor._base
            if storage._cdata not in self._kept and not isinstance(base, torch.nn.Parameter):
                self._kept[storage._cdata] = storage
                self.step.kept[line.file, line.line] += storage.nbytes()
        return tensor


def _same(tensor: Any) -> Any:
    return tensor


def _recorder(script: _WatchedScript) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[misc]
        """Counts operators and makes up the values that the script reads."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func._schema.name
            tensors = list(_tensors((args, kwargs or {})))
            if name == "aten::_local_scalar_dense":
                return _made_up(tensors[0])
            if name in _MADE_UP:
                return _MADE_UP[name]
            result = func(*args, **(kwargs or {}))
            if not func.is_view and not name.startswith(_NO_WORK):
                script.called(name, tensors)
            return result

    return Recorder()


def _made_up(tensor: Any) -> Any:
    """No test holds, and every number is one: optimizers divide by what they count."""
    if str(tensor.dtype) == "torch.bool":
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1


def _tensors(value: Any) -> Iterator[Any]:
    """In the order of the arguments, lists opened."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def _load_for_real(fake: Any, given: Callable[[Any], None]) -> None:
    """Data loaders work with real numbers, in this process; their batches become fake."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_map
    from torch.utils.data import dataloader

    owner, loader = dataloader._BaseDataLoaderIter, dataloader.DataLoader
    following, begin, create = owner.__next__, loader.__iter__, loader.__init__

    def to_fake(value: Any) -> Any:
        if not hasattr(value, "untyped_storage"):
            return value
        tensor = value if isinstance(value, FakeTensor) else fake.from_tensor(value)
        given(tensor)
        return tensor

    def next_batch(self: Any) -> Any:
        with _disable_current_modes():
            batch = following(self)
        return tree_map(to_fake, batch)

    def iterate(self: Any) -> Any:
        with _disable_current_modes():
            return begin(self)

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **{name: _IN_THIS_PROCESS.get(name, kwargs[name]) for name in kwargs})

    owner.__next__ = next_batch
    loader.__iter__ = iterate
    loader.__init__ = initialise


def _move_modules() -> None:
    """As Module.to, which cannot move fake parameters; shared ones stay shared."""
    from torch import nn

    moved: dict[int, tuple[Any, Any]] = {}  # by the old one, which is held so that its id stays
    depth = 0  # of modules in modules: `moved` is of one outermost call

    def move(old: Any, change: Any) -> Any:
        if id(old) not in moved:
            new = change(old.detach())
            same = new.device == old.device and new.dtype == old.dtype
            parameter = old if same else nn.Parameter(new, old.requires_grad)
            moved[id(old)] = (old, parameter)
        return moved[id(old)][1]

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        nonlocal depth
        depth += 1
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = move(parameter, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        depth -= 1
        if not depth:
            moved.clear()
        return self

    nn.Module._apply = apply


def _always_step() -> None:
    """A GradScaler would skip the step: it reads a made-up number of infinities."""
    from torch.amp.grad_scaler import GradScaler

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        del self, state
        return optimizer.step(*args, **kwargs)

    GradScaler._maybe_opt_step = step


def _describe(error: BaseException, script: str) -> str:
    """The error, and the user's line that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_user_file(frame.filename)]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    if isinstance(error, SystemExit):
        return f"{Path(script).name} ended with exit code {error.code}{where}"
    first = str(error).strip().splitlines()
    said = f": {first[0]}" if first else ""
    return f"{type(error).__name__}{said}{where}"
