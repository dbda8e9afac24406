"""checkpoint=blocks|none: recompute the forward pass inside backward to save memory, or stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.predict.declaration import (
    NothingToChange,
    Outcome,
    WrongValue,
    changed,
)
from stepscope.predict.peaks import peak_of
from stepscope.predict.step_context import StepContext, is_compiled
from stepscope.predict.step_spans import BlockSpan, find_block_spans
from stepscope.records.normal import median
from stepscope.step.edit import Selection, insert, remove
from stepscope.step.graph import CallKind, Phase
from stepscope.step.replay import step_ns
from stepscope.text.figures import milliseconds
from stepscope.text.words import counted
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.step.arrays import Int64s
    from stepscope.step.graph import Flags, Floats, Ints, StepGraph

# The first and last layers (embedding, head, loss) are outside the blocks. The blocks' part of the
# forward pass lies between the first and the last repetition of the commonest product.
_FEWEST_PRODUCTS = 2  # per block: nobody calls a single layer a block
# What torch.utils.checkpoint itself costs per block: saving and restoring random state, and its own
# Python (six models on an H200, 0.3 to 1.8 ms for both passes; 20 small blocks on an ARM core).
_PYTHON_NS = {Phase.FORWARD: 750_000.0, Phase.BACKWARD: 750_000.0}
_CPU_PYTHON_NS = {Phase.FORWARD: 190_000.0, Phase.BACKWARD: 330_000.0}
# Where it is known what the blocks keep: Python packs each tensor, packs it again when it is made
# again and unpacks it, nearly all in backward. A block of one operator costs the rest.
_KEPT_NS = {Phase.FORWARD: 4_000.0, Phase.BACKWARD: 21_000.0}
_BLOCK_NS = {Phase.FORWARD: 80_000.0, Phase.BACKWARD: 220_000.0}
_PYTHON_DOUBT = 0.3  # of these: hosts and versions of Python differ


def predict(context: StepContext, value: str) -> Outcome:
    """Refuses to add what is there already, and to remove what is not."""
    if value == "none":
        return _stop_recomputing(context)
    if value == "blocks":
        return _recompute_blocks(context)
    raise WrongValue(f"checkpoint={value}: choose blocks or none")


def _stop_recomputing(context: StepContext) -> Outcome:
    recomputed = _find_recomputed(context)
    count, saved_ns = _count_items(context, recomputed)
    if not count:
        raise NothingToChange("checkpoint=none: this step recomputes nothing")
    without = remove(context.graph, recomputed)
    for phase, python_ns in _python_of_blocks(context, count_blocks(context)).items():
        without = _shorten_host(without, phase, python_ns)
    what = counted(count, "recomputed call" if context.on_host else "recomputed task")
    return Outcome(
        context=changed(context, without),
        assumptions=(
            f"{what} ({milliseconds(saved_ns / 1e6)}) "
            f"removed{'' if context.on_host else ' with their launches'}. Memory grows by "
            "what backward then needs",
        ),
        spread=0.06,
    )


def _recompute_blocks(context: StepContext) -> Outcome:
    graph = context.graph
    if _count_items(context, _find_recomputed(context))[0]:
        raise NothingToChange("checkpoint=blocks: the step recomputes already")
    repeats = _find_repeats(context)
    backward = np.flatnonzero(graph.calls.phase == Phase.BACKWARD)
    if not len(repeats.calls) or not len(backward):
        raise NothingToChange("checkpoint=blocks: the forward pass has no repeated blocks")
    inside = repeats.calls[graph.calls.kind[repeats.calls] != CallKind.WAIT]
    again_ns = float(_durations_ns(context)[inside].sum())
    compiled = is_compiled(context)
    python_ns = {} if compiled else repeats.python_ns  # compiled code recomputes without Python
    repeated = _run_again(context, repeats, python_ns)
    slower_ns = {phase: (1.0 + _PYTHON_DOUBT) * ns for phase, ns in python_ns.items()}
    slower = _run_again(context, repeats, slower_ns)
    how = (
        ". The compiler recomputes inside its graphs, as with "
        "torch._functorch.config.activation_memory_budget = 0. A larger budget costs less"
    )
    change = replace(context.memory_change, recompute=True)
    after = replace(changed(context, repeated), memory_change=change)
    what = ("call", "calls") if context.on_host else ("launch", "launches")
    return Outcome(
        context=after,
        assumptions=(
            f"{counted(len(inside), *what)} of the blocks' forward pass "
            f"({milliseconds(again_ns / 1e6)}) run again during backward. "
            f"{repeats.others}{how if compiled else ''}",
        ),
        spread=0.08,
        doubt=math.log(max(1.0, step_ns(slower) / max(1.0, step_ns(repeated)))),
        peak=peak_of(after),
    )


def _run_again(
    context: StepContext, repeats: _Repeats, python_ns: Mapping[Phase, float]
) -> StepGraph:
    """With the launches, and the waits between them, and what Python takes for it."""
    graph, inside = context.graph, repeats.calls
    calls, tasks = graph.calls, graph.tasks
    repeated = insert(
        graph,
        repeats.before,
        gap_ns=_block_gaps(calls.gap_ns, inside) + python_ns.get(Phase.BACKWARD, 0.0) / len(inside),
        call_ns=calls.call_ns[inside],
        dur_ns=np.bincount(tasks.call, tasks.dur_ns, len(calls)).astype(np.float64)[inside],
        stream=int(tasks.stream[0]) if len(tasks) else 0,
        awaits=[calls.awaits[call] for call in inside.tolist()],
        tail_ns=calls.tail_ns[inside],
    )
    return _shorten_host(repeated, Phase.FORWARD, -python_ns.get(Phase.FORWARD, 0.0))


def _durations_ns(context: StepContext) -> Floats:
    """Of each call: on a CPU its own, else that of the tasks it launched."""
    calls, tasks = context.graph.calls, context.graph.tasks
    if context.on_host:
        return calls.call_ns
    launched: Floats = np.bincount(tasks.call, tasks.dur_ns, len(calls)).astype(np.float64)
    return launched


class _Repeats(msgspec.Struct, frozen=True, kw_only=True):
    """What runs again: calls of forward, and the call of backward before which each does."""

    calls: Ints
    before: Ints
    python_ns: dict[Phase, float]  # what torch.utils.checkpoint itself costs
    others: str  # what does not run again, in words


def _find_repeats(context: StepContext) -> _Repeats:
    """By the run's own graph of modules; else what lies between repetitions of the commonest
    products."""
    spans = [] if is_compiled(context) else find_block_spans(context)
    return _repeats_of_spans(context, spans) if spans else _repeats_of_products(context)


def _repeats_of_spans(context: StepContext, spans: Sequence[BlockSpan]) -> _Repeats:
    """A block runs again right before its own backward begins."""
    calls, host = context.graph.calls, context.trace.host
    forward = _computing_calls(context)
    starts = _starts_ns(context, forward)
    backward = np.flatnonzero((calls.phase == Phase.BACKWARD) & (calls.operator >= 0))
    creator = host.forward_of[calls.operator[backward]]
    backward, creator = backward[creator >= 0], creator[creator >= 0]
    created = host.start_ns[creator]
    inside: list[Ints] = []
    before: list[Ints] = []
    kept = 0
    for span in spans:
        again = forward[span.runs_again(starts)]
        own = backward[span.holds(created)]
        if len(again) and len(own):
            inside.append(again)
            before.append(np.full(len(again), own.min(), np.int32))
            kept += span.kept
    none = [np.zeros(0, np.int32)]
    return _Repeats(
        calls=np.concatenate(inside or none),
        before=np.concatenate(before or none),
        python_ns=_python_of_blocks(context, len(inside), kept),
        others="What lies outside the blocks does not, nor does the end of a block that backward "
        "does not need",
    )


def _starts_ns(context: StepContext, calls: Ints) -> Int64s:
    """On the trace's clock; a call that a what-if inserted starts with the next traced one."""
    host, row = context.trace.host, context.graph.calls.row[calls]
    known = np.where(row >= 0, host.start_ns[np.maximum(row, 0)], np.iinfo(np.int64).max)
    starts: Int64s = np.minimum.accumulate(known[::-1])[::-1]
    return starts


