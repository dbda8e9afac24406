"""Move the measured peak by what the backward graph says of another batch, another
precision, or recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from stepscope.explain.memory.captured import peak_at
from stepscope.predict.fitted import fitted
from stepscope.predict.peak_memory.backward_graph import OUTSIDE, MemoryChange, block_of_nodes
from stepscope.predict.peak_memory.passes import (
    GraphLevels,
    NodeLevel,
    batches_bytes,
    find_nearest,
    is_convolution,
    keeps_gradients,
    layout_copies_bytes,
    level_at,
    transforms_bytes,
)
from stepscope.records.memory import (
    BatchLine,
    CapturedCategories,
    CapturedMemory,
    GraphNode,
    Memory,
)
from stepscope.records.prediction import PeakMemory

# The measured peak of the passes has parts that the graph does not show, mostly workspaces. They
# belong to the operator that ran at the peak, and stay with it. The optimizer's
# step is a second candidate for the peak.

# Relative doubts: of what a change moves, and of the whole.
_MOVED, _WHOLE = fitted("doubts.memory_moved"), fitted("doubts.memory_between_runs")
# A compiler keeps less than eager code: between what products return and all of it.
_FUSED_SHARE = fitted("kernels.compiled_kept")
_OPTIMIZER = "optimizer"
_AROUND_UPDATE = ("backward", _OPTIMIZER)


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the two moments that may be highest."""

    passes_bytes: float
    step_bytes: float
    doubt_bytes: float = 0.0

    def highest(self) -> PeakMemory:
        size = max(self.passes_bytes, self.step_bytes)
        low = max(self.passes_bytes - self.doubt_bytes, self.step_bytes * (1 - _WHOLE))
        high = max(self.passes_bytes + self.doubt_bytes, self.step_bytes * (1 + _WHOLE))
        return PeakMemory(size_bytes=round(size), low_bytes=round(low), high_bytes=round(high))


def changed_peak(levels: GraphLevels, memory: Memory, change: MemoryChange) -> PeakMemory | None:
    """None without a graph, or if the script's own hooks hide a part of it."""
    captured = levels.captured
    if not levels.has_graph or memory.largest_batch is None:
        return None
    lines = memory.largest_batch.lines
    unfused = replace(change, fuse=False)
    present, doubt = _passes_at(lines, captured, change.batch, has_account=levels.has_account)
    if change.batch != 1.0:
        present = max(present, later_peak(levels, change.batch) or 0.0)
    then, workspace_doubt = passes_then(levels, present, unfused)
    if not change.moves_passes and change.batch == 1.0:
        workspace_doubt = 0.0  # as measured
    fusible = levels.level(unfused) - levels.level(change) if change.fuse else 0.0
    doubt += workspace_doubt + _MOVED * abs(then - present) + _WHOLE * present + 0.5 * fusible
    return Peaks(
        passes_bytes=then - fusible * (1 - _FUSED_SHARE),
        step_bytes=_step_bytes(captured, change),
        doubt_bytes=doubt,
    ).highest()


def _passes_at(
    lines: tuple[BatchLine, ...], captured: CapturedMemory, factor: float, *, has_account: bool
) -> tuple[float, float]:
    """The highest point of forward and backward at a multiple of the batch, and its doubt."""
    phase = captured.peak.phase if captured.peak else None
    chosen = [
        line
        for line in lines
        if (line.moment == "after forward" and not has_account)
        or (line.moment == "peak" and has_account and phase != _OPTIMIZER)
        or (line.moment.startswith("in ") and has_account and _OPTIMIZER not in line.moment)
    ]
    size, low, high = peak_at(tuple(chosen) or lines, factor)
    return float(size), float(max(size - low, high - size))


def _step_bytes(captured: CapturedMemory, change: MemoryChange) -> float:
    """The highest point of the optimizer's step: measured, or what is there before and after it
    and what its form needs in between."""
    peak = captured.peak
    if peak is not None and peak.phase == _OPTIMIZER and not change.other_update:
        return float(peak.allocated_bytes or _sum(peak.categories))
    held = [_sum(end.categories) for end in captured.phases if end.phase in _AROUND_UPDATE]
    return float(max(held, default=0) + change.update_bytes)


