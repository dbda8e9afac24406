"""Launch an array's step with less host work: torch.compile for its functions, a CUDA graph
for the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from stepscope.errors import UsageError
from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    from stepscope.fix.fuse.kernel_choice import Chooser
    from stepscope.fix.fuse.optimizer import ArrayOptimizer

# torch.compile for a function of an array, such as its loss.
#
#     loss_of = array.compile(lambda x, y: cross_entropy(array(x), y))
#     array.backward(loss_of(x, y))
#
# torch's compiler sees plain tensors only: all stacks and inputs go in as arguments, and the
# array's own code runs while the operations are recorded. What is recorded holds no Stacked any
# more.

_ROUNDS = "emulate_precision_casts"


class CompiledFunction:
    """Call it as the function itself, with the inputs that `array.apply_each` takes."""

    def __init__(
        self, array: CompilableArray, function: Callable[..., Any], options: dict[str, Any]
    ) -> None:
        self.array, self.function = array, function
        self.options = {"dynamic": False, **_rounding_as_eager(options)}
        self._recorded: dict[Any, _Recorded] = {}

    def __call__(self, *inputs: Any) -> Any:
        flat, shape = tree_flatten(self.array.arguments(inputs))
        places = [_Place.of(value) for value in flat]
        held = self.array.stacked_tensors()
        mode = self.array.training, self.array.changes
        key = (tuple(places), str(shape), mode, tuple(map(id, held)))
        if key not in self._recorded:
            self._recorded = {**self._recorded, key: _Recorded(self, places, shape, held)}
        return self._recorded[key](
            [_plain(value) for value in flat if isinstance(value, torch.Tensor)]
        )


def _rounding_as_eager(options: dict[str, Any]) -> dict[str, Any]:
    """torch.compile's options, with which compiled code rounds wherever eager code does.

    Without it, what backward computes again in bf16 may differ in the last digit from what forward
    compared with: no value equals the maximum any more, and its gradient is 0 / 0 (pytorch issue
    195214). PointNet trained to NaN so.
    """
    if options.get("backend", "inductor") != "inductor":
        return options
    from torch._inductor import config, list_mode_options

    if not hasattr(config, _ROUNDS):
        return options
    rest = {name: value for name, value in options.items() if name != "mode"}
    of_mode = list_mode_options(options["mode"]) if options.get("mode") else {}
    given = {_ROUNDS: True, **of_mode, **(options.get("options") or {})}
    return {**rest, "options": given}


class _Place(NamedTuple):
    """How an input or output is put together again from a plain tensor."""

    kind: str
    value: Any = None

    @classmethod
    def of(cls, value: Any) -> _Place:
        if isinstance(value, Stacked):
            return cls("common" if value.common is not None else value.order, value.count)
        return cls("tensor") if isinstance(value, torch.Tensor) else cls("value", value)

    def put(self, tensors: Iterator[torch.Tensor]) -> Any:
        if self.kind == "value":
            return self.value
        tensor = next(tensors)
        if self.kind == "tensor":
            return tensor
        if self.kind == "common":
            return Stacked.share(tensor, self.value)
        return Stacked(tensor, self.value, "front" if self.kind == "front" else "channel")


class _Recorded:
    """The function for one kind of inputs."""

    def __init__(
        self, owner: CompiledFunction, places: list[_Place], shape: Any, held: list[Stacked]
    ) -> None:
        self._owner, self._places, self._shape, self._held = owner, places, shape, held
        self._stacks = list({id(one.physical): one.physical for one in held}.values())
        self._out_places: list[_Place] = []
        self._out_shape: Any = None
        # The compiler takes it as one operation and records what it calls.
        operation = torch.compiler.allow_in_graph(self._run)
        self._compiled = torch.compile(lambda *tensors: operation(*tensors), **owner.options)

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        results = iter(self._compiled(*self._stacks, *tensors))
        values = [place.put(results) for place in self._out_places]
        return tree_unflatten(values, self._out_shape)

    def _run(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stacks, inputs = tensors[: len(self._stacks)], iter(tensors[len(self._stacks) :])
        with self._in_place_of(stacks):
            values = [place.put(inputs) for place in self._places]
            inner = tree_unflatten(values, self._shape)
            result = self._owner.array.apply_each(self._owner.function, *inner)
        flat, self._out_shape = tree_flatten(result)
        self._out_places = [_Place.of(value) for value in flat]
        return tuple(_plain(value) for value in flat if isinstance(value, torch.Tensor))

    @contextmanager
    def _in_place_of(self, stacks: tuple[torch.Tensor, ...]) -> Iterator[None]:
        """Meanwhile the array computes with these tensors instead of its own."""
        now = {id(own): given for own, given in zip(self._stacks, stacks, strict=True)}
        own = [one.physical for one in self._held]
        for one in self._held:
            one.physical = now[id(one.physical)]
        try:
            yield
        finally:
            for one, physical in zip(self._held, own, strict=True):
                one.physical = physical


def check_can_compile(together: bool) -> None:
    """Own streams of random numbers are set by the host, which no compiled code can do."""
    if not together:
        raise UsageError('a compiled function needs fuse(..., draws="together")')


# A whole training step of an array as one CUDA graph: the host launches once a step.
#
#     step = array.graph(train)          # train(x, y): forward, backward, array.step()
#     losses = step(x, y)
#
# The first calls run as they are, the next one is captured, and from then on the graph is replayed.
# Every call trains once. What schedulers change in between reaches the graph, because settings are
# columns on the device; where something changed that a graph cannot follow, it is captured again.

_FIRST_CALLS = 3  # libraries choose their kernels, and optimizers make their states


class CompilableArray(Protocol):
    """The part of an array that compiled and captured steps need."""

    training: bool
    changes: int
    optimizer: ArrayOptimizer | None
    chooser: Chooser

    def __len__(self) -> int: ...

    def apply_each(self, function: Callable[..., Any], *inputs: Any) -> Any: ...

    def arguments(self, inputs: tuple[Any, ...]) -> list[Any]: ...

    def stacked_tensors(self) -> list[Stacked]: ...

    def check_can_capture(self) -> None: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def zero_grad(self) -> None: ...


class CapturedStep:
    """Call it as the step itself; on a CPU it is the step itself."""

    def __init__(
        self,
        step: Callable[..., Any],
        arrays: Sequence[CompilableArray],
        device: torch.device | None = None,
    ) -> None:
        """`device`: where the step computes, for a step without arrays or inputs."""
        self._step, self._arrays = step, list(arrays)
        self._device = device
        self._graph: Any = None
        self._inputs: list[Any] = []
        self._outputs: Any = None
        self._held: Any = None
        self._calls = 0
        self._stream: Any = None
        for array in self._arrays:
            array.chooser.launches_count = False
            if array.optimizer is not None:
                array.optimizer.hold_on_device()

    def __call__(self, *inputs: Any) -> Any:
        """Return the step's result, without history; the next call overwrites it."""
        if not self._is_on_cuda(inputs):
            return _without_history(self._step(*inputs))
        held = self._prepare(inputs)
        if held != self._held:  # the models, the shapes or the settings' kinds changed
            self._held, self._graph, self._outputs, self._calls = held, None, None, 0
        self._calls += 1
        if self._calls <= _FIRST_CALLS:
            # On the stream that will capture: what autograd keeps belongs to one stream.
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                result = _without_history(self._step(*inputs))
            current.wait_stream(self._stream)
            return result
        if self._graph is None:
            self._capture(inputs)
        self._fill(inputs)
        self._graph.replay()
        return self._outputs

    def _is_on_cuda(self, inputs: Sequence[Any]) -> bool:
        flat, _ = tree_flatten(inputs)
        given = {one.device.type for one in flat if isinstance(one, torch.Tensor)}
        kinds = given | {stack.device.type for one in self._arrays for stack in one.parameters()}
        if self._device is not None:
            kinds.add(self._device.type)
        if "cuda" in kinds and given - {"cuda"}:
            raise UsageError("a captured step needs its inputs on the GPU. Move them there first")
        return "cuda" in kinds

    def _prepare(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Bring settings to the device; what the graph will hold and cannot change."""
        held: list[Any] = []
        for array in self._arrays:
            array.check_can_capture()
            held.append(array.changes)
            held.append(tuple(stack.data_ptr() for stack in array.parameters()))
            held.append(array.training)
            if array.optimizer is not None:
                if not array.optimizer.is_fused:
                    raise UsageError("this optimizer steps model by model, so no graph can hold it")
                array.optimizer.prepare()
                held.append(array.optimizer.held())
        flat, shape = tree_flatten(inputs)
        return (*held, *map(_kind, flat), str(shape))

    def _capture(self, inputs: Sequence[Any]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        flat, shape = tree_flatten(inputs)
        self._inputs = [_own_copy(one) for one in flat]
        for array in self._arrays:
            array.zero_grad()  # gradients get their place in the graph's own memory
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                result = _without_history(self._step(*tree_unflatten(self._inputs, shape)))
        except RuntimeError as error:
            raise UsageError(
                f"this step cannot be captured: {error}. Models that drop at random need "
                'fuse(..., draws="together"). A step must not read values from the GPU'
            ) from error
        self._graph, self._outputs = graph, result

    def _fill(self, inputs: Sequence[Any]) -> None:
        flat, _ = tree_flatten(inputs)
        for place, value in zip(self._inputs, flat, strict=True):
            if isinstance(value, torch.Tensor):
                _plain(place).copy_(_plain(value), non_blocking=True)


def _plain(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, Stacked):
        return value.physical if value.common is None else value.common
    return value


def _kind(value: Any) -> Any:
    """Return what a graph cannot change about an input."""
    if isinstance(value, Stacked):
        return value.count, value.order, value.common is None, _kind(_plain(value))
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device
    return value


def _own_copy(value: Any) -> Any:
    if isinstance(value, Stacked):
        if value.common is not None:
            return Stacked.share(value.common.clone(), value.count)
        return Stacked(value.physical.clone(), value.count, value.order)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _without_history(result: Any) -> Any:
    """Results must not keep the step's graph of operations alive."""

    def detached(value: Any) -> Any:
        if isinstance(value, Stacked):
            return Stacked(value.physical.detach(), value.count, value.order)
        return value.detach() if isinstance(value, torch.Tensor) else value

    return tree_map(detached, result)
