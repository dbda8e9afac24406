"""Runs a script's first two training steps with fake tensors: shapes only, no data, no device work.

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
from typing import TYPE_CHECKING, Any, NoReturn

from stepscope.measure.fake_surroundings import (
    always_step,
    import_from_texts,
    load_for_real,
    make_arrays_up,
    move_modules,
)
from stepscope.measure.line_watch import is_user_file
from stepscope.measure.made_up_values import NOT_READ, made_up_value
from stepscope.measure.no_side_effects import change_no_file
from stepscope.measure.optimizers import with_closure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """A script as the editor has it, and how it is started."""

    script: str
    texts: dict[str, str]  # of the script and of files that it imports, by resolved path
    arguments: list[str]
    cwd: str
    limit_s: float
    answer: str  # the file to write
    errors: str  # the file that gets what it prints on stderr


@dataclass(frozen=True, slots=True)
class FakeCall:
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

    calls: Counter[FakeCall] = field(default_factory=Counter)
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


def answer(request: FakeRequest) -> NoReturn:
    """Run the script, write what was found or why nothing was, and end this process."""
    to = os.open(request.answer, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    change_no_file()
    found: dict[str, Any] = {"failed": None}
    try:
        found |= run_fake(request).content()
    except BaseException as error:
        found["failed"] = _describe(error, request.script)
    finally:
        _write(to, json.dumps(found).encode())
        os._exit(0)  # whatever the script started goes with this process


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def run_fake(request: FakeRequest) -> FakeStep:
    """Raises what the script raises, and RuntimeError if it ends before its second step."""
    watched = _WatchedScript()
    sys.argv = [request.script, *request.arguments]
    sys.path.insert(0, str(Path(request.script).parent))
    import_from_texts(request.texts)
    code = compile(request.texts[request.script], request.script, "exec", dont_inherit=True)
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
        self._kept_now: Counter[tuple[str, int]] = Counter()  # bytes, in the present pass

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
        move_modules()
        always_step()
        make_arrays_up()
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        load_for_real(fake, self.given)
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
            self._pass_ends()
            if self._anchor is None and self._passes >= _PASSES_WITHOUT_OPTIMIZER:
                self._step_ends(())
            return result

        autograd._engine_run_backward = run

    def _pass_ends(self) -> None:
        """A backward pass frees what was kept for it: of several in a step, the largest counts."""
        self._passes += 1
        if self._kept_now.total() > self.step.kept.total():
            self.step.kept = self._kept_now
        self._kept_now = Counter()

    def _before_optimizer(self, _optimizer: Any, args: Any, kwargs: Any) -> Any:
        self._in_optimizer += 1
        return with_closure(args, kwargs, self._outside_optimizer)

    def _outside_optimizer(self, closure: Any) -> Any:
        """A closure holds forward and backward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            inside, self._in_optimizer = self._in_optimizer, 0
            try:
                return closure(*args, **kwargs)
            finally:
                self._in_optimizer = inside

        return run

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
            FakeCall(
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
                self._kept_now[line.file, line.line] += storage.nbytes()
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
            value = made_up_value(name, tensors)
            if value is not NOT_READ:
                return value
            if name == "aten::set_":  # a copied fake gets its storage back: it has none
                return args[0]
            result = func(*args, **(kwargs or {}))
            if not func.is_view and not name.startswith(_NO_WORK):
                script.called(name, tensors)
            return result

    return Recorder()


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
