"""Count bytes through a forward and a backward pass, node by node, with convolutions'
workspaces and what passes hold besides their graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from functools import cached_property

import msgspec
from msgspec.structs import replace

from stepscope.predict.peak_memory.backward_graph import (
    FULL,
    NARROW,
    OUTSIDE,
    UNKNOWN,
    VIEWS,
    AutocastRule,
    ConvolutionLayout,
    HeldGraph,
    MemoryChange,
    filled_up,
    hold,
    is_of_parameter,
    is_result,
    maker_of,
    operator_of,
)
from stepscope.records.dtypes import NAME_BYTES
from stepscope.records.memory import (
    CapturedBackward,
    CapturedMemory,
    GraphEdge,
    GraphNode,
)

# Levels of a captured graph's passes, worked out once for each change.

_SAME = 0.02  # how far two sizes of one value may be apart


class TracedPasses(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace says about the passes and the backward graph does not."""

    cleared_late: bool = False  # the old gradients, after forward
    convolves_in_fp32: bool = False  # without tf32
    fp32_convolutions: tuple[ConvolutionLayout, ...] = ()  # as far as their shapes are known


class GraphLevels:
    def __init__(self, captured: CapturedMemory, traced: TracedPasses | None = None) -> None:
        traced = traced or TracedPasses()
        self.captured = captured
        self.has_account = bool(captured.peak and captured.peak.allocated_bytes is not None)
        self.states_bytes = states_bytes(captured)
        late = traced.cleared_late
        self.old_gradients_bytes = old_gradients_bytes(captured, cleared_late=late)
        self.traced = traced
        # Those that cuDNN may run by any algorithm for fp32.
        self.fp32_convolutions = frozenset(one.place for one in traced.fp32_convolutions)
        self._backward: dict[MemoryChange, BackwardLevels] = {}
        self._forward: dict[MemoryChange, tuple[NodeLevel, ...]] = {}

    @property
    def has_graph(self) -> bool:
        """Whether the graph is known, and the script's own hooks hide no part of it."""
        graph = self.captured.graph
        return graph is not None and bool(graph.nodes) and not graph.hidden

    def level(self, change: MemoryChange) -> float:
        """The highest one of backward. Without an allocator's account only what forward kept is
        known."""
        levels = self.backward(change)
        return levels.peak_bytes if self.has_account else levels.kept_bytes

    def backward(self, change: MemoryChange) -> BackwardLevels:
        key = _of_passes(change)
        if key not in self._backward:
            keeps = keeps_gradients(self.captured)
            self._backward[key] = replay_backward(self.hold(key), keeps_gradients=keeps)
        return self._backward[key]

    def forward(self, change: MemoryChange) -> tuple[NodeLevel, ...]:
        key = _of_passes(change)
        if key not in self._forward:
            self._forward[key] = replay_forward(self.hold(key))
        return self._forward[key]

    def outputs_bytes(self, change: MemoryChange) -> tuple[float, float]:
        """Of a result that the script holds and backward does not need, such as logits, without the
        growth of the batch; and the doubt. A script that asks for it in fp32 may hold that copy or
        the narrow result: in fp32 both are one tensor."""
        place = self._held_output
        if place is None:
            return 0.0, 0.0
        held = self.hold(_of_passes(change))
        out = held.graph.nodes[place].outputs
        reads = {
            (at, number)
            for at, node in enumerate(held.graph.nodes)
            for number, edge in enumerate(node.inputs)
            if edge.node >= 0 and maker_of(held.graph, edge.node) == place
        }
        elements = out[0].elements if out else 0
        own = elements * held.widths[place][0]
        copied = elements * FULL if reads & change.wide_reads else own
        return (own + copied) / 2, (copied - own) / 2

    @cached_property
    def _held_output(self) -> int | None:
        """The last node whose result nobody keeps and is as large as what the script holds."""
        size, graph = outputs_bytes(self.captured), self.captured.graph
        if graph is None or not size:
            return None
        held = self.hold(MemoryChange())
        kept = {value.producer for value in held.values}
        for place in reversed(range(len(graph.nodes))):
            node = graph.nodes[place]
            if node.is_leaf or place in kept or operator_of(node.name) in VIEWS or not node.outputs:
                continue
            own = node.outputs[0].elements * held.widths[place][0]
            if abs(own - size) < _SAME * size:
                return place
        return None

    def hold(self, change: MemoryChange) -> HeldGraph:
        graph = self.captured.graph
        assert graph is not None
        return hold(graph, self.captured.device or "cpu", change)


