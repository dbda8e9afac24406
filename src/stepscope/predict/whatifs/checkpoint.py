"""checkpoint=blocks|none: recompute the forward pass inside backward to save memory, or stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.predict.compiling.compiled_already import is_compiled
from stepscope.predict.declaration import ApplyStage, WhatIf
from stepscope.predict.edit import Selection, insert, remove, scale_calls
from stepscope.predict.outcome import Outcome, Refused, WrongValue, changed
from stepscope.predict.peaks import peak_of
from stepscope.records.figures import milliseconds
from stepscope.records.words import counted
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Ints, StepGraph
    from stepscope.predict.step_context import StepContext

# The first and last layers (embedding, head, loss) are outside the blocks. The blocks' part of the
# forward pass lies between the first and the last repetition of the commonest product.
_FEWEST_PRODUCTS = 2  # per block: nobody calls a single layer a block
# What torch.utils.checkpoint itself costs per block: saving and restoring random state, and its own
# Python (six models on an H200, 0.3 to 1.8 ms for both passes).
_FORWARD_NS, _BACKWARD_NS = 750_000.0, 750_000.0


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses to add what is there already, and to remove what is not."""
    if value == "none":
        return _stop_recomputing(context)
    if value == "blocks":
        return _recompute_blocks(context)
    raise WrongValue(f"checkpoint={value}: choose blocks or none")


def _label(value: str) -> str:
    labels = {"blocks": "checkpointing every block", "none": "no checkpointing"}
    return labels.get(value, f"checkpoint={value}" if value else "checkpoint")


WHATIF = WhatIf(
    name="checkpoint",
    help="recompute blocks in backward (blocks), or stop doing so (none)",
    label=_label,
    stage=ApplyStage.RECOMPUTE,
    apply=apply,
    usual=("none", "blocks"),
    saves_memory=("blocks",),
    joins_peak=True,
    remedies={"activation-checkpointing": ("blocks",), "no-checkpoint": ("none",)},
)


def _stop_recomputing(context: StepContext) -> Outcome:
    recomputed = _find_recomputed(context)
    if not recomputed.any():
        raise Refused("checkpoint=none: nothing is recomputed in this step")
    graph = context.graph
    launched = np.bincount(graph.tasks.call, minlength=len(graph.calls))
    gone = np.bincount(graph.tasks.call[recomputed], minlength=len(graph.calls))
    calls = (launched > 0) & (gone == launched)
    saved_ns = float(graph.tasks.dur_ns[recomputed].sum())
    without = remove(graph, Selection(calls=calls, tasks=recomputed))
    blocks = count_blocks(context)
    without = _shorten_host(without, Phase.FORWARD, blocks * _FORWARD_NS)
    without = _shorten_host(without, Phase.BACKWARD, blocks * _BACKWARD_NS)
    return Outcome(
        context=changed(context, without),
        assumptions=(
            f"{counted(int(recomputed.sum()), 'recomputed task')} "
            f"({milliseconds(saved_ns / 1e6)}) removed with their launches; memory grows by what "
            "was not kept",
        ),
        spread=0.06,
    )


def _recompute_blocks(context: StepContext) -> Outcome:
    graph = context.graph
    if _find_recomputed(context).any():
        raise Refused("checkpoint=blocks: the step recomputes already")
    first, last = _find_block_calls(context)
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
    before = backward[np.linspace(0, len(backward) - 1, len(inside)).astype(int)]
    order = np.arange(len(inside))[::-1]
    compiled = is_compiled(context)
    blocks = 0 if compiled else count_blocks(context)  # compiled code recomputes without Python
    repeated = insert(
        graph,
        before.astype(np.int32),
        gap_ns=calls.gap_ns[inside][order] + blocks * _BACKWARD_NS / len(inside),
        call_ns=calls.call_ns[inside][order],
        dur_ns=durations[order],
        stream=int(tasks.stream[0]) if len(tasks) else 0,
    )
    repeated = _shorten_host(repeated, Phase.FORWARD, -blocks * _FORWARD_NS)
    how = (
        "; the compiler recomputes inside its graphs, as with "
        "torch._functorch.config.activation_memory_budget = 0; a larger budget costs less"
    )
    change = replace(context.memory_change, recompute=True)
    after = replace(changed(context, repeated), memory_change=change)
    return Outcome(
        context=after,
        assumptions=(
            f"{counted(len(inside), 'launch', 'launches')} of the blocks' forward pass "
            f"({milliseconds(float(durations.sum()) / 1e6)}) run again inside backward; "
            f"embedding, head and loss do not{how if compiled else ''}",
        ),
        spread=0.08,
        peak=peak_of(after),
    )


def _find_recomputed(context: StepContext) -> Flags:
    recomputed: Flags = context.operators.recomputed & (context.task_phase == Phase.BACKWARD)
    return recomputed


def _shorten_host(graph: StepGraph, phase: Phase, saved_ns: float) -> StepGraph:
    """Take `saved_ns` from the gaps of a phase, but no more than half of them."""
    in_phase = graph.calls.phase == phase
    total = float(graph.calls.gap_ns[in_phase].sum())
    if not total:
        return graph
    return scale_calls(graph, in_phase, max(0.5, 1.0 - saved_ns / total))


def _find_block_calls(context: StepContext) -> tuple[int, int]:
    """First and last call between repetitions of the commonest products of the forward pass."""
    rows, _ = _find_block_products(context)
    if len(rows) < _FEWEST_PRODUCTS:
        return 0, -1
    in_block = np.isin(context.operators.row, np.concatenate(rows))
    calls = context.graph.tasks.call[in_block & (context.task_phase == Phase.FORWARD)]
    return int(calls.min()), int(calls.max())


def count_blocks(context: StepContext) -> int:
    """Some products run twice in each block: the rarest product counts the blocks."""
    _, counts = _find_block_products(context)
    return int(counts.min()) if len(counts) else 1


def _find_block_products(context: StepContext) -> tuple[list[Ints], Ints]:
    """The operators of each product that blocks are made of, and how often each runs."""
    operators, host = context.operators, context.trace.host
    rows = distinct(operators.row[(operators.flops > 0) & (context.task_phase == Phase.FORWARD)])
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