def _repeats_of_products(context: StepContext) -> _Repeats:
    first, last = _find_block_calls(context)
    forward = _computing_calls(context)
    inside = forward[(forward >= first) & (forward <= last)]
    backward = np.flatnonzero(context.graph.calls.phase == Phase.BACKWARD)
    # The last block runs again first; where exactly is not known.
    places = np.linspace(0, max(0, len(backward) - 1), len(inside)).astype(int)
    before = backward[places] if len(backward) else places
    return _Repeats(
        calls=inside[::-1].astype(np.int32),
        before=before.astype(np.int32),
        python_ns=_python_of_blocks(context, count_blocks(context)),
        others="Embedding, head and loss do not",
    )


def _computing_calls(context: StepContext) -> Ints:
    """Of the forward pass, with its waits for the device."""
    calls = context.graph.calls
    kinds = (CallKind.PLAIN,) if context.on_host else (CallKind.LAUNCH, CallKind.WAIT)
    chosen = (calls.phase == Phase.FORWARD) & np.isin(calls.kind, kinds)
    return np.flatnonzero(chosen).astype(np.int32)


def _block_gaps(gap_ns: Floats, repeated: Ints) -> Floats:
    """What comes before the first block (waiting for data, for example) is not repeated."""
    gaps: Floats = gap_ns[repeated]
    first = int(repeated.argmin())
    gaps[first] = min(gaps[first], median(gaps))
    return gaps