def _of_passes(change: MemoryChange) -> MemoryChange:
    return replace(change, other_update=False, update_bytes=0)


# Bytes while one node of a pass runs, without what is there in every step.


class NodeLevel(msgspec.Struct, frozen=True, kw_only=True):
    place: int
    peak_bytes: float
    kept_bytes: float  # for backward: in forward with what the node keeps, in backward before it
    gradients_bytes: float = 0.0  # of the parameters, afterwards
    joined_bytes: float = 0.0  # that only a list of the script still holds, if it does


def level_at(nodes: Sequence[NodeLevel], place: int) -> float:
    """The highest level while a node runs; 0 for a node that does not."""
    return next((node.peak_bytes for node in nodes if node.place == place), 0.0)


def find_nearest(
    nodes: Sequence[NodeLevel],
    kept_bytes: float,
    gradients_bytes: float | None,
    *,
    within: float,
    likely: Container[int] = (),
) -> NodeLevel | None:
    """The node that ran when so much was kept: of those that fit best, one at the `likely` places,
    and the highest; None if none fits `within` so many bytes."""

    def distance(node: NodeLevel) -> float:
        gradients = gradients_bytes if gradients_bytes is not None else node.gradients_bytes
        return abs(node.kept_bytes - kept_bytes) + abs(node.gradients_bytes - gradients)

    nearest = min(map(distance, nodes), default=within + 1.0)
    if nearest > within:
        return None
    fitting = [node for node in nodes if distance(node) <= nearest + 1.0]
    return max(fitting, key=lambda node: (node.place in likely, node.peak_bytes))


# Bytes through a forward pass, node by node, from its backward graph.
#
# What backward needs stays. Any other result goes once the last operator that reads it has run;
# those that were joined (torch.cat) stand in a list of the module that joins them, so they stay
# until that module returns. A cast copy is made beside the value it copies, and so is one in
# another layout.

_JOIN = "cat"


def replay_forward(held: HeldGraph) -> tuple[NodeLevel, ...]:
    """Nodes in the order in which they run."""
    graph = held.graph
    stays: dict[int, float] = defaultdict(float)  # from this node on
    passing: dict[int, float] = defaultdict(float)  # while this node runs
    kept: set[int] = set()
    for value in held.values:
        size = held.bytes_of(value)
        first = min(value.holders)
        if held.is_recomputed(value):
            passing[first] += size if value.is_copy else 0.0
        elif value.is_copy or value.producer == UNKNOWN:
            stays[first] += size
        else:
            stays[value.producer] += size
            kept.add(value.producer)
    last, listed = _last_reads(graph)
    goes: dict[int, float] = defaultdict(float)  # after this node
    may_go: dict[int, float] = defaultdict(float)  # after this node, if no list holds it
    nodes = []
    level = kept_bytes = joined = 0.0
    for place, node in enumerate(graph.nodes):
        if node.is_leaf:
            continue
        level += stays[place]
        kept_bytes += stays[place]
        if place not in kept and operator_of(node.name) not in VIEWS:
            widths = zip(node.outputs, held.widths[place], strict=True)
            grows = 1.0 if is_of_parameter(graph, place) else held.change.batch
            size = sum(out.elements * width for out, width in widths) * grows
            level += size
            read = last.get(place, place)
            goes[max(read, listed.get(place, place))] += size
            may_go[read] += size
        # What the script casts to fp32 for the node, beside the narrow values. What the node keeps
        # is counted as such.
        wide_copies = 0.0
        saved_sizes = {saved.elements for saved in node.saved if not is_result(saved.field)}
        for number, edge in enumerate(node.inputs):
            if (place, number) not in held.change.wide_reads or edge.node < 0:
                continue
            elements = graph.nodes[edge.node].outputs[edge.output].elements
            if held.widths[edge.node][edge.output] < FULL and elements not in saved_sizes:
                wide_copies += elements * FULL * held.change.batch
        beside = passing[place] + wide_copies
        peak = level + beside + layout_copies_bytes(held, place, backward=False)
        nodes.append(
            NodeLevel(place=place, peak_bytes=peak, kept_bytes=kept_bytes, joined_bytes=joined)
        )
        level -= goes[place]
        joined += may_go[place] - goes[place]
    return tuple(nodes)