def _sum(categories: CapturedCategories) -> int:
    return sum(size or 0 for size in categories.values())


# The highest point of a changed step's forward and backward.
#
# The captured peak says how much was kept for backward then, and how many gradients there were:
# this names the node that ran. What was allocated beyond the graph's account is that node's
# workspace. It comes back where the node runs; blocks that run again are alike, so any of them may
# need as much. A narrow dtype halves it. A convolution in fp32 is another case: on tensor cores its
# algorithm is another one, which needs copies in another layout instead.

_FORWARD, _BACKWARD = "forward", "backward"
_NARROW_SHARE = 0.5  # of a workspace
# How far the captured peak may be from a node's account, relative to what forward kept.
_SAME = 0.01


class PeakWorkspace(msgspec.Struct, frozen=True, kw_only=True):
    """What the captured peak held beyond the graph's account."""

    size_bytes: float
    in_fp32_convolution: bool = False  # whose algorithm cuDNN chose


def passes_then(levels: GraphLevels, present: float, change: MemoryChange) -> tuple[float, float]:
    """The highest point with the change, given that of the present step, and the doubt about
    workspaces."""
    now, then = levels.backward(MemoryChange(batch=change.batch)), levels.backward(change)
    if not levels.has_account:
        return present + then.kept_bytes - now.kept_bytes, 0.0
    states = min(levels.states_bytes, present - now.peak_bytes)
    old = levels.old_gradients_bytes
    held, (outputs, outputs_doubt) = (
        levels.outputs_bytes(MemoryChange())[0],
        levels.outputs_bytes(change),
    )
    # In forward such a result counts where it is made and read, in backward beside the graph.
    before = states - held + old
    backward, doubt = _backward_then(levels, present - states, change)
    forward, forward_doubt = _forward_then(levels, present - before, change)
    backward, forward = states - held + outputs + backward, before + forward
    doubt = forward_doubt if forward > backward else doubt + outputs_doubt
    lowest = present if is_before_the_graph(levels) else 0.0
    return max(backward, forward, lowest), doubt


def is_before_the_graph(levels: GraphLevels) -> bool:
    """Whether nothing was kept for backward at the captured peak: the script prepared its batch,
    and no operator of the graph had run."""
    peak = levels.captured.peak
    if peak is None or peak.phase != _FORWARD:
        return False
    kept = levels.backward(MemoryChange()).kept_bytes
    return (peak.categories.get("activations") or 0) < _SAME * kept


def find_workspace(levels: GraphLevels) -> PeakWorkspace:
    """None of it if the peak was in the optimizer's step, or an account or a graph is missing. If
    no node fits, temporaries may be the workspace of any convolution."""
    peak = levels.captured.peak
    if peak is None or peak.allocated_bytes is None or peak.phase not in (_FORWARD, _BACKWARD):
        return PeakWorkspace(size_bytes=0.0)
    if not levels.has_graph or is_before_the_graph(levels):
        return PeakWorkspace(size_bytes=0.0)
    node = find_peak_node(levels, peak.phase)
    room = peak.allocated_bytes - levels.states_bytes
    if peak.phase == _FORWARD:
        room -= levels.old_gradients_bytes
        highest = highest_of(levels.forward(MemoryChange()))
    else:
        highest = levels.level(MemoryChange())
    size = max(0.0, room - (node.peak_bytes if node else highest))
    if node is not None:
        is_chosen = node.place in levels.fp32_convolutions
        return PeakWorkspace(size_bytes=size, in_fp32_convolution=is_chosen)
    size = min(size, peak.categories.get("temporaries") or 0)
    return PeakWorkspace(size_bytes=size, in_fp32_convolution=levels.traced.convolves_in_fp32)


