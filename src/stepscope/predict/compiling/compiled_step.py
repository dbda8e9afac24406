"""An eager step as torch.compile would run it: its tasks with their new times.

Loops fuse along each pass (fused_loops.py). Products, convolutions and attention stay as they are;
around convolutions, changes of layout disappear. The optimizer is not compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.replay.graph import Phase
from stepscope.predict.by_text import by_text
from stepscope.predict.compiling.conv_layout import (
    is_conversion,
    is_own_depthwise,
    keeps_channels_last,
)
from stepscope.predict.compiling.fused_loops import fuse_loops
from stepscope.predict.compiling.mask_checks import (
    MASKED_LONGER,
    find_causal_attention,
    find_mask_checks,
)
from stepscope.predict.compiling.operator_values import CallValues, Way, describe_call
from stepscope.predict.compiling.padded_products import pad_products
from stepscope.predict.kernels import FLOOR_NS, MEMORY_SHARE, Family, roofline_ns
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.flops.call import Call
    from stepscope.explain.replay.graph import Flags, Floats, Ints
    from stepscope.predict.compiling.fused_loops import FusedLoop
    from stepscope.predict.step_context import StepContext

# Where shapes were not recorded: what elementwise work and norms of GPT-2 small on an H200 kept.
UNKNOWN_SHARE = 0.45
_START_NS = 1_500.0  # of each loop
# Sums over all rows read few rows at a time: 1.7 to 3 TB/s on an H200, others 3.2 to 4.4 TB/s.
_SUMS_LONGER = 1.8
# An element that is added to memory takes as long as moving so many bytes: 70 to 140 billion per
# second on an H200. PyTorch's own kernels for the same are often faster.
_ADD_BYTES = 48
_MAIN_KERNEL = 0.5  # of the operator's time
_DTYPE_OF_CONVOLUTIONS = ("tf32", "fp32", "bf16", "fp16")


class CompiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """Per task of the eager step."""

    dur_ns: Floats  # of a fused loop: all at its first task
    gone: Flags  # launched no more
    by_shapes: Flags  # fused along known shapes; others that may fuse are a guess
    checks: Flags  # per call: a look at a mask, which compiled code does not take
    calls: int  # of Triton kernels and libraries, in both passes
    launches: int  # of both passes: libraries launch several kernels per call
    casts: int  # of forward: calls that only change a dtype, as autocast makes them
    fused_loops: int  # loops of more than one operator
    channels_last: bool  # convolutions change their layout
    saved_bytes: float  # not moved any more, of all loops


def compile_step(context: StepContext) -> CompiledStep:
    """What the compiler would make of the forward and the backward pass."""
    dur_ns = context.graph.tasks.dur_ns.copy()
    gone = np.zeros(len(dur_ns), np.bool_)
    by_shapes = np.zeros(len(dur_ns), np.bool_)
    fused, casts, saved = 0, 0, 0.0
    made_calls = _calls_without_operator(context)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        calls = _calls_of(context, phase)
        made_calls += sum(call.way != Way.LOOP for call in calls.values)
        if phase == Phase.FORWARD:
            casts = sum(call.converts for call in calls.values)
        for loop in fuse_loops(calls.values, backward=phase == Phase.BACKWARD):
            tasks = np.concatenate([calls.tasks[place] for place in loop.calls])
            by_shapes[tasks] = True
            made_calls += loop.kernels
            fused += len(loop.calls) > 1
            before = float(context.operators.bytes_moved[tasks].clip(0).sum())
            new_ns = _loop_ns(context, calls, loop, tasks)
            if new_ns is None:
                continue
            saved += max(0.0, before - loop.bytes_moved)
            kept = tasks[: loop.kernels]
            dur_ns[kept] = new_ns / max(1, len(kept))
            gone[tasks[loop.kernels :]] = True
    channels_last = _change_layout(context, dur_ns, gone)
    passes = (context.task_phase == Phase.FORWARD) | (context.task_phase == Phase.BACKWARD)
    checks = find_mask_checks(context)
    if checks.any():
        whole = find_causal_attention(context) & (context.operators.share > _MAIN_KERNEL)
        dur_ns[whole] *= MASKED_LONGER
    return CompiledStep(
        dur_ns=np.where(gone, 0.0, pad_products(context, dur_ns)),
        gone=gone,
        by_shapes=by_shapes,
        checks=checks,
        calls=made_calls,
        launches=int((passes & ~gone).sum()),
        casts=casts,
        fused_loops=fused,
        channels_last=channels_last,
        saved_bytes=saved,
    )


def _calls_without_operator(context: StepContext) -> int:
    """What other what-ifs have added, as casts."""
    phase = context.task_phase
    passes = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD)
    return int((passes & (context.operators.row < 0)).sum())


class _PassCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one pass that launch something, in order."""

    values: Sequence[CallValues]
    tasks: Sequence[Ints]