def _last_reads(graph: CapturedBackward) -> tuple[dict[int, int], dict[int, int]]:
    """The node that reads each node's result last, and the node until which a list holds it."""
    last: dict[int, int] = {}
    listed: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        end = _module_end(graph, place) if operator_of(node.name) == _JOIN else 0
        for edge in node.inputs:
            if edge.node < 0 or graph.nodes[edge.node].is_leaf:
                continue
            maker = maker_of(graph, edge.node)
            last[maker] = max(last.get(maker, 0), place)
            listed[maker] = max(listed.get(maker, 0), end)
    return last, listed


def _module_end(graph: CapturedBackward, place: int) -> int:
    """The last node before the module that called this one returns."""
    own = graph.nodes[place].module
    if own < 0:
        return place
    outer = graph.modules[own]
    # The whole model goes by the name of its type, and everything is inside it.
    is_model = outer.path in ("", outer.type)
    for later in range(place + 1, len(graph.nodes)):
        module = graph.nodes[later].module
        if module < 0:
            return later - 1
        path = graph.modules[module].path
        if not (is_model or path == outer.path or path.startswith(f"{outer.path}.")):
            return later - 1
    return len(graph.nodes) - 1


# Bytes through a backward pass, node by node, as autograd runs them: the latest node first.
#
# A node holds the gradients of its results and what it kept while it computes the gradients of its
# inputs. Views and sums hand on the gradient that they received. A parameter takes over its
# gradient if nobody else holds it.

_HANDS_ON = VIEWS - {"slice", "select", "split", "splitwithsizes", "unbind", "unsafesplit", "chunk"}
_SUMS = ("add", "sub", "addcmul")
# Their gradients are as large and as wide as the result, until they are summed over what was
# broadcast and cast to their input's dtype.
_ELEMENTWISE_PRODUCTS = ("mul", "div")


class BackwardLevels(msgspec.Struct, frozen=True, kw_only=True):
    """Without parameters, optimizer state and all else that is there in every step."""

    kept_bytes: float  # when backward begins
    peak_bytes: float  # the highest level of backward
    gradients_bytes: float  # of the parameters, afterwards
    nodes: tuple[NodeLevel, ...] = ()  # in the order in which they run

    def at(self, place: int) -> float:
        """The highest level while a node runs; 0 for a node that does not."""
        return level_at(self.nodes, place)


class _Gradient:
    """One tensor that may be waiting at several nodes."""

    __slots__ = ("places", "size_bytes")

    def __init__(self, size_bytes: float) -> None:
        self.size_bytes = size_bytes
        self.places = 0


def replay_backward(held: HeldGraph, *, keeps_gradients: bool) -> BackwardLevels:
    """`keeps_gradients`: gradients are there before, and backward adds to them in place."""
    return _Backward(held, keeps_gradients=keeps_gradients).run()


