"""The partitioner that torch.compile calls: it plans, and splits the joint graph again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from stepscope.fix.saved.compiled.graph_memory import backward_order, read_again
from stepscope.fix.saved.compiled.graph_plan import GraphPlan, describe
from stepscope.fix.saved.compiled.joint_graph import (
    ELEMENT,
    FIXED,
    KERNEL,
    POINTWISE,
    REDUCTION,
    VIEW,
    GraphValue,
    JointGraph,
    UnplannableGraphError,
    read_joint_graph,
    shown,
)
from stepscope.fix.saved.compiled.operator_costs import set_costs
from stepscope.fix.saved.compiled.recompute_ladder import RecomputeLadder
from stepscope.records.change_values import MemoryTarget

SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # of the ladder's picture
_LADDER_SECONDS = 0.3


class MemoryPartitioner(CustomPartitionerFn):  # type: ignore[misc]  # torch is not typed here
    """Splits as the compiler does, then lets backward recompute what the plan says.

    Whatever fails here leaves the compiler's own split.
    """

    def __init__(
        self,
        target: MemoryTarget,
        *,
        dry_run: bool,
        exact: bool,
        on_plan: Callable[[GraphPlan], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._target, self._dry_run, self._exact = target, dry_run, exact
        self._on_plan, self._on_failure = on_plan, on_failure

    def __deepcopy__(self, memo: Any) -> MemoryPartitioner:
        """The compiler copies its settings; the model's saver hears of plans all the same."""
        del memo
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The compiler may also write its settings down, for processes that only generate code."""
        return {"_target": self._target, "_dry_run": True, "_exact": self._exact}

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        split: tuple[fx.GraphModule, fx.GraphModule]
        split = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        try:
            return self._plan(split[0], split[1], options)
        except UnplannableGraphError as error:
            self._on_failure(f"A graph stays as it is: {error}.")
        except Exception as error:  # the training goes on without a plan
            self._on_failure(f"A graph stays as it is: planning failed ({error!r}).")
        return split

    def uuid(self) -> Any:
        """The compiler's cache keys hold the graphs that come out of here; no more is needed."""
        return "stepscope-memory-partitioner-1"

    def _plan(
        self, forward: fx.GraphModule, backward: fx.GraphModule, options: dict[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        begin = time.perf_counter_ns()
        outputs = options["num_fwd_outputs"]
        owned = options.get("static_lifetime_input_indices") or ()
        graph = read_joint_graph(forward, backward, outputs, owned, exact=self._exact)
        if not graph.saved:
            raise UnplannableGraphError("it saves nothing for backward")
        device = _device(forward)
        speed = set_costs(graph, device)
        ladder = RecomputeLadder(graph, speed)
        static_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        chosen = ladder.choose(self._target, static_bytes)
        points = ladder.points(SHARES, _LADDER_SECONDS)
        split = forward, backward
        if chosen.repeated and not self._dry_run:
            split = split_again(forward, backward, outputs, graph, set(chosen.repeated))
        planning_ns = time.perf_counter_ns() - begin
        plan = describe(graph, ladder.plain, chosen, planning_ns)
        self._on_plan(plan.with_ladder(SHARES, [point.step for point in points]))
        return split


def _device(forward: fx.GraphModule) -> torch.device:
    devices = [
        tensor.device
        for node in forward.graph.nodes
        if isinstance(tensor := node.meta.get("val"), torch.Tensor)
    ]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


# Forward and backward are built again, so that backward recomputes some values.

_BITS = torch.int16
_WRITE = "inductor_realize_to_strides"  # the compiler writes such a value to memory


def split_again(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    forward_outputs: int,
    graph: JointGraph,
    repeated: set[GraphValue],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return new modules; the given ones stay as they are."""
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    passed = results[forward_outputs:]
    checked = [node for node in passed if _is_tensor(node) and not _unchecked(node)]
    gone = {node for node in checked if shown(graph.values[node]) in repeated}
    stay = [node for node in checked if node not in gone]
    starts = sorted(read_again(repeated), key=lambda value: value.number)
    stay += [value.node for value in starts if value.node not in passed and _is_tensor(value.node)]
    _check_symbols(backward, stay)
    rest = [node for node in passed if node not in set(checked)]
    written = {shown(graph.values[node]) for node in gone} if graph.exact else set[GraphValue]()
    new_forward = _with_outputs(forward, results[:forward_outputs], stay, rest, written)
    new_backward = _BackwardBuilder(
        backward, graph, repeated, stay, {n.name for n in checked}
    ).build()
    return new_forward, new_backward


def _check_symbols(backward: fx.GraphModule, stay: list[fx.Node]) -> None:
    """Raises UnplannableGraphError if backward would have to learn new dynamic sizes."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    known = set[Any]().union(*(_symbols(node) for node in placeholders))
    if set[Any]().union(*(_symbols(node) for node in stay)) - known:
        raise UnplannableGraphError("its dynamic shapes are not known in backward")


def _symbols(node: fx.Node) -> set[Any]:
    value = node.meta.get("val")
    extents = value.shape if isinstance(value, torch.Tensor) else [value]
    dynamic = [extent for extent in extents if isinstance(extent, torch.SymInt)]
    return set[Any]().union(*(extent.node.expr.free_symbols for extent in dynamic))


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _unchecked(node: fx.Node) -> bool:
    """Tell whether autograd is to ignore changes in place; such values stay last."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _with_outputs(
    forward: fx.GraphModule,
    results: list[Any],
    stay: list[fx.Node],
    rest: list[Any],
    written: set[GraphValue],
) -> fx.GraphModule:
    """Values in `written` were results; their kernels stay the same if they go on writing them."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    at_last_use: dict[fx.Node, list[fx.Node]] = {}
    for value in written:
        # Whole kernels read memory; values that nothing reads matter to the sums of their kernel.
        read_whole = any(user.kind in (KERNEL, FIXED) for user in value.users)
        if not read_whole and (value.users or _follows_reduction(value)):
            last = max((user.number, user.node) for user in (value, *value.users))[1]
            at_last_use.setdefault(last, []).append(value.node)
    token: fx.Node | None = None
    # Pictures have the layout that convolutions like, which a mark would take from them.
    pictures = any(
        node.target is torch.ops.aten.convolution.default for node in forward.graph.nodes
    )
    marked = {value.node for value in written if not pictures or value.node.meta["val"].ndim < 4}
    for node in forward.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, lambda source: copies[source])
            if node in marked:
                copies[node].meta[_WRITE] = True
            for read in at_last_use.get(node, ()):
                if token is None:
                    token = _add_token(graph, read)
                graph.call_function(barriers().read.default, (copies[read], token))
            continue
        outputs = (*results, *stay, *rest)
        new = graph.output(fx.node.map_arg(outputs, lambda source: copies[source]))
        new.meta.update(node.meta)
        described = node.meta.get("desc")
        if described is not None:
            passed = len(node.args[0]) - len(results)
            new.meta["desc"] = (
                [
                    *described[: len(results)],
                    *_descriptions(len(stay)),
                    *described[len(described) - len(rest) :],
                ]
                if passed
                else described
            )
    return fx.GraphModule(forward, graph)


def _follows_reduction(value: GraphValue) -> bool:
    """Tell whether the value may be written by the kernel of a reduction."""
    waiting = [value]
    while waiting:
        source = waiting.pop()
        if source.kind == REDUCTION:
            return True
        if source.kind in (POINTWISE, ELEMENT):
            waiting += source.inputs
    return False


def _add_token(graph: fx.Graph, like: fx.Node) -> fx.Node:
    tensor = like.meta["val"]
    token = graph.call_function(
        torch.ops.aten.empty.memory_format,
        ([1],),
        {"dtype": torch.uint8, "device": tensor.device, "pin_memory": False},
    )
    token.meta["val"] = tensor.new_empty(1, dtype=torch.uint8)
    return token


@functools.cache
def barriers() -> Any:
    """Return operators that do nothing, and across which the compiler fuses nothing.

    `read` says that it reads a value, so that a kernel has to write it. `write` says that it
    changes a value, so that those who come after it read memory.
    """
    library = torch.library.Library("stepscope", "DEF")
    layout = (torch.Tag.flexible_layout,)
    library.define("read(Tensor value, Tensor(a!) token) -> ()", tags=layout)
    library.define("write(Tensor(a!) value) -> ()", tags=layout)
    for name in ("read", "write"):
        library.impl(name, lambda *_arguments: None, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)
    return torch.ops.stepscope


_LIBRARIES: list[torch.library.Library] = []  # operators go with their library


def _descriptions(count: int) -> list[Any]:
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

    return [SavedForBackwardsAOTOutput(place) for place in range(count)]


class _BackwardBuilder:
    """Copies backward's graph; what it no longer gets is computed where it is first read."""

    def __init__(
        self,
        backward: fx.GraphModule,
        graph: JointGraph,
        repeated: set[GraphValue],
        stay: list[fx.Node],
        checked: set[str],
    ) -> None:
        self._module, self._graph, self._repeated = backward, graph, repeated
        self._stay, self._checked = stay, checked
        self._new = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}  # of backward's nodes
        self._raw: dict[fx.Node, fx.Node] = {}  # of forward's nodes, before rounding
        self._rounded: dict[fx.Node, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        self._add_placeholders()
        ordered = iter(backward_order(self._graph, self._repeated))
        of_backward = {value.node: value for value in self._graph.backward}
        for node in self._module.graph.nodes:
            if node.op == "output":
                new = self._new.output(fx.node.map_arg(node.args[0], self._read))
                new.meta.update(node.meta)
            elif node.op == "placeholder":
                continue
            else:
                value = of_backward.get(node)
                while value is not None and (again := next(ordered)) is not value:
                    self._repeat(again)
                self._copies[node] = self._new.node_copy(node, self._read)
        return fx.GraphModule(self._module, self._new)

    def _add_placeholders(self) -> None:
        placeholders = self._module.graph.find_nodes(op="placeholder")
        by_name = {node.name: node for node in placeholders}
        first = next(
            (place for place, node in enumerate(placeholders) if node.name in self._checked),
            len(placeholders),
        )
        forward = {value.node.name: value.node for value in self._graph.forward}
        for node in placeholders[:first]:
            self._copies[node] = self._new.node_copy(node)
            if node.name in forward:  # a symbolic size
                self._rounded[forward[node.name]] = self._copies[node]
                self._raw[forward[node.name]] = self._copies[node]
        for node in self._stay:
            new = self._new.placeholder(node.name)
            new.meta.update(node.meta)
            self._rounded[node] = self._raw[node] = new
            if node.name in by_name:
                self._copies[by_name[node.name]] = new
        for node in placeholders[first:]:
            if node.name not in self._checked:
                self._copies[node] = self._new.node_copy(node)

    def _repeat(self, value: GraphValue) -> None:
        node = value.node
        if value.kind == VIEW:
            return

        def read(source: fx.Node) -> fx.Node:
            fused = (shown(self._graph.values[source]), value) in self._graph.raw
            return self._forward_copy(source, raw=fused)

        self._raw[node] = self._new.node_copy(node, read)

    def _read(self, source: fx.Node) -> fx.Node:
        """Return the copy of a node of backward; a placeholder may be recomputed now."""
        if source in self._copies:
            return self._copies[source]
        return self._forward_copy(self._graph.values[source].node, raw=False)

    def _forward_copy(self, node: fx.Node, *, raw: bool) -> fx.Node:
        """Return backward's copy of a node of forward."""
        value = self._graph.values[node]
        copies = self._raw if raw else self._rounded
        if node in copies:
            return copies[node]
        if value.kind == VIEW:
            new = self._new.node_copy(node, lambda source: self._forward_copy(source, raw=raw))
        else:
            new = self._raw[node]
            exact = self._graph.exact
            if exact and value.saved and value.kind in (POINTWISE, KERNEL):
                if value.rounded and self._read_raw(value):
                    new = self._clone(new)
                self._new.call_function(barriers().write.default, (new,))
            elif exact and value.rounded:
                new = self._round(new)
        copies[node] = new
        return new

    def _read_raw(self, value: GraphValue) -> bool:
        return any(
            (value, user) in self._graph.raw for user in value.users if user in self._repeated
        )

    def _clone(self, node: fx.Node) -> fx.Node:
        copy = self._new.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta.update(node.meta)
        return copy

    def _round(self, node: fx.Node) -> fx.Node:
        """Round to 16 bits: a fused value has 32 until someone looks at the bits."""
        view = torch.ops.aten.view.dtype
        value = node.meta["val"]
        bits = self._new.call_function(view, (node, _BITS))
        bits.meta["val"] = value.view(_BITS)
        again = self._new.call_function(view, (bits, value.dtype))
        again.meta["val"] = value
        return again
