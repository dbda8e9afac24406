"""Read the forward and backward graphs that AOTAutograd made of a model."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims

# Inductor computes these in other orders when their surroundings change, so a repetition may
# round differently. Their results are small and stay.
_REDUCTIONS = frozenset((
    "sum", "mean", "var", "var_mean", "std", "std_mean", "prod", "any", "all", "amax", "amin",
    "argmax", "argmin", "max", "min", "norm", "logsumexp", "linalg_vector_norm",
    "prepare_softmax_online", "cumsum", "cumprod", "logcumsumexp", "_softmax", "_log_softmax",
    "sum_to_size", "_grad_sum_to_size", "native_layer_norm", "native_group_norm",
    "native_batch_norm",
))  # fmt: skip
_POINTWISE_PRIMS = frozenset((
    "convert_element_type", "inductor_random", "inductor_lookup_seed", "inductor_randint",
    "iota", "fma", "device_put", "where", "broadcast_in_dim",
))  # fmt: skip
_INDEXING = frozenset((
    "where", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "scalar_tensor",
    "arange", "index", "gather", "embedding", "clone", "lift_fresh_copy", "constant_pad_nd",
    "flip", "triu", "tril", "cat", "clamp_min", "clamp_max", "_unsafe_index", "_to_copy",
    "copy", "slice_scatter", "select_scatter", "new_zeros", "new_full", "new_ones",
    "logical_not", "upsample_nearest2d", "_low_memory_max_pool_offsets_to_indices",
    "max_pool2d_with_indices_backward", "avg_pool2d_backward",
))  # fmt: skip
# Whole kernels that give the same bits for the same inputs.
_REPEATABLE = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
))  # fmt: skip
# These may become a matmul and a fused addition of the bias.
_BIASED = {"addmm": 0, "baddbmm": 0, "convolution": 2}  # where the bias is among the arguments
# The rounded result of these is their result of the rounded input.
_ROUND_ALIKE = frozenset(["relu", "neg", "abs"])
_VIEWS = frozenset((
    "view", "_unsafe_view", "reshape", "permute", "t", "transpose", "expand", "squeeze",
    "unsqueeze", "select", "slice", "alias", "as_strided", "detach", "split",
    "split_with_sizes", "unbind", "diagonal", "unfold",
))  # fmt: skip
_ROUNDED = (torch.bfloat16, torch.float16)

PLACEHOLDER, VIEW, ELEMENT, POINTWISE, KERNEL, REDUCTION, FIXED = (
    "placeholder", "view", "element", "pointwise", "kernel", "reduction", "fixed",
)  # fmt: skip


class UnplannableGraphError(Exception):
    """The graph stays as the compiler splits it; the message says why."""


@dataclass(slots=True, eq=False)
class GraphValue:
    """One node of a graph, or of both where backward gets it from forward."""

    number: int
    node: fx.Node
    kind: str
    size_bytes: int
    inputs: list[GraphValue] = field(default_factory=list)  # views are followed to what they show
    users: list[GraphValue] = field(default_factory=list)  # in forward
    cost_ns: int = 0  # of running its operator alone
    keepable: bool = True  # backward may get its bits
    saved: bool = False  # backward gets it from the compiler's own split
    free: bool = False  # is in memory in any case while backward runs
    rounded: bool = False  # kernels hold it in fp32 and round it when they write it
    written: bool = False  # forward writes it to memory in any case
    fixed: bool = False  # is never recomputed

    @property
    def repeatable(self) -> bool:
        return self.kind in (POINTWISE, KERNEL, ELEMENT) and not self.fixed


@dataclass(slots=True, eq=False)
class JointGraph:
    """Forward's values in order, and backward's; `saved` are those that backward gets."""

    forward: list[GraphValue]
    backward: list[GraphValue]  # without placeholders
    saved: list[GraphValue]
    values: dict[fx.Node, GraphValue]  # of both graphs' nodes, views included
    outputs: set[GraphValue]  # forward's results
    gradients: set[GraphValue]
    exact: bool  # the same bits as without a plan
    raw: set[tuple[GraphValue, GraphValue]]  # (value, user): the user reads it before rounding


def operator_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).partition("::")[2]
    return str(getattr(target, "__name__", target))


def read_joint_graph(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    forward_outputs: int,
    owned: Sequence[int] = (),
    *,
    exact: bool = True,
) -> JointGraph:
    """`owned` are the places of parameters and buffers among forward's inputs; `exact` asks for
    the same bits, which the compiler's kernels give only where they stay as they are.

    Raises UnplannableGraphError for graphs whose sizes are not known.
    """
    values: dict[fx.Node, GraphValue] = {}
    forward_values = _read(forward, values, {})
    results = _result_nodes(forward)
    passed = {node.name: values[node] for node in results[forward_outputs:] if node in values}
    outputs = {shown(values[node]) for node in results[:forward_outputs] if node in values}
    saved = [value for value in passed.values() if value.kind != PLACEHOLDER and _is_tensor(value)]
    for value in outputs:
        value.written = True
    backward_values = _read(backward, values, passed)
    gradients = {shown(values[node]) for node in _result_nodes(backward) if node in values}
    gradients_of = zip(
        (value for value in forward_values if value.kind == PLACEHOLDER),
        _results(backward),
        strict=False,
    )
    trained = {value for value, gradient in gradients_of if gradient is not None}
    inputs = [value for value in forward_values if value.kind == PLACEHOLDER]
    for place, value in enumerate(inputs):
        value.saved = value.node.name in passed
        value.free = value.saved or place in owned
        # Whoever owns an input that is not trained may change it before backward runs.
        value.keepable = value.saved or value in trained
    graph = JointGraph(
        forward=forward_values,
        backward=[value for value in backward_values if value.kind != PLACEHOLDER],
        saved=list(dict.fromkeys(shown(value) for value in saved)),
        values=values,
        outputs=outputs,
        gradients=gradients,
        exact=exact,
        raw=set(),
    )
    _mark_written(graph)
    if exact:
        _mark_raw(graph)
        for value in forward_values:
            # A kernel that writes one value more computes its sums in another order.
            if not value.saved and not _is_whole(value):
                value.keepable = False
    _forbid_new_layouts(graph)
    return graph


def _is_tensor(value: GraphValue) -> bool:
    return isinstance(value.node.meta.get("val"), torch.Tensor)


def _results(module: fx.GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0]) if isinstance(output.args[0], (list, tuple)) else [output.args[0]]


def _result_nodes(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in _results(module) if isinstance(node, fx.Node)]


def _read(
    module: fx.GraphModule, values: dict[fx.Node, GraphValue], passed: dict[str, GraphValue]
) -> list[GraphValue]:
    """Add the graph's nodes to `values`; placeholders that are `passed` are those values."""
    added = []
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder" and node.name in passed:
            values[node] = passed[node.name]
            continue
        value = GraphValue(len(values), node, _kind(node), _size(node))
        fused = value.kind == POINTWISE or is_biased(node)
        value.rounded = fused and _dtype(node) in _ROUNDED
        value.keepable = isinstance(node.meta.get("val"), torch.Tensor) and value.kind != VIEW
        values[node] = value
        for source in node.all_input_nodes:
            seen = shown(values[source])
            value.inputs.append(seen)
            if not passed and value.kind != VIEW:
                seen.users.append(value)
        added.append(value)
    return added


