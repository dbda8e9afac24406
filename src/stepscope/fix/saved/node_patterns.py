"""What autograd's nodes tell about the operators that made them.

Every differentiable operator leaves a node: its kind, the settings that backward needs, and edges
to the nodes of its inputs. For the operators listed here these settle the result, so a pass can be
compared with an earlier one without watching its operators. Nodes are numbered as they are made.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.saved.operators import plain_name

if TYPE_CHECKING:
    from collections.abc import Iterable

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
