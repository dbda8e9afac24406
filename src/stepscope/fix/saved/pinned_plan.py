"""A plan tied to one model's saved tensors, autograd nodes and modules: what it consists of,
and the watched pass it is written from.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stepscope.fix.saved.encodings import Geometry
from stepscope.fix.saved.follower import FollowedPlan, Held, PlanFollower
from stepscope.fix.saved.norm_recompute import needed_again
from stepscope.fix.saved.operators import is_plain, plain_name, repeatable_arguments, tensors_in
from stepscope.fix.saved.plan_load import HookPauses, ModuleBoundary, ModuleCall, PassPlace
from stepscope.fix.saved.save_plan import KEEP

if TYPE_CHECKING:
    from stepscope.fix.saved.replay import CallTemplate, RepeatableCall

# A plan tied to the saved tensors, autograd nodes and modules of one model, so that later passes
# need only the pack hook and a few module hooks. It lives as long as the model; it is never saved.

# A node's number and which of its results; ("use", n) for what has no gradient.
SourceKey = tuple[int | str, int]


@dataclass(frozen=True, slots=True)
class SourceArgument:
    """An argument that is kept; it is taken from a saved tensor or a module's result."""

    source: SourceKey


@dataclass(frozen=True, slots=True)
class ComputedArgument:
    """An argument that another repeated call makes."""

    call: int
    slot: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class OwnedArgument:
    """A parameter; small ones are copied."""

    tensor: torch.Tensor
    copied: bool


@dataclass(frozen=True, slots=True)
class PinnedCall:
    """An operator that may be repeated; a geometry stands where the argument is another view."""

    template: CallTemplate
    arguments: tuple[SourceArgument | ComputedArgument | OwnedArgument, ...]
    geometries: tuple[Geometry | None, ...]
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueEncoding:
    """How a whole value is encoded."""

    encoding: str
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Proof:
    """The node that saved a tensor is found from a later tensor's node by following edges."""

    node: int
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedUse:
    """One saved tensor: where it is expected, and what happens to it."""

    nodes_before: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    action: str
    geometry: Geometry | None = None  # of a recomputed one
    computed: tuple[int, int] | None = None  # the call and its slot
    value_encoding: ValueEncoding | None = None
    outcome: str | None = None  # the encoding of what one kind of node reads
    proven_by_node: int | None = None  # encoded once this node is seen to be of the right kind
    source: SourceKey | None = None
    proofs: tuple[Proof, ...] = ()
    needs_hook: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        needed = self.action != KEEP or self.source is not None or bool(self.proofs)
        object.__setattr__(self, "needs_hook", needed)


@dataclass(frozen=True, slots=True)
class PinnedResult:
    """One tensor of a module's result that is needed."""

    place: int
    source: SourceKey | None
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, slots=True)
class PinnedPlan:
    """`patterns` and `calls` by the node's number. In `dispatched` module calls operators must be
    watched, beginning with this ordinal."""

    followed: FollowedPlan
    uses: tuple[PinnedUse, ...]
    nodes: int
    patterns: dict[int, NodePattern]
    calls: dict[int, PinnedCall]
    slots: dict[tuple[int, int], int]  # of a node's results among the call's storages
    sources: dict[SourceKey, Geometry]  # what calls start from, and how it lies in memory
    copied: frozenset[SourceKey]  # of these, those that the pass did not make
    results: dict[ModuleCall, tuple[PinnedResult, ...]]
    dispatched: dict[ModuleCall, int]
    epsilons: tuple[tuple[Any, Any], ...]  # of norm modules: not in their nodes
    lost: frozenset[int]  # operators that the plan repeats, and later passes cannot
    pauses: HookPauses

    def entered_modules(self) -> set[Any]:
        """The follower is told when they are entered."""
        return {module for module, _ in (*self.dispatched, *self.pauses.ends_at_entry)}

    def left_modules(self) -> set[Any]:
        calls = (*self.results, *self.dispatched, *self.pauses.ends_at_exit)
        return {module for module, _ in calls}

    def settings_hold(self) -> bool:
        return all(module.eps == epsilon for module, epsilon in self.epsilons)


# Follows a plan once with every operator watched, and writes down what later passes need.
#
# The tables of this pass go to pin_plan.py when it is over.

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


# What autograd's nodes tell about the operators that made them.
#
# Every differentiable operator leaves a node: its kind, the settings that backward needs, and edges
# to the nodes of its inputs. For the operators listed here these settle the result, so a pass can
# be compared with an earlier one without watching its operators. Nodes are numbered as they are
# made.

nodes_made = torch.autograd._get_sequence_nr  # so far, in this thread
ACCUMULATE = "torch::autograd::AccumulateGrad"

# Nodes of views: the result lies in the input's storage.
VIEW_NODES = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Unsqueeze"),
        *("Squeeze", "Slice", "Select", "Expand", "AsStrided", "Alias", "Split"),
        *("SplitWithSizes", "UnsafeSplit", "Unbind", "Unfold", "Diagonal", "Chunk"),
    )
    for number in range(4)
)

