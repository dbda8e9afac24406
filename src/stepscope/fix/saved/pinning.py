"""Follows a plan once with every operator watched, and writes down what later passes need.

The tables of this pass go to pin_plan.py when it is over.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stepscope.fix.saved.encodings import Geometry
from stepscope.fix.saved.follower import FollowedPlan, Held, PlanFollower
from stepscope.fix.saved.hook_pauses import ModuleBoundary, PassPlace
from stepscope.fix.saved.node_patterns import ACCUMULATE, below_views, nodes_made
from stepscope.fix.saved.normalised_again import needed_again
from stepscope.fix.saved.operators import is_plain, repeatable_arguments, tensors_in

if TYPE_CHECKING:
    from stepscope.fix.saved.hook_pauses import ModuleCall
    from stepscope.fix.saved.replay import RepeatableCall

Content = tuple[int, int]  # a storage between two writes: its address and version


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """An argument, a saved tensor or a module's result."""

    content: Content
    geometry: Geometry
    maker: tuple[int, int] | None  # the node below views and which of its results
    parameter: torch.Tensor | None
    node: Any  # the tensor's own

    def lies_in(self, memory: torch.Tensor) -> bool:
        return bool(memory.untyped_storage()._cdata == self.content[0])

    @classmethod
    def of(cls, tensor: torch.Tensor, first: int) -> SeenTensor:
        node, output = below_views(tensor)
        maker, parameter = None, None
        if isinstance(tensor, torch.nn.Parameter):
            parameter = tensor
        elif node is not None and node.name() == ACCUMULATE:
            parameter = node.variable
        elif node is not None:
            maker = (node._sequence_nr() - first, output)
        return cls(
            (tensor.untyped_storage()._cdata, tensor._version),
            Geometry.of(tensor),
            maker,
            parameter,
            tensor.grad_fn,
        )


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A call that the plan may repeat; `node` is its own, if it made one."""

    call: RepeatableCall
    ordinal: int
    node: int | None
    tensors: tuple[SeenTensor, ...]
    modules: tuple[ModuleCall, ...]  # that it ran in, innermost last
    epsilon: Any


@dataclass(frozen=True, slots=True)
class SeenUse:
    """A saved tensor."""

    nodes_before: int
    tensor: SeenTensor
    held: Held
    plain: bool


@dataclass(frozen=True, slots=True)
class SeenResult:
    """A tensor of a module's result; `uses_before` were packed when the module returned."""

    module: ModuleCall
    place: int
    tensor: SeenTensor
    uses_before: int


class PinningFollower(PlanFollower):
    """Active during one forward pass."""

    def __init__(
        self, followed: FollowedPlan, owned: frozenset[int], model: torch.nn.Module
    ) -> None:
        super().__init__(followed, owned, count=True)
        self.followed = followed
        self.first = nodes_made()
        self.nodes = 0  # made in the pass
        self.calls: list[SeenCall] = []
        self.uses: list[SeenUse] = []
        self.results: list[SeenResult] = []
        self.boundaries: list[ModuleBoundary] = []
        self.roots: dict[int, Any] = {}
        self.entered: dict[ModuleCall, int] = {}  # the ordinal of the first operator
        self.value_encodings: dict[Content, tuple[str, Geometry]] = {}
        self._alive: dict[int, StorageWeakRef] = {}  # keeps addresses unique
        self._before = self.first
        self._node: int | None = None
        self._modules: list[ModuleCall] = []
        self._times: dict[Any, int] = defaultdict(int)
        self._handles: list[Any] = []
        for module in model.modules():
            if module is not model:  # its hooks are running now
                enters = module.register_forward_pre_hook(self._enters, prepend=True)
                leaves = module.register_forward_hook(self._leaves, always_call=True)
                self._handles += [enters, leaves]

    def detach(self) -> None:
        """The pass is over, or failed: leave the modules as they were."""
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Nothing more is asked: its tables hold the pass's graph, whose hooks hold the tables."""
        for table in (self.calls, self.uses, self.results, self.roots, self._alive):
            table.clear()

    def _enters(self, module: Any, args: Any) -> None:
        del args
        call = (module, self._times[module])
        self.entered[call] = self._ordinal
        self._modules.append(call)
        self._see_boundary(call, entering=True)

    def _leaves(self, module: Any, args: Any, output: Any) -> None:
        del args
        call = self._modules.pop()
        self._times[module] += 1
        for place, tensor in enumerate(tensors_in(output)):
            if is_plain(tensor):
                seen = self._seen(tensor)
                self.results.append(SeenResult(call, place, seen, len(self.uses)))
        self._see_boundary(call, entering=False)

    def _see_boundary(self, call: ModuleCall, *, entering: bool) -> None:
        """Not inside checkpointing, which has hooks of its own."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and hooks[0] == self.pack:
            place = PassPlace(len(self.uses), nodes_made() - self.first)
            self.boundaries.append(ModuleBoundary(call, entering, place))

    def _seen(self, tensor: torch.Tensor) -> SeenTensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._alive[storage._cdata] = StorageWeakRef(storage)
        seen = SeenTensor.of(tensor, self.first)
        if seen.node is not None:
            self.roots[id(seen.node)] = seen.node
        return seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._busy:
            made = nodes_made()
            self._node = made - 1 - self.first if made != self._before else None
            self._before = made
            for tensor in tensors_in([args, kwargs or {}]):
                if tensor.grad_fn is not None:
                    self.roots[id(tensor.grad_fn)] = tensor.grad_fn
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _repeatable(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any
    ) -> RepeatableCall | None:
        call = super()._repeatable(func, args, kwargs, result)
        if call is not None:
            read = [*tensors_in([repeatable_arguments(func, args), kwargs])]
            if call.template.again is not None:
                read += needed_again(func, args, result)
            tensors = tuple(map(self._seen, read))
            modules = tuple(self._modules)
            ordinal, epsilon = self._ordinal - 1, _epsilon(func, args)
            self.calls.append(SeenCall(call, ordinal, self._node, tensors, modules, epsilon))
        return call

    def _will_encode(self, tensor: torch.Tensor, encoding: str, changed: bool) -> None:
        super()._will_encode(tensor, encoding, changed)
        known = self._to_encode[tensor.untyped_storage()._cdata]
        content = (tensor.untyped_storage()._cdata, known.version)
        self.value_encodings[content] = (encoding, known.tensor_geometry)

    def _held_for(self, tensor: torch.Tensor) -> Held:
        made = nodes_made() - self.first
        held = super()._held_for(tensor)
        plain = is_plain(tensor)
        if plain:
            self.uses.append(SeenUse(made, self._seen(tensor), held, plain))
        else:
            nothing = SeenTensor((0, 0), _NOWHERE, None, None, tensor.grad_fn)
            self.uses.append(SeenUse(made, nothing, held, plain))
        return held

    def finish(self, owned: frozenset[int] = frozenset()) -> Any:
        self.nodes = nodes_made() - self.first
        return super().finish(owned)


_NOWHERE = Geometry((), (), 0, torch.float32)


@functools.cache
def _epsilon_place(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("eps") if "eps" in names else None


def _epsilon(func: Any, args: Any) -> Any:
    place = _epsilon_place(func)
    return args[place] if place is not None and place < len(args) else None