class _Backward:
    def __init__(self, held: HeldGraph, *, keeps_gradients: bool) -> None:
        self.held, self.graph = held, held.graph
        self.keeps_gradients = keeps_gradients
        self.level = self.peak = self.kept = held.kept_bytes
        self.gradients = 0.0
        self.waiting: dict[tuple[int, int], _Gradient] = {}
        self.holders = [len(set(value.holders)) for value in held.values]
        self.kept_by: dict[int, list[int]] = defaultdict(list)
        self.of_block: dict[int, list[int]] = defaultdict(list)
        for number, value in enumerate(held.values):
            for holder in set(value.holders):
                self.kept_by[holder].append(number)
            if held.is_recomputed(value):
                self.of_block[held.block[value.holders[0]]].append(number)

    def run(self) -> BackwardLevels:
        kept, peak = self.level, self.level
        begun: set[int] = set()
        nodes = []
        for place in reversed(range(len(self.graph.nodes))):
            node = self.graph.nodes[place]
            if node.is_leaf:
                continue
            block = self.held.block[place]
            self.peak, left = self.level, self.kept
            if block != OUTSIDE and block not in begun:
                begun.add(block)
                values = (self.held.values[number] for number in self.of_block[block])
                self._rise(sum(map(self.held.bytes_of, values)))
            self._run_node(place, node)
            peak = max(peak, self.peak)
            nodes.append(
                NodeLevel(
                    place=place,
                    peak_bytes=self.peak,
                    kept_bytes=left,
                    gradients_bytes=self.gradients,
                )
            )
        return BackwardLevels(
            kept_bytes=kept,
            peak_bytes=peak,
            gradients_bytes=self.gradients,
            nodes=tuple(nodes),
        )

    def _rise(self, size_bytes: float) -> None:
        self.level += size_bytes
        self.peak = max(self.peak, self.level)

    def _run_node(self, place: int, node: GraphNode) -> None:
        received = [self.waiting.pop((place, number), None) for number in range(len(node.outputs))]
        if not any(received):  # the root: its gradient is a number
            received = [self._new(0.0)]
        self.peak = max(self.peak, self.level + before_gradient_bytes(self.held, place))
        handed = [
            (edge, *self._gradient_for(edge, (place, number), received))
            for number, edge in enumerate(node.inputs)
            if edge.node >= 0 and edge.output < len(self.graph.nodes[edge.node].outputs)
        ]
        for _, gradient, _ in handed:
            gradient.places += 1
        copies = layout_copies_bytes(self.held, place, backward=True)
        beside = beside_gradient_bytes(self.held, place)
        self.peak = max(self.peak, self.level + copies + beside)
        for arrived in received:
            self._release(arrived)
        for number in self.kept_by[place]:
            self.holders[number] -= 1
            if not self.holders[number]:
                value = self.held.values[number]
                size = self.held.bytes_of(value)
                self.level -= size
                self.kept -= 0.0 if self.held.is_recomputed(value) else size
        for edge, gradient, cast_bytes in handed:
            if abs(gradient.size_bytes - cast_bytes) >= 1:
                cast = self._new(cast_bytes)
                cast.places = 1
                self._release(gradient)
                gradient = cast
            self._hand_on(edge, gradient)

    def _gradient_for(
        self, edge: GraphEdge, read: tuple[int, int], received: list[_Gradient | None]
    ) -> tuple[_Gradient, float]:
        """The gradient of one input as the node computes it, and its size once it is cast to the
        input's dtype. `read` is the node and the number of the input."""
        place = read[0]
        width, target = self.held.widths[edge.node][edge.output], self.graph.nodes[edge.node]
        grows = 1.0 if is_of_parameter(self.graph, edge.node) else self.held.change.batch
        size = target.outputs[edge.output].elements * width * grows
        operator = operator_of(self.graph.nodes[place].name)
        first = next((gradient for gradient in received if gradient), None)
        hands_on = operator in _HANDS_ON or operator in _SUMS
        if hands_on and first and abs(first.size_bytes - size) < 1:
            return first, size
        if first and operator in _ELEMENTWISE_PRODUCTS:
            return self._new(max(first.size_bytes, size)), size
        computed = {AutocastRule.NARROW: NARROW, AutocastRule.FULL: FULL}.get(
            self.held.rules[place] if self.held.rules else AutocastRule.WIDEST, width
        )
        if read in self.held.change.wide_reads:
            computed = FULL
        is_cast = target.outputs[edge.output].dtype == "float32"
        return self._new(size * computed / width if is_cast else size), size

    def _new(self, size_bytes: float) -> _Gradient:
        gradient = _Gradient(size_bytes)
        self._rise(size_bytes)
        return gradient

    def _hand_on(self, edge: GraphEdge, gradient: _Gradient) -> None:
        key = edge.node, edge.output
        before = self.waiting.get(key)
        if before is None:
            self.waiting[key] = gradient
            if self.graph.nodes[edge.node].is_leaf and self.keeps_gradients:
                self._release(gradient)
            elif self.graph.nodes[edge.node].is_leaf:
                self.gradients += gradient.size_bytes
                if gradient.places > 1:
                    self._rise(gradient.size_bytes)
            return
        if before.places > 1:  # somebody else needs it as it is
            total = self._new(before.size_bytes)
            total.places = 1
            self._release(before)
            self.waiting[key] = total
        self._release(gradient)

    def _release(self, gradient: _Gradient | None) -> None:
        if gradient is None:
            return
        gradient.places -= 1
        if gradient.places <= 0:
            self.level -= gradient.size_bytes
            gradient.size_bytes = 0.0