def _calls_of(context: StepContext, phase: Phase) -> _PassCalls:
    costs, row = context.costs, context.operators.row
    mine = np.flatnonzero((context.task_phase == phase) & (row >= 0))
    rows, first, which = np.unique(row[mine], return_index=True, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    groups = np.split(mine[order], np.flatnonzero(np.diff(which.reshape(-1)[order])) + 1)
    known: dict[int, CallValues | None] = {}
    values, tasks = [], []
    for place in np.argsort(first, kind="stable").tolist():
        signature = int(costs.signature[rows[place]])
        if signature not in known:
            known[signature] = _describe(context, signature)
        call = known[signature]
        if call is not None:
            values.append(call)
            tasks.append(groups[place].astype(np.int32))
    return _PassCalls(values=values, tasks=tasks)


def _describe(context: StepContext, signature: int) -> CallValues | None:
    if signature < 0:
        return CallValues(way=Way.ALONE)
    return describe_call(context.costs.calls[signature])


def _loop_ns(context: StepContext, calls: _PassCalls, loop: FusedLoop, tasks: Ints) -> float | None:
    """None: it stays as it is."""
    if not loop.kernels:
        return 0.0
    members = [calls.values[place] for place in loop.calls]
    if len(members) == 1 and members[0].single_as_eager:
        return None
    eager_ns = float(context.graph.tasks.dur_ns[tasks].sum())
    rate = MEMORY_SHARE * _bytes_s(context)
    paid_bytes = loop.bytes_moved + (_SUMS_LONGER - 1) * loop.sums_bytes + _ADD_BYTES * loop.added
    new_ns = loop.kernels * _START_NS + paid_bytes / rate * 1e9
    # Earlier what-ifs may have changed the times, as another precision does.
    traced_ns = _traced_ns(context, tasks)
    if traced_ns > 0:
        new_ns *= eager_ns / traced_ns
    costly = [
        calls.values[place].costly * float(context.graph.tasks.dur_ns[calls.tasks[place]].sum())
        for place in loop.calls
    ]
    new_ns = max([new_ns, *costly])
    return new_ns if loop.added else min(eager_ns, new_ns)


def _traced_ns(context: StepContext, tasks: Ints) -> float:
    rows = context.graph.tasks.row[tasks]
    return float(context.trace.device.dur_ns[rows[rows >= 0]].sum())


def _bytes_s(context: StepContext) -> float:
    ceilings = context.ceilings
    known = ceilings.bytes_s if ceilings else None
    return known or _best_rate(context)


def _best_rate(context: StepContext) -> float:
    """Without a known device: what the trace's own loops reach at best, as 0.8 of the peak."""
    operators, tasks = context.operators, context.graph.tasks
    loops = (operators.family == Family.OTHER) & (operators.bytes_moved > 1 << 22)
    loops &= tasks.dur_ns > 2 * FLOOR_NS
    if not loops.any():
        return 1e12
    rates = operators.bytes_moved[loops] * operators.share[loops] / tasks.dur_ns[loops]
    return float(np.quantile(rates, 0.9)) * 1e9 / MEMORY_SHARE


def _change_layout(context: StepContext, dur_ns: Floats, gone: Flags) -> bool:
    """Take away changes of layout around convolutions, if the compiler changes them itself."""
    operators, tasks, trace = context.operators, context.graph.tasks, context.trace
    convolution = operators.family == Family.CONVOLUTION
    if not convolution.any():
        return False
    if not keeps_channels_last(_forward_calls(context)):
        return False
    rows = np.where(convolution, tasks.row, -1)
    conversion = by_text(trace, trace.device.name, rows, is_conversion, False)
    gone |= conversion
    own = by_text(trace, trace.device.name, rows, is_own_depthwise, False)
    if own.any() and context.ceilings:
        _use_cudnn(context, own, dur_ns)
    return bool(conversion.any() or own.any())


def _forward_calls(context: StepContext) -> list[Call]:
    """Those of the forward pass that launch something."""
    row = context.operators.row
    rows = distinct(row[(context.task_phase == Phase.FORWARD) & (row >= 0)])
    signatures = context.costs.signature[rows]
    return [context.costs.calls[code] for code in signatures[signatures >= 0].tolist()]


def _use_cudnn(context: StepContext, own: Flags, dur_ns: Floats) -> None:
    """Depthwise convolutions at the rate that convolutions reach."""
    operators, ceilings = context.operators, context.ceilings
    if ceilings is None:
        return
    dtype = next((name for name in _DTYPE_OF_CONVOLUTIONS if name in ceilings.flops), None)
    if dtype is None:
        return
    whole = roofline_ns(
        Family.CONVOLUTION,
        operators.flops[own],
        operators.bytes_moved[own],
        dtype,
        ceilings,
        backward=False,
    )
    dur_ns[own] = np.minimum(dur_ns[own], whole * operators.share[own])
