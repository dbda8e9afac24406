"""save-memory=TARGET: what cheap operators made is computed again in backward instead of kept.

The capture says which kinds of operators made the values that backward keeps, and how many of their
bytes can be had again from others that are kept. What those operators take in forward is paid once
more in backward. `save_memory(dry_run=True)` plans every value by itself and may find more: values
that start from a few small ones, and encodings.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.memory.lifetimes import BACKWARD
from stepscope.predict.declaration import Outcome, Refused, WrongValue, changed
from stepscope.records.change_values import MemoryTarget, read_target
from stepscope.records.memory import STATES, CapturedMemory
from stepscope.records.prediction import PeakMemory
from stepscope.records.trace import HostKind
from stepscope.step.call_tree import enclosing, outermost
from stepscope.step.edit import insert, select
from stepscope.step.graph import Phase
from stepscope.step.work import rows_named
from stepscope.text.figures import milliseconds, percent, size
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext
    from stepscope.step.graph import Ints, StepGraph

_WORTH = 0.02  # of the activations: less is not worth a plan
_DOMINATE = 4  # weights and optimizer state over activations
_MADE_AGAIN = 0.10  # of what is freed, at least: there at once while backward makes it again
_DOUBT = 0.35  # of what is freed
_COMPILED = "CompiledFunction"
_HEAVY_NOT_COUNTED = (
    "matmuls that may be repeated are not counted here. save_memory(model, dry_run=True, "
    "heavy=True) plans them",
)


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Values that one kind of operator made and that can be made again."""

    producer: str
    free_bytes: int
    tasks: Ints  # of forward, one after the other
    calls: int  # operators of forward
    again_ns: float  # what making the free ones again takes


def predict(context: StepContext, value: str) -> Outcome:
    """Refuses where nothing can be freed, with what to do instead."""
    try:
        target = read_target(value)
    except ValueError as error:
        raise WrongValue(f"save-memory={value}: {error}") from None
    captured = _captured(context)
    kinds = _kinds(context, captured)
    chosen = _choose(context, kinds, target)
    freed = sum(kind.free_bytes for kind in chosen)
    again_ns = sum(kind.again_ns for kind in chosen)
    return Outcome(
        context=changed(context, _again(context, chosen)),
        assumptions=(
            f"{size(freed)} of the activations "
            f"({', '.join(kind.producer for kind in chosen)}) are recomputed in backward, "
            f"which takes {milliseconds(again_ns / 1e6)} of the forward pass",
            *_advice(captured),
            *(_HEAVY_NOT_COUNTED if target.heavy else ()),
        ),
        spread=0.10,
        peak=_peak(context, chosen, _maybe_masks(captured)),
    )


def _captured(context: StepContext) -> CapturedMemory:
    inputs = context.analysis.inputs.memory
    if inputs.saving is not None:
        raise Refused("save-memory: this run already used it")
    captured = inputs.captured
    rows = captured.activations_by_producer if captured is not None else []
    if captured is None or not rows:
        raise Refused(
            "save-memory: the operators whose results are saved for backward were not "
            "captured. Record with `stepscope run`, or plan in the script: "
            "save_memory(model, dry_run=True)"
        )
    total = sum(row.bytes for row in rows)
    compiled = sum(row.bytes for row in rows if row.producer.startswith(_COMPILED))
    if compiled > total / 2:
        raise Refused(
            "save-memory: the model is compiled, and the compiler already frees this. "
            "save_memory(model, dry_run=True) plans its graphs before the first step"
        )
    if sum(row.free_bytes for row in rows) < _WORTH * total:
        advice = "".join(f". {words}" for words in _advice(captured))
        raise Refused(f"save-memory: nothing here is cheap to recompute{advice}")
    return captured


def _advice(captured: CapturedMemory) -> tuple[str, ...]:
    held = captured.peak.categories if captured.peak is not None else captured.categories
    states = sum(held.get(name) or 0 for name in STATES)
    kept = captured.categories.get("activations") or 0
    if states <= _DOMINATE * kept:
        return ()
    share = percent(kept / (states + kept))
    return (f"Weights dominate: activations are {share} of both. Shard the optimizer (zero=1)",)


def _kinds(context: StepContext, captured: CapturedMemory) -> list[_Kind]:
    """Those that free most for a nanosecond first."""
    found = []
    for row in captured.activations_by_producer:
        if not row.free_bytes:
            continue
        names = _operators(row.producer)
        chosen = select(context.graph, context.trace, names.__contains__, phase=int(Phase.FORWARD))
        tasks = np.flatnonzero(chosen.tasks).astype(np.int32)
        calls, forward_ns = len(tasks), float(context.graph.tasks.dur_ns[tasks].sum())
        if context.on_host:
            calls, forward_ns = _forward_calls(context, names)
        share = row.free_bytes / max(1, row.bytes)
        found.append(
            _Kind(
                producer=row.producer,
                free_bytes=row.free_bytes,
                tasks=tasks,
                calls=calls,
                again_ns=share * forward_ns,
            )
        )
    return sorted(found, key=lambda kind: -kind.free_bytes / max(1.0, kind.again_ns))


def _forward_calls(context: StepContext, names: frozenset[str]) -> tuple[int, float]:
    """How many operators with these names ran in the last step, outside backward, and how long; a
    part of an operator of the same set counts once."""
    trace, host = context.trace, context.trace.host
    operator = host.kind == HostKind.OPERATOR
    named = rows_named(trace, host, operator, names.__contains__)
    backward = rows_named(trace, host, operator, lambda name: name.startswith(BACKWARD))
    rows = np.flatnonzero(named)
    if context.steps.steps:
        last = context.steps.steps[-1]
        start = host.start_ns[rows]
        rows = rows[(start >= last.start_ns) & (start < last.start_ns + last.dur_ns)]
    rows = rows[nearest_of(host, backward, rows) < 0]
    rows = rows[outermost(enclosing(host, rows), np.zeros(len(rows), np.int32))]
    return len(rows), float(host.dur_ns[rows].sum())