# Of operators whose result is settled by node, settings and edges.
_SETTLED_NODES = {
    **{
        name: f"{name.title()}Backward0"
        for name in (
            *("relu", "tanh", "sigmoid", "silu", "gelu", "exp", "log", "sqrt", "rsqrt", "sin"),
            *("cos", "neg", "abs", "erf", "softplus", "elu", "hardtanh", "hardswish", "mish"),
            *("cat", "stack", "clone", "glu", "roll", "repeat"),
            *("flip", "maximum", "minimum", "addcmul"),
        )
    },
    "leaky_relu": "LeakyReluBackward0",
    "_softmax": "SoftmaxBackward0",
    "_log_softmax": "LogSoftmaxBackward0",
    "log_sigmoid_forward": "LogSigmoidBackward0",
    "native_layer_norm": "NativeLayerNormBackward0",
    "_fused_rms_norm": "FusedRmsNormBackward0",
    "native_group_norm": "NativeGroupNormBackward0",
    "native_batch_norm": "NativeBatchNormBackward0",
    "cudnn_batch_norm": "CudnnBatchNormBackward0",
    "miopen_batch_norm": "MiopenBatchNormBackward0",
    "_to_copy": "ToCopyBackward0",
    "max_pool2d_with_indices": "MaxPool2DWithIndicesBackward0",
    "avg_pool2d": "AvgPool2DBackward0",
    "_adaptive_avg_pool2d": "AdaptiveAvgPool2DBackward0",
    "upsample_nearest2d": "UpsampleNearest2DBackward0",
    "pixel_shuffle": "PixelShuffleBackward0",
    "_prelu_kernel": "PreluKernelBackward0",
}
_OVERLOADS = {
    "dim_IntList": {"sum": "SumBackward1"},
    "dim": {"mean": "MeanBackward1"},
    "Scalar": {"mul": "MulBackward1", "div": "DivBackward1"},
    "Tensor": {name: f"{name.title()}Backward0" for name in ("mul", "div", "add", "sub")},
    "Tensor_Scalar": {"pow": "PowBackward0"},
    "Tensor_mode": {},
    "Tensor_Tensor": {},
    "memory_format": {},
}
_SIZES_MATTER = frozenset({"ToCopyBackward0", "AdaptiveAvgPool2DBackward0"}) | VIEW_NODES
NEEDS_EPSILON = frozenset({"native_layer_norm", "_fused_rms_norm"})
NUMBER_OPERANDS = frozenset({"mul", "div"})  # their nodes keep a number that they were given


def settled_node(operator: Any) -> str | None:
    """The node that settles this operator's result; None where no node does."""
    name = plain_name(operator).rstrip("_")
    overload = operator._overloadname
    if overload in _OVERLOADS:
        return _OVERLOADS[overload].get(name)
    return _SETTLED_NODES.get(name)


@dataclass(frozen=True, slots=True)
class Edge:
    """To the node of an input: by its number, or a parameter's own; neither where the input has no
    gradient."""

    made: int | None
    output: int
    parameter: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class NodePattern:
    """One node as it was when the plan was pinned."""

    name: str
    settings: tuple[tuple[str, Any], ...]
    sizes: tuple[Any, ...] | None  # of the results, where the settings leave them open
    edges: tuple[Edge, ...]
    numbers: tuple[tuple[str, float], ...] = ()  # operands, by the field that keeps them

    @classmethod
    def of(cls, node: Any, first: int) -> NodePattern:
        """`first` is the number of the pass's first node."""
        edges = []
        for following, output in node.next_functions:
            if following is None:
                edges.append(Edge(None, output, None))
            elif following.name() == ACCUMULATE:
                edges.append(Edge(None, output, following.variable))
            else:
                edges.append(Edge(following._sequence_nr() - first, output, None))
        name = _one_name(node.name())
        kind: Any = type(node)
        settings = tuple((setting, getattr(node, setting)) for setting in _settings(kind))
        sizes = _sizes(node) if name in _SIZES_MATTER else None
        return cls(name, settings, sizes, tuple(edges))

    def is_like(self, node: Any) -> bool:
        """Kind and settings; the edges are compared on the way."""
        if _one_name(node.name()) != self.name:
            return False
        for setting, value in self.settings:
            if getattr(node, setting) != value:
                return False
        for operand, number in self.numbers:
            if number_in(node, operand) != number:
                return False
        return self.sizes is None or _sizes(node) == self.sizes


def number_in(node: Any, field: str) -> float | None:
    """The number that an operator was given; None where it was a tensor. Torch wraps numbers as
    tensors; `tolist` is no operator, which a dispatch mode would be handed the bare number for."""
    kept = getattr(node, field, None)
    if not isinstance(kept, torch.Tensor) or kept.dim() or kept.device.type != "cpu":
        return None
    number: float = kept.tolist()
    return number


def _one_name(name: str) -> str:
    """Watched, reshape makes a view; otherwise an alias, with the same settings."""
    return "ViewBackward0" if name == "ReshapeAliasBackward0" else name


@functools.cache
def _settings(kind: Any) -> tuple[str, ...]:
    """Fields that hold no tensor: reading one that does would unpack it."""
    names = dir(kind)
    tensors = {name.replace("_raw", "", 1) for name in names if name.startswith("_raw_saved_")}
    return tuple(n for n in names if n.startswith("_saved_") and n not in tensors)


def _sizes(node: Any) -> tuple[Any, ...]:
    return tuple((tuple(known.shape), known.dtype) for known in node._input_metadata)


def below_views(tensor: torch.Tensor) -> tuple[Any, int]:
    """The node whose result lies in this tensor's storage, and which of its results it is; (None,
    0) where the tensor has no gradient."""
    node, output = tensor.grad_fn, tensor.output_nr
    while node is not None and node.name() in VIEW_NODES:
        node, output = node.next_functions[0]
    return node, output


def all_nodes(roots: Iterable[Any], first: int) -> dict[int, Any]:
    """Every node of the pass that can be reached, by number."""
    waiting, found = list(roots), {}
    while waiting:
        node = waiting.pop()
        if node is None or node.name() == ACCUMULATE:
            continue
        number = node._sequence_nr() - first
        if number >= 0 and number not in found:
            found[number] = node
            waiting.extend(following for following, _ in node.next_functions)
    return found