def _backward_then(levels: GraphLevels, room: float, change: MemoryChange) -> tuple[float, float]:
    """Its highest level with the change, and the doubt about workspaces. `room` is what the present
    peak holds besides what is there in every step."""
    captured = levels.captured
    now, then = levels.backward(MemoryChange(batch=change.batch)), levels.backward(change)
    unseen = max(0.0, room - now.peak_bytes)
    if _phase(captured) == _FORWARD:
        return then.peak_bytes, 0.0
    node = find_peak_node(levels, _BACKWARD)
    if node is None or captured.graph is None:
        # What was not seen may be a convolution's workspace, which copies stand in for.
        as_it_is = levels.backward(replace(change, layout_copies=()))
        highest = max(then.peak_bytes, as_it_is.peak_bytes + _share(change) * unseen)
        return highest, 0.5 * unseen
    workspace = max(0.0, room - now.at(node.place))
    if _leaves_fp32(levels, node, change):
        return then.peak_bytes, _copies(levels, node, change, backward=True)
    in_block = change.recompute and block_of_nodes(captured.graph)[node.place] != OUTSIDE
    elsewhere = _share(change) * unseen if in_block else 0.0
    highest = max(then.peak_bytes + elsewhere, then.at(node.place) + _share(change) * workspace)
    return highest, 0.5 * unseen


def _forward_then(levels: GraphLevels, room: float, change: MemoryChange) -> tuple[float, float]:
    """Its highest level with the change, and the doubt about workspaces."""
    now, then = levels.forward(MemoryChange(batch=change.batch)), levels.forward(change)
    node = find_peak_node(levels, _FORWARD)
    # Forward was never higher than the captured peak.
    highest = highest_of(then) - max(0.0, highest_of(now) - room)
    joined = max(then, key=lambda level: level.peak_bytes).joined_bytes if then else 0.0
    if node is None:
        unseen = max(0.0, room - highest_of(now)) if _is_in_graph(levels, _FORWARD) else 0.0
        copies = highest_of(then) - highest_of(levels.forward(replace(change, layout_copies=())))
        return highest - copies + max(copies, _share(change) * unseen), joined
    if _leaves_fp32(levels, node, change):
        return highest, joined + _copies(levels, node, change, backward=False)
    workspace = room - level_at(now, node.place)
    own = level_at(then, node.place) + max(workspace, 0.0) * _share(change) + min(workspace, 0.0)
    return max(highest, own), joined if highest > own else 0.0


def _is_in_graph(levels: GraphLevels, phase: str) -> bool:
    return _phase(levels.captured) == phase and not is_before_the_graph(levels)


def _leaves_fp32(levels: GraphLevels, node: NodeLevel, change: MemoryChange) -> bool:
    """Whether the node at the peak is a convolution that gets another algorithm."""
    return bool(change.layout_copies) and node.place in levels.fp32_convolutions


def _copies(levels: GraphLevels, node: NodeLevel, change: MemoryChange, *, backward: bool) -> float:
    """The doubt about an algorithm that was not seen: its copies once more, or none."""
    return layout_copies_bytes(levels.hold(change), node.place, backward=backward)


def _share(change: MemoryChange) -> float:
    return _NARROW_SHARE if change.autocast else 1.0


def find_peak_node(levels: GraphLevels, phase: str) -> NodeLevel | None:
    """The node that ran at the captured peak, if that was in this phase and one fits. While an
    activation's result is kept and the next convolution runs, the same is kept: what is beyond the
    graph's account is then the convolution's."""
    captured = levels.captured
    peak = captured.peak
    if peak is None or peak.phase != phase:
        return None
    kept = peak.categories.get("activations") or 0
    nodes = captured.graph.nodes if captured.graph else ()
    within, likely = _SAME * kept, _convolutions(nodes)
    if phase == _FORWARD:
        return find_nearest(
            levels.forward(MemoryChange()), kept, None, within=within, likely=likely
        )
    gradients = None if keeps_gradients(captured) else peak.categories.get("gradients") or 0
    backward = levels.backward(MemoryChange()).nodes
    return find_nearest(backward, kept, gradients, within=within, likely=likely)


def _convolutions(nodes: Sequence[GraphNode]) -> frozenset[int]:
    """Places of operators that need a workspace."""
    return frozenset(place for place, node in enumerate(nodes) if is_convolution(node.name))