def _operators(producer: str) -> frozenset[str]:
    """aten::native_layer_norm and aten::layer_norm of NativeLayerNorm."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", producer).lower()
    short = name.removeprefix("native_").removeprefix("cudnn_").removeprefix("miopen_")
    words = {name, short, f"_{name}", f"{short}_"}
    if producer == "ToCopy":
        words |= {"to", "_to_copy"}
    return frozenset(f"aten::{word}" for word in words)


def _choose(context: StepContext, kinds: list[_Kind], target: MemoryTarget) -> list[_Kind]:
    """As many as the time allows, or as few as the memory takes."""
    most_ns = None
    if target.max_slowdown is not None:
        most_ns = target.max_slowdown * _step_ns(context)
    enough = _wanted_bytes(context, target)
    chosen, freed, spent = list[_Kind](), 0, 0.0
    for kind in kinds:
        if enough is not None and freed >= enough:
            break
        if most_ns is not None and spent + kind.again_ns > most_ns:
            kind = _part(kind, max(0.0, most_ns - spent) / max(1.0, kind.again_ns))
        if kind.free_bytes:
            chosen.append(kind)
            freed += kind.free_bytes
            spent += kind.again_ns
    if not chosen:
        raise Refused(
            "save-memory: the step fits as it is, so nothing has to be freed"
            if enough is not None and enough <= 0
            else "save-memory: nothing can be recomputed within this time"
        )
    return chosen


def _part(kind: _Kind, share: float) -> _Kind:
    """Of the first layers only: their values stay longest."""
    return msgspec.structs.replace(
        kind,
        free_bytes=int(share * kind.free_bytes),
        tasks=kind.tasks[: round(share * len(kind.tasks))],
        calls=max(1, round(share * kind.calls)),
        again_ns=share * kind.again_ns,
    )


def _step_ns(context: StepContext) -> float:
    graph = context.graph
    host_ns = float((graph.calls.gap_ns + graph.calls.call_ns).sum())
    return max(host_ns, float(graph.tasks.dur_ns.sum()))


def _wanted_bytes(context: StepContext, target: MemoryTarget) -> float | None:
    """What has to go; None: as much as possible."""
    memory = context.memory
    wanted = []
    captured = context.analysis.inputs.memory.captured
    kept = (captured.categories.get("activations") or 0) if captured is not None else 0
    if target.reduce is not None:
        wanted.append(target.reduce * kept)
    if memory is not None and target.batch is not None:
        limit = target.budget_bytes or memory.limit_bytes or memory.peak_bytes
        wanted.append((memory.peak_bytes + (target.batch - 1) * kept - limit) / target.batch)
    elif memory is not None and target.budget_bytes is not None:
        wanted.append(memory.peak_bytes - target.budget_bytes)
    return max(wanted, default=None)


def _again(context: StepContext, chosen: list[_Kind]) -> StepGraph:
    """Each operator runs again right before its layer's backward: last layer first."""
    graph = context.graph
    backward = np.flatnonzero(graph.calls.phase == Phase.BACKWARD)
    tasks = np.sort(np.concatenate([kind.tasks for kind in chosen]))[::-1]
    if context.on_host and len(backward):
        again_ns = sum(kind.again_ns for kind in chosen)
        first = backward[:1].astype(np.int32)
        return insert(graph, first, gap_ns=again_ns, call_ns=0.0, dur_ns=0.0)
    if not len(backward) or not len(tasks):
        return graph
    whole_ns = float(graph.tasks.dur_ns[tasks].sum())
    share = sum(kind.again_ns for kind in chosen) / max(1.0, whole_ns)
    before = backward[np.linspace(0, len(backward) - 1, len(tasks)).astype(int)]
    calls = graph.tasks.call[tasks]
    return insert(
        graph,
        before.astype(np.int32),
        gap_ns=share * graph.calls.gap_ns[calls],
        call_ns=share * graph.calls.call_ns[calls],
        dur_ns=share * graph.tasks.dur_ns[tasks],
        stream=int(graph.tasks.stream[0]),
    )


def _maybe_masks(captured: CapturedMemory) -> int:
    """Bytes that no operator with a gradient made: masks of dropout, which fit into bits."""
    return sum(row.bytes for row in captured.activations_by_producer if not row.producer)


def _made_again(kind: _Kind) -> float:
    """Bytes of one layer: with few layers, a large part of what they free."""
    return kind.free_bytes * max(_MADE_AGAIN, 1 / max(1, kind.calls))


def _peak(context: StepContext, chosen: list[_Kind], masks: int) -> PeakMemory | None:
    """None where nobody knows; masks may go too."""
    memory = context.memory
    if memory is None:
        return None
    if memory.phase == "optimizer":
        # What is freed is gone by then.
        unchanged = memory.peak_bytes
        return PeakMemory(size_bytes=unchanged, low_bytes=unchanged, high_bytes=unchanged)
    less = sum(kind.free_bytes - _made_again(kind) for kind in chosen)
    return PeakMemory(
        size_bytes=round(memory.peak_bytes - less),
        low_bytes=round(max(0.0, memory.peak_bytes - less * (1 + _DOUBT) - masks)),
        high_bytes=round(memory.peak_bytes - less * (1 - _DOUBT)),
    )
