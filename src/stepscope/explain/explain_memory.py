"""One rank's memory, from the best source there is, with theory and the largest batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.memory.batch import UNKNOWN_POOLS, find_largest, is_known_to_grow
from stepscope.explain.memory.captured import capture_lines, is_account, memory_of_capture
from stepscope.explain.memory.growth import growth_of_steps
from stepscope.explain.memory.model import find_batch, find_transformer
from stepscope.explain.memory.theory import make_theory, transformer_activations
from stepscope.explain.replay.graph_launches import has_graphs
from stepscope.records.strategies import RankFullySharded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.explain.memory.model import StepCalls
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.memory import (
        BatchLine,
        CapturedMemory,
        LargestBatch,
        LimitFrom,
        Memory,
        Theory,
    )
    from stepscope.records.rank_inputs import MemoryInputs
    from stepscope.records.strategies import RankStrategy
    from stepscope.records.trace import Trace

POOLS_NOT_RECORDED = (
    "CUDA graphs ran, and the trace does not show what their private pools hold. So the peak is a "
    "lower bound; fragmentation and the largest batch are not known (record with `stepscope run`)"
)

_HIDDEN = (
    "save_memory holds what is saved for backward: it is in its plan, not among the activations, "
    "and the largest batch is not known"
)


def explain_memory(analysis: RankAnalysis) -> Memory | None:
    """None where neither a capture nor the trace recorded memory."""
    trace, inputs = analysis.trace, analysis.inputs.memory
    captured = inputs.captured if inputs.captured and is_account(inputs.captured) else None
    if captured is None and not len(trace.memory):
        return None
    from stepscope.explain.memory.traced import memory_of_trace

    traced = memory_of_trace(trace, analysis.steps)
    calls = analysis.forward_calls if captured is not None or traced is not None else None
    cast_bytes = calls.cast_bytes if calls else 0
    if captured is not None:
        memory = memory_of_capture(captured)
        lines = capture_lines(captured, cast_bytes)
        if traced is not None:
            memory = replace(
                memory,
                timeline=traced.memory.timeline,
                by_site=traced.memory.by_site,
                growth=traced.memory.growth or memory.growth,
            )
    elif traced is not None:
        memory, lines = traced.memory, traced.lines(cast_bytes)
        if has_graphs(trace):
            memory, lines = _without_pools(memory), ()
    else:
        return None
    limit, limit_from = _limit(trace, memory, inputs)
    memory = replace(
        memory,
        growth=growth_of_steps(inputs.step_bytes) or memory.growth,
        limit_bytes=limit,
        saving=inputs.saving,
        theory=_theory(memory, captured, calls, analysis.strategies),
    )
    if inputs.saving is not None:
        return replace(memory, notes=(*memory.notes, _HIDDEN))
    in_pools = captured.pools_unknown_bytes or 0 if captured is not None else 0
    if in_pools and not is_known_to_grow(lines, in_pools):
        return replace(memory, notes=(*memory.notes, UNKNOWN_POOLS))
    return replace(memory, largest_batch=_largest(lines, calls, memory, limit_from))


def _without_pools(memory: Memory) -> Memory:
    """A trace does not tell the pools of CUDA graphs from memory that is free."""
    return replace(memory, fragmentation=None, notes=(*memory.notes, POOLS_NOT_RECORDED))


def _limit(
    trace: Trace, memory: Memory, inputs: MemoryInputs
) -> tuple[int | None, LimitFrom | None]:
    """The given limit, else the device's memory; a trace does not record that of a CPU."""
    if inputs.limit_bytes is not None:
        return inputs.limit_bytes, "given"
    if memory.device == "cpu":
        return None, None
    used = set(trace.device.device.tolist()) or {0}
    sizes = [device.memory_bytes for device in trace.devices if device.id in used]
    limit = min((size for size in sizes if size > 0), default=None)
    return limit, "device" if limit else None


def _largest(
    lines: tuple[BatchLine, ...],
    calls: StepCalls | None,
    memory: Memory,
    limit_from: LimitFrom | None,
) -> LargestBatch | None:
    if not any(line.scaling_bytes for line in lines):
        return None
    batch, batch_from = (find_batch(calls) if calls else None) or (None, None)
    used = memory.peak_bytes / memory.reserved_bytes if memory.reserved_bytes else 0.0
    return find_largest(
        lines,
        batch=batch,
        batch_from=batch_from,
        batches_per_step=calls.batches_per_step if calls else None,
        limit_bytes=memory.limit_bytes,
        limit_from=limit_from,
        held_back=max(0.0, 1 - used) if used else 0.0,
    )


def _theory(
    memory: Memory,
    captured: CapturedMemory | None,
    calls: StepCalls | None,
    strategies: Iterable[RankStrategy],
) -> Theory | None:
    """Only for a model whose parameters are known, in a step that trains it."""
    largest = captured.categories if captured else memory.categories
    parameters, gradients, optimizer = (
        largest.get(name) for name in ("parameters", "gradients", "optimizer")
    )
    if not captured and gradients is not None:
        gradients = parameters  # at a trace's peak they may just have been released
    if not parameters or gradients is None or optimizer is None:
        return None
    model = find_transformer(calls) if calls else None
    measured = largest.get("activations")
    return make_theory(
        (parameters, gradients, optimizer),
        sharding=_sharding(strategies),
        activations=transformer_activations(model, measured) if model and measured else None,
    )


def _sharding(strategies: Iterable[RankStrategy]) -> tuple[int, int] | None:
    for strategy in strategies:
        if isinstance(strategy, RankFullySharded) and strategy.groups and strategy.groups[0].size:
            return strategy.stage, strategy.groups[0].size
    return None