def is_biased(node: fx.Node) -> bool:
    """Tell whether the last step of a kernel is an addition, which may be fused with others."""
    place = _BIASED.get(operator_name(node)) if node.op == "call_function" else None
    return place is not None and len(node.args) > place and node.args[place] is not None


def _is_whole(value: GraphValue) -> bool:
    """Tell whether a kernel of its own writes the value, whoever reads it."""
    if value.kind == ELEMENT:
        return value.inputs[0].kind in (KERNEL, FIXED)
    return value.kind in (PLACEHOLDER, KERNEL, FIXED) and not is_biased(value.node)


def shown(value: GraphValue) -> GraphValue:
    """Return what a view shows."""
    while value.kind == VIEW:
        value = value.inputs[0]
    return value


def _kind(node: fx.Node) -> str:
    if node.op == "placeholder":
        return PLACEHOLDER
    if node.op != "call_function":
        return FIXED
    if node.target is operator.getitem:
        return ELEMENT
    if isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ELEMENT  # arithmetic with sizes
    name = operator_name(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return FIXED
    if node.target._schema.is_mutable:
        return FIXED
    if name in _VIEWS and not (name == "view" and node.target is aten.view.dtype):
        return VIEW
    if name in _REDUCTIONS:
        return REDUCTION
    if name in _REPEATABLE:
        return FIXED if _is_random(node) else KERNEL
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return POINTWISE if name in _POINTWISE_PRIMS else FIXED
    pointwise = torch.Tag.pointwise in node.target.tags
    if pointwise or name in _POINTWISE_PRIMS or name in _INDEXING:
        return POINTWISE
    return FIXED


def _is_random(node: fx.Node) -> bool:
    """Attention with dropout draws its own numbers."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else argument.default_value
            return node.kwargs.get("dropout_p", given) not in (0, 0.0, None)
    return False


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _size(node: fx.Node) -> int:
    """Return the bytes of a node's tensors; a tuple's belong to its elements."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return 0
    return math.prod(map(length, tensor.shape)) * int(tensor.element_size())


def length(extent: Any) -> int:
    """Return a size, of dynamic shapes the one that the graph was traced with.

    Raises UnplannableGraphError for sizes that depend on data.
    """
    if isinstance(extent, int):
        return extent
    hint = getattr(extent.node, "hint", None)
    if not isinstance(hint, int):
        raise UnplannableGraphError("its shapes depend on data")
    return hint


def _mark_written(graph: JointGraph) -> None:
    """Kernels write what others than pointwise kernels read."""
    for value in graph.forward:
        if value.kind != POINTWISE or any(user.kind != POINTWISE for user in value.users):
            value.written = True
    for value in graph.saved:
        value.saved = value.written = True
        value.free = value.free or value.kind == PLACEHOLDER


def _mark_raw(graph: JointGraph) -> None:
    """Find who reads a 16-bit value inside the kernel that computes it, where it is still fp32.

    A user in a later kernel reads it rounded, from memory. It is in a later kernel if it also
    depends on an operator that has to wait for the value: a matmul, a convolution, a reduction.
    """
    for value in graph.forward:
        if not value.rounded:
            continue
        fusible = [user for user in value.users if user.kind == POINTWISE]
        if not fusible:
            continue
        later = (
            _after_a_kernel(value, max(user.number for user in fusible)) if value.written else set()
        )
        graph.raw.update((value, user) for user in fusible if user not in later)
    graph.raw.update(_fused_biases(graph))
    read_raw = {value for value, _user in graph.raw}
    graph.raw -= {
        (value, user)
        for value, user in graph.raw
        if operator_name(user.node) in _ROUND_ALIKE and user not in read_raw
    }


def _fused_biases(graph: JointGraph) -> Iterator[tuple[GraphValue, GraphValue]]:
    """Find biases that GPUs add in the kernel after a convolution, before anything is rounded.

    The same goes for a matmul whose result only pointwise operators read.
    """
    for user in graph.forward:
        node = user.node
        if user.kind != KERNEL or not is_biased(node) or node.meta["val"].device.type != "cuda":
            continue
        apart = operator_name(node) == "convolution"
        apart = apart or not (user.saved or any(one.kind != POINTWISE for one in user.users))
        bias = shown(graph.values[node.args[_BIASED[operator_name(node)]]])
        if apart and bias.rounded:
            yield bias, user


def _forbid_new_layouts(graph: JointGraph) -> None:
    """The compiler lays out pictures as it likes; copies of weights and inputs would lose that."""
    of_inputs: set[GraphValue] = {value for value in graph.forward if value.kind == PLACEHOLDER}
    for value in graph.forward:
        whole = [source for source in value.inputs if source.size_bytes * 8 > value.size_bytes]
        if value.kind == POINTWISE and whole and all(source in of_inputs for source in whole):
            of_inputs.add(value)
            if len(getattr(value.node.meta.get("val"), "shape", ())) > 3:
                value.fixed = True


def _after_a_kernel(value: GraphValue, last: int) -> set[GraphValue]:
    """Return what depends on the value by way of another kernel, up to number `last`."""
    waiting = [(user, user.kind != POINTWISE) for user in value.users]
    seen: set[tuple[GraphValue, bool]] = set()
    while waiting:
        place = waiting.pop()
        if place in seen or place[0].number > last:
            continue
        seen.add(place)
        user, separate = place
        waiting += [
            (next_user, separate or next_user.kind != POINTWISE) for next_user in user.users
        ]
    return {user for user, separate in seen if separate and user.kind == POINTWISE}
