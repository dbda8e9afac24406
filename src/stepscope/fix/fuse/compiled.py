"""torch.compile for a function of an array, such as its loss.

    loss_of = array.compile(lambda x, y: cross_entropy(array(x), y))
    array.backward(loss_of(x, y))

torch's compiler sees plain tensors only: all stacks and inputs go in as arguments, and the array's
own code runs while the operations are recorded. What is recorded holds no Stacked any more.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from stepscope.errors import UsageError
from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROUNDS = "emulate_precision_casts"


class CompilableArray(Protocol):
    """What the compiler needs of an array."""

    training: bool
    changes: int

    def __len__(self) -> int: ...

    def apply_each(self, function: Callable[..., Any], *inputs: Any) -> Any: ...

    def arguments(self, inputs: tuple[Any, ...]) -> list[Any]: ...

    def stacked_tensors(self) -> list[Stacked]: ...


class CompiledFunction:
    """Call it as the function itself, with the inputs that `array.apply_each` takes."""

    def __init__(
        self, array: CompilableArray, function: Callable[..., Any], options: dict[str, Any]
    ) -> None:
        self._array, self._function = array, function
        self._options = {"dynamic": False, **_rounding_as_eager(options)}
        self._known: dict[Any, _Recorded] = {}

    def __call__(self, *inputs: Any) -> Any:
        flat, shape = tree_flatten(self._array.arguments(inputs))
        places = [_Place.of(value) for value in flat]
        held = self._array.stacked_tensors()
        mode = self._array.training, self._array.changes
        key = (tuple(places), str(shape), mode, tuple(map(id, held)))
        if key not in self._known:
            self._known = {**self._known, key: _Recorded(self, places, shape, held)}
        tensors = [_Place.tensor(value) for value in flat if isinstance(value, torch.Tensor)]
        return self._known[key](tensors)

    def record(self, inputs: list[Any]) -> Any:
        return self._array.apply_each(self._function, *inputs)

    def compile(self, run: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(run, **self._options)
        return compiled


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


class _Place:
    """How an input or output is put together again from a plain tensor."""

    def __init__(self, kind: str, value: Any = None) -> None:
        self.kind, self.value = kind, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and (self.kind, self.value) == (other.kind, other.value)

    def __hash__(self) -> int:
        return hash((self.kind, self.value))

    @classmethod
    def of(cls, value: Any) -> _Place:
        if isinstance(value, Stacked):
            return cls("common" if value.common is not None else value.order, value.count)
        if isinstance(value, torch.Tensor):
            return cls("tensor")
        return cls("value", value)

    @staticmethod
    def tensor(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, Stacked):
            return value.physical if value.common is None else value.common
        return value

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
        self._compiled = owner.compile(lambda *tensors: operation(*tensors))

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        results = iter(self._compiled(*self._stacks, *tensors))
        values = [place.put(results) for place in self._out_places]
        return tree_unflatten(values, self._out_shape)

    def _run(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stacks, inputs = tensors[: len(self._stacks)], iter(tensors[len(self._stacks) :])
        with self._in_place_of(stacks):
            values = [place.put(inputs) for place in self._places]
            result = self._owner.record(tree_unflatten(values, self._shape))
        flat, self._out_shape = tree_flatten(result)
        self._out_places = [_Place.of(value) for value in flat]
        return tuple(_Place.tensor(value) for value in flat if isinstance(value, torch.Tensor))

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