# What backward needs for a moment beside gradients, for operators whose formulas are known.
#
# The gradient of a maximum is shared among the elements that equal it: PyTorch compares every
# element, and its sum over the mask first copies the mask to int64, before the gradient is made.
# The gradient of a softmax on a GPU begins with a product as large as the gradient. Neither depends
# on what autocast makes narrow.

_MASK_BYTES, _COUNT_BYTES = 1, 8  # of an element
# A maximum along one dimension keeps indices instead of its input, and needs no mask.
_SHARING = ("amax", "amin", "max", "min", "median", "nanmedian")
_SOFTMAX = ("softmax", "safesoftmax")


def before_gradient_bytes(held: HeldGraph, place: int) -> float:
    """While the gradient of the input is not there yet."""
    return _counted_elements(held, place) * (_MASK_BYTES + _COUNT_BYTES)


def beside_gradient_bytes(held: HeldGraph, place: int) -> float:
    """While the gradient of the input is computed."""
    node, product = held.graph.nodes[place], 0.0
    if held.device != "cpu" and operator_of(node.name) in _SOFTMAX and held.widths[place]:
        product = held.change.batch * _saved_elements(node, "result") * held.widths[place][0]
    return _counted_elements(held, place) * _MASK_BYTES + product


def _counted_elements(held: HeldGraph, place: int) -> float:
    """How many elements are compared and counted; 0 for other operators."""
    node = held.graph.nodes[place]
    if operator_of(node.name) not in _SHARING:
        return 0.0
    return held.change.batch * _saved_elements(node, "self")


def _saved_elements(node: GraphNode, field: str) -> int:
    return next((saved.elements for saved in node.saved if saved.field == field), 0)


# What cuDNN needs beside the tensors of a convolution.
#
# Tensor cores want channels last, in groups of 16 bytes. Tensors in torch's usual layout are copied
# for them: input and result in forward; in backward the gradient of the result, the input and its
# gradient. Kernels for plain fp32 take torch's layout, but some transform all tensors first
# (Winograd, Fourier): cuDNN chooses by shape, so another batch may need another algorithm.
#
# The backward of a convolution's backward (a penalty on gradients) gets the weight's gradient from
# a convolution over the samples: both tensors are copied with samples and channels exchanged first,
# in any precision.

_INPUT, _WEIGHT, _RESULT_GRADIENT = "input", "weight", "grad_output"
_SECOND_BACKWARD = "ConvolutionBackwardBackward"
# Bytes of cuDNN's Fourier transforms over those of the tensors: tiles of 32 x 32 points become 17
# columns of complex numbers, a filter of 3 x 3 taps a whole tile, a small map at most three times
# its size, beside a copy of it.
_TRANSFORMED_FILTERS, _TRANSFORMED_MAPS = 32 * 17 * 8 / (9 * 4), 4.0


def is_convolution(name: str) -> bool:
    return "convolution" in operator_of(name)


