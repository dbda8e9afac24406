"""checkpoint=blocks|none: forward run again inside backward for memory, or no longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.call_tree import group
from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.predict.edit import Selection, insert, remove, scale_calls
from stepscope.predict.peaks import peak_with_checkpoints
from stepscope.predict.whatifs.outcome import Outcome, Refused, WrongValue, changed
from stepscope.records.words import counted
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Ints, StepGraph
    from stepscope.predict.step_context import StepContext

HELP = "recompute blocks in backward (blocks), or stop doing so (none)"
# The first and last layers (embedding, head, loss) are outside the blocks: what blocks hold of the
# forward pass is what runs between the first and the last repetition of the commonest product.
# torch.utils.checkpoint itself, for each block: random state saved and restored, and Python's way
# in and out (six models on an H200, between 0.3 and 1.8 ms together).
_FEWEST_PRODUCTS = 2  # of a block: a single layer is nobody's block
_FORWARD_NS, _BACKWARD_NS = 750_000.0, 750_000.0


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses to add what is there already, and to remove what is not."""
    if value == "none":
        return _none(context)
    if value == "blocks":
        return _blocks(context)
    raise WrongValue(f"checkpoint={value}: choose blocks or none")


def _none(context: StepContext) -> Outcome:
    again = context.operators.recomputed & (context.task_phase == Phase.BACKWARD)
    if not again.any():
        raise Refused("checkpoint=none: nothing is recomputed in this step")
    graph = context.graph
    launched = np.bincount(graph.tasks.call, minlength=len(graph.calls))
    hit = np.bincount(graph.tasks.call[again], minlength=len(graph.calls))
    calls = (launched > 0) & (hit == launched)
    saved = float(graph.tasks.dur_ns[again].sum())
    new = remove(graph, Selection(calls=calls, tasks=again))
    blocks = repetitions(context)
    new = _host_less(new, Phase.FORWARD, blocks * _FORWARD_NS)
    new = _host_less(new, Phase.BACKWARD, blocks * _BACKWARD_NS)
    return Outcome(
        context=changed(context, new),
        assumptions=(
            f"{int(again.sum())} recomputed tasks ({saved / 1e6:.2f} ms) removed with their "
            "launches; memory grows by what they did not keep",
        ),
        spread=0.06,
    )


def _blocks(context: StepContext) -> Outcome:
    graph = context.graph
    if (context.operators.recomputed & (context.task_phase == Phase.BACKWARD)).any():
        raise Refused("checkpoint=blocks: the step recomputes already")
    first, last = _inside_blocks(context)
    forward = np.flatnonzero(
        (graph.calls.phase == Phase.FORWARD) & (graph.calls.kind == CallKind.LAUNCH)
    )
    inside = forward[(forward >= first) & (forward <= last)]
    backward = np.flatnonzero(graph.calls.phase == Phase.BACKWARD)
    if not len(inside) or not len(backward):
        raise Refused("checkpoint=blocks: no repeated blocks were found in the forward pass")
    calls, tasks = graph.calls, graph.tasks
    durations = np.bincount(tasks.call, tasks.dur_ns, len(calls)).astype(np.float64)[inside]
    # A block runs again right before its own backward: last block first.
    place = backward[np.linspace(0, len(backward) - 1, len(inside)).astype(int)]
    order = np.arange(len(inside))[::-1]
    stream = int(tasks.stream[0]) if len(tasks) else 0
    blocks = repetitions(context)
    new = insert(
        graph,
        place.astype(np.int32),
        gap_ns=calls.gap_ns[inside][order] + blocks * _BACKWARD_NS / len(inside),
        call_ns=calls.call_ns[inside][order],
        dur_ns=durations[order],
        stream=stream,
    )
    new = _host_less(new, Phase.FORWARD, -blocks * _FORWARD_NS)
    return Outcome(
        context=changed(context, new),
        assumptions=(
            f"{counted(len(inside), 'launch', 'launches')} of the blocks' forward pass "
            f"({durations.sum() / 1e6:.2f} ms) "
            "run again inside backward; embedding, head and loss do not",
        ),
        spread=0.08,
        peak=peak_with_checkpoints(context),
    )


def _host_less(graph: StepGraph, phase: Phase, saved_ns: float) -> StepGraph:
    """The gaps of a phase shorter by so much together, none by more than half."""
    mine = graph.calls.phase == phase
    total = float(graph.calls.gap_ns[mine].sum())
    if not total:
        return graph
    return scale_calls(graph, mine, max(0.5, 1.0 - saved_ns / total))


def _inside_blocks(context: StepContext) -> tuple[int, int]:
    """First and last call between repetitions of the commonest products of the forward pass."""
    of, calls = context.operators, context.graph.tasks.call
    rows, _ = _repeated(context)
    if len(rows) < _FEWEST_PRODUCTS:
        return 0, -1
    mine = calls[np.isin(of.row, np.concatenate(rows)) & (context.task_phase == Phase.FORWARD)]
    return int(mine.min()), int(mine.max())


def repetitions(context: StepContext) -> int:
    """How many blocks: some products run twice in each of them."""
    _, counts = _repeated(context)
    return int(counts.min()) if len(counts) else 1


def _repeated(context: StepContext) -> tuple[list[Ints], Ints]:
    """The operators of every product that blocks are made of, and how often each runs."""
    of, host = context.operators, context.trace.host
    rows = distinct(of.row[(of.flops > 0) & (context.task_phase == Phase.FORWARD)])
    if not len(rows):
        return [], np.zeros(0, np.int32)
    key = host.name[rows].astype(np.int64) << 32 | host.shapes[rows].astype(np.int64)
    _, place, count = group(key)
    counts = np.bincount(place, minlength=count)
    often = np.flatnonzero(_in_blocks(counts.astype(np.int32)))
    return [rows[place == each] for each in often], counts[often].astype(np.int32)


def _in_blocks(counts: Ints) -> Flags:
    """Products that run at least half as often as the commonest. If that one runs many times in a
    block, it is alone: then those whose number it is a multiple of."""
    most = int(counts.max())
    often: Flags = counts >= max(2, most // 2)
    if often.sum() >= _FEWEST_PRODUCTS:
        return often
    for blocks in distinct(counts[counts > 1]).tolist():
        inside: Flags = counts % blocks == 0
        if most % blocks == 0 and (counts == blocks).sum() >= _FEWEST_PRODUCTS:
            return inside
    return often