def _python_of_blocks(context: StepContext, blocks: int, kept: int = 0) -> dict[Phase, float]:
    """Of all blocks together, which keep so many tensors; 0 if that is not known."""
    if context.on_host or not kept:
        each = _CPU_PYTHON_NS if context.on_host else _PYTHON_NS
        return {phase: blocks * ns for phase, ns in each.items()}
    return {phase: blocks * ns + kept * _KEPT_NS[phase] for phase, ns in _BLOCK_NS.items()}


def _find_recomputed(context: StepContext) -> Selection:
    """What backward runs again; a launch goes with all of its tasks."""
    calls, tasks = context.graph.calls, context.graph.tasks
    if context.on_host:
        rows = np.maximum(calls.row, 0)
        again = (calls.row >= 0) & (calls.phase == Phase.BACKWARD)
        if len(context.trace.host):
            again &= context.costs.recomputed[rows]
        return Selection(calls=again, tasks=again[tasks.call])
    recomputed: Flags = context.operators.recomputed & (context.task_phase == Phase.BACKWARD)
    launched = np.bincount(tasks.call, minlength=len(calls))
    gone = np.bincount(tasks.call[recomputed], minlength=len(calls))
    return Selection(calls=(launched > 0) & (gone == launched), tasks=recomputed)


def _count_items(context: StepContext, chosen: Selection) -> tuple[int, float]:
    """Calls of a CPU, or tasks of a device: how many, and their time."""
    if context.on_host:
        return int(chosen.calls.sum()), float(context.graph.calls.call_ns[chosen.calls].sum())
    return int(chosen.tasks.sum()), float(context.graph.tasks.dur_ns[chosen.tasks].sum())


def _shorten_host(graph: StepGraph, phase: Phase, saved_ns: float) -> StepGraph:
    """Take `saved_ns` from the gaps of a phase, but no more than half of them."""
    gap_ns, in_phase = graph.calls.gap_ns, graph.calls.phase == phase
    total = float(gap_ns[in_phase].sum())
    if not total:
        return graph
    shorter = np.where(in_phase, gap_ns * max(0.5, 1.0 - saved_ns / total), gap_ns)
    return replace(graph, calls=replace(graph.calls, gap_ns=shorter))


def _find_block_calls(context: StepContext) -> tuple[int, int]:
    """First and last call between repetitions of the commonest products of the forward pass."""
    rows, _ = _find_block_products(context)
    if len(rows) < _FEWEST_PRODUCTS:
        return 0, -1
    operator, call = _forward_products(context)
    calls = call[np.isin(operator, np.concatenate(rows))]
    return int(calls.min()), int(calls.max())


def _forward_products(context: StepContext) -> tuple[Ints, Ints]:
    """Products of the forward pass: the operator's row, and the call that ran or launched it."""
    calls = context.graph.calls
    if context.on_host:
        flops = context.costs.flops
        forward = np.flatnonzero((calls.phase == Phase.FORWARD) & (calls.row >= 0))
        call = forward[flops[calls.row[forward]] > 0].astype(np.int32)
        return calls.row[call], call
    operators = context.operators
    products = (operators.flops > 0) & (context.task_phase == Phase.FORWARD)
    return operators.row[products], context.graph.tasks.call[products]


def count_blocks(context: StepContext) -> int:
    """Some products run twice in each block: the rarest product counts the blocks."""
    _, counts = _find_block_products(context)
    return int(counts.min()) if len(counts) else 1


def _find_block_products(context: StepContext) -> tuple[list[Ints], Ints]:
    """The operators of each product that blocks are made of, and how often each runs."""
    host = context.trace.host
    rows = distinct(_forward_products(context)[0])
    if not len(rows):
        return [], np.zeros(0, np.int32)
    key = host.name[rows].astype(np.int64) << 32 | host.shapes[rows].astype(np.int64)
    _, place, counts = np.unique(key, return_inverse=True, return_counts=True)
    often = np.flatnonzero(_is_in_blocks(counts.astype(np.int32)))
    return [rows[place.reshape(-1) == number] for number in often], counts[often].astype(np.int32)


def _is_in_blocks(counts: Ints) -> Flags:
    """Products that run at least half as often as the commonest one.

    If that one runs many times per block, it is alone. Then take the products whose count divides
    into it.
    """
    most = int(counts.max())
    often: Flags = counts >= max(2, most // 2)
    if often.sum() >= _FEWEST_PRODUCTS:
        return often
    for blocks in distinct(counts[counts > 1]).tolist():
        inside: Flags = counts % blocks == 0
        if most % blocks == 0 and (counts == blocks).sum() >= _FEWEST_PRODUCTS:
            return inside
    return often