def layout_copies_bytes(held: HeldGraph, place: int, *, backward: bool) -> float:
    """0 if the convolution takes its tensors as they are."""
    layout = next((one for one in held.change.layout_copies if one.place == place), None)
    if layout is None:
        return 0.0
    given, result, weight = _tensor_bytes(held, place)
    is_second = _SECOND_BACKWARD in held.graph.nodes[place].name
    exchanged = given + result
    given *= filled_up(layout.inputs, held.widths[place][0])
    result *= filled_up(layout.outputs, held.widths[place][0])
    if is_second and backward:
        return exchanged + given + result
    edges = held.graph.nodes[place].inputs
    # What the second backward belongs to is a backward too, and runs when the graph is made.
    twice = is_second or (backward and bool(edges) and edges[0].node >= 0)
    return (1.0 + twice) * (given + weight) + result


def transforms_bytes(held: HeldGraph, place: int) -> float:
    """The workspace of a Fourier transform: what another algorithm may need."""
    given, result, weight = _tensor_bytes(held, place)
    return _TRANSFORMED_MAPS * (given + result) + _TRANSFORMED_FILTERS * weight


def _tensor_bytes(held: HeldGraph, place: int) -> tuple[float, float, float]:
    """Of its input, its result and its weight."""
    node, grown = held.graph.nodes[place], held.change.batch
    given, weight, gradient = (
        _saved_bytes(node, name, narrow=held.rules is not None)
        for name in (_INPUT, _WEIGHT, _RESULT_GRADIENT)
    )
    result = gradient or sum(out.elements for out in node.outputs) * held.widths[place][0]
    return given * grown, result * grown, weight


def _saved_bytes(node: GraphNode, field: str, *, narrow: bool) -> float:
    for saved in node.saved:
        if saved.field == field:
            width = NAME_BYTES.get(saved.dtype, 1)
            return saved.elements * (min(NARROW, width) if narrow else width)
    return 0.0


# What the passes hold besides what their backward graph accounts for.

_BEGIN, _FORWARD = "begin", "forward"


def states_bytes(captured: CapturedMemory) -> float:
    """What is there when forward ends, besides activations."""
    for end in captured.phases:
        if end.phase == _FORWARD and end.allocated_bytes is not None:
            return end.allocated_bytes - (end.categories.get("activations") or 0)
    return 0.0


def keeps_gradients(captured: CapturedMemory) -> bool:
    """Whether gradients are there when forward ends."""
    return bool(_gradients_after(captured, _FORWARD))


def old_gradients_bytes(captured: CapturedMemory, *, cleared_late: bool) -> float:
    """Gradients of the step before that forward holds and backward does not.

    A peak in forward shows them. Any other peak does not: then it counts whether the script clears
    them after forward (`cleared_late`).
    """
    left = _gradients_after(captured, _FORWARD)
    peak = captured.peak
    if peak is not None and peak.phase == _FORWARD:
        return max(0.0, (peak.categories.get("gradients") or 0) - left)
    return max(0.0, _gradients_after(captured, _BEGIN) - left) if cleared_late else 0.0


def batches_bytes(captured: CapturedMemory) -> float:
    """Of the batches that are still there when forward ends."""
    other = _other_after_forward(captured)
    return min(captured.batches_bytes, other) if other is not None else captured.batches_bytes


def outputs_bytes(captured: CapturedMemory) -> float:
    """Results that the script holds and backward does not need. They are there when forward ends;
    at the peak they count as temporaries, which the batch and workspaces do not."""
    peak, other = captured.peak, _other_after_forward(captured)
    at_peak = peak.categories.get("other") if peak is not None else None
    return max(0.0, other - at_peak) if other is not None and at_peak is not None else 0.0


def _other_after_forward(captured: CapturedMemory) -> float | None:
    held = {end.phase: end.categories for end in captured.phases}
    return (held.get(_FORWARD) or {}).get("other")


def _gradients_after(captured: CapturedMemory, phase: str) -> float:
    held = {end.phase: end.categories for end in captured.phases}
    return (held.get(phase) or {}).get("gradients") or 0.0