def highest_of(nodes: tuple[NodeLevel, ...]) -> float:
    return max((node.peak_bytes for node in nodes), default=0.0)


def _phase(captured: CapturedMemory) -> str | None:
    return captured.peak.phase if captured.peak else None


# The peak of the passes with another batch.
#
# With few samples, gradients outweigh the activations that are already gone, so the peak may be at
# another node of backward. Workspaces grow with the batch, except where cuDNN chose the algorithm
# of a convolution in fp32: some of what it transforms are weights, and another batch may get
# another algorithm. Half of such a workspace is taken to grow.

_FORWARD_PHASE, _OPTIMIZER_PHASE = "forward", "optimizer"
_GROWS = 0.5  # of a workspace whose algorithm cuDNN chose


def later_peak(levels: GraphLevels, factor: float) -> float | None:
    """Wherever in the passes it then is. None without a graph or an allocator's account of the
    peak."""
    captured, peak = levels.captured, levels.captured.peak
    if not levels.has_graph or peak is None:
        return None
    if peak.allocated_bytes is None or peak.phase == _OPTIMIZER_PHASE:
        return None
    grown = batches_bytes(captured) * (factor - 1.0)
    backward = _later_backward(levels, peak.allocated_bytes - levels.states_bytes, factor)
    if peak.phase != _FORWARD_PHASE:
        return levels.states_bytes + grown + backward
    held = levels.states_bytes + levels.old_gradients_bytes
    forward = _later_forward(levels, peak.allocated_bytes - held, factor)
    return grown + max(levels.states_bytes + backward, held + forward)


def unsure_workspace(levels: GraphLevels, factor: float) -> float:
    """What a workspace may add or not add to the peak, whose algorithm cuDNN chose."""
    workspace = find_workspace(levels)
    return (1 - _GROWS) * workspace.size_bytes * (factor - 1.0) * workspace.in_fp32_convolution


def other_algorithms_peak(levels: GraphLevels, factor: float) -> float:
    """The peak if cuDNN takes Fourier transforms for a convolution in fp32 that did without them;
    0 if there is no such convolution, or the batch is no larger. Strided ones cannot."""
    captured, convolutions = levels.captured, levels.traced.fp32_convolutions
    places = {one.place for one in convolutions if not one.strided}
    if not places or factor <= 1.0 or not levels.has_graph:
        return 0.0
    change = MemoryChange(batch=factor)
    held, standing = levels.hold(change), levels.states_bytes
    forward, backward = levels.forward(change), levels.backward(change).nodes
    levels_then = (
        *((node, standing + levels.old_gradients_bytes) for node in forward),
        *((node, standing) for node in backward),
    )
    grown = batches_bytes(captured) * (factor - 1.0)
    return grown + max(
        base + node.peak_bytes + transforms_bytes(held, node.place)
        for node, base in levels_then
        if node.place in places
    )


def _later_backward(levels: GraphLevels, room: float, factor: float) -> float:
    """`room` is what the captured peak holds besides what is there in every step."""
    now, then = (levels.backward(MemoryChange(batch=batch)) for batch in (1.0, factor))
    if levels.captured.peak and levels.captured.peak.phase == _FORWARD_PHASE:
        return then.peak_bytes
    node, workspace = find_peak_node(levels, "backward"), find_workspace(levels)
    if node is None or not workspace.in_fp32_convolution:
        unseen = room - now.peak_bytes
        return then.peak_bytes + (unseen * factor if unseen > 0 else unseen)
    own = then.at(node.place) + workspace.size_bytes * factor - unsure_workspace(levels, factor)
    return max(then.peak_bytes, own)


def _later_forward(levels: GraphLevels, room: float, factor: float) -> float:
    now, then = (levels.forward(MemoryChange(batch=batch)) for batch in (1.0, factor))
    node, workspace = find_peak_node(levels, _FORWARD_PHASE), find_workspace(levels)
    own = level_at(then, node.place) if node else highest_of(then)
    own += workspace.size_bytes * factor - unsure_workspace(levels, factor)
    # Forward was never higher than the captured peak.
    excess = max(0.0, highest_of(now) - room) * factor
    return max(highest_of(then) - excess, own)
