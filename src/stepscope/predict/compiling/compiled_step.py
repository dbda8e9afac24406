"""Predict an eager step as torch.compile would run it: its tasks with their new times,
convolutions' layout, padded matmuls and attention masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.flops.call import Call, Dims, Unknown
from stepscope.explain.memory.model import ATTENTION
from stepscope.predict.compiling.fused_loops import (
    CallValues,
    FusedLoop,
    Way,
    describe_call,
    fuse_loops,
)
from stepscope.predict.kernel_costs import (
    ALIGNED_BYTES,
    FLOOR_NS,
    MEMORY_SHARE,
    Family,
    copy_ns,
    roofline_ns,
)
from stepscope.predict.step_context import StepContext
from stepscope.predict.step_spans import find_before_training
from stepscope.predict.tensor_cores import find_alignment
from stepscope.records.dtypes import PEAK_BYTES, PEAKS
from stepscope.records.trace import HostKind
from stepscope.step.call_tree import by_text
from stepscope.step.graph import CallKind, Phase
from stepscope.step.work import rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from stepscope.step.graph import Flags, Floats, Ints

# Loops fuse along each pass (fused_loops.py). Products, convolutions and attention stay as they
# are; around convolutions, changes of layout disappear. The optimizer is not compiled.

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
    convolution = context.operators.family == Family.CONVOLUTION
    if not convolution.any():
        return False
    if not keeps_channels_last(_forward_calls(context)):
        return False
    conversion = convolution & context.kernels_named(CONVERSION.search)
    gone |= conversion
    own = convolution & context.kernels_named(_OWN_DEPTHWISE.search)
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


# Convolutions in compiled code: Inductor keeps their tensors in channels-last order.
#
# The rule is that of `decide_layout_opt` in torch/_inductor/graph.py (torch 2.13): not for grouped
# convolutions, except depthwise ones, not with a convolution that halves its channels, not if all
# have few of them, and not for a graph with 300 nodes per convolution.

_CONVOLUTION = lazy_pattern(r"conv")
_FEW = 64  # channels
_MOST_NODES = 300  # per convolution
_NODES_PER_KERNEL = 3  # of a graph: views and conversions launch nothing
# Kernels that only change a tensor's layout around a convolution, and PyTorch's own kernels: with
# channels last, cuDNN's are used.
CONVERSION = lazy_pattern(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|convertTensor_kernel")
_OWN_DEPTHWISE = lazy_pattern(r"conv_depthwise[23]d_")


def keeps_channels_last(calls: Sequence[Call]) -> bool:
    """Whether the compiler would change the layout of a model whose forward makes these calls."""
    weights = [shapes for call in calls if (shapes := _shapes(call)) is not None]
    if _NODES_PER_KERNEL * len(calls) >= _MOST_NODES * len(weights):
        return False
    if any(_is_grouped(given, weight) or _halves(weight) for given, weight in weights):
        return False
    return not all(max(weight[:2]) <= _FEW for _, weight in weights)


def _shapes(call: Call) -> tuple[Dims, Dims] | None:
    """Of a convolution's input and weight, if both are over a plane."""
    if not _CONVOLUTION.search(call.name) or "backward" in call.name:
        return None
    try:
        given, weight = call.tensor(0).dims, call.tensor(1).dims
    except Unknown:
        return None
    return (given, weight) if len(weight) == 4 == len(given) else None


def _is_grouped(given: Dims, weight: Dims) -> bool:
    """A depthwise convolution has one channel per group."""
    return given[1] > weight[1] > 1


def _halves(weight: Dims) -> bool:
    return 2 * weight[0] <= weight[1] and weight[2] > 1


# Matrix products in tf32 or 16 bits with unaligned rows: Inductor pads them where that pays.

_NARROW = tuple(PEAKS.index(name) for name in ("bf16", "fp16"))
_TF32 = (PEAKS.index("tf32"),)


def pad_products(context: StepContext, dur_ns: Floats) -> Floats:
    """As aligned products take, and what they move once more, if that is shorter."""
    operators = context.operators
    narrow = np.isin(operators.dtype, _NARROW)
    if context.memory_change.autocast:
        narrow |= ~find_before_training(context)
    moved = np.where(np.isin(operators.dtype, _NARROW), 1.0, 0.5) * operators.bytes_moved.clip(0)
    padded = _pad(context, dur_ns, narrow, moved, "bf16")  # fp16 has the same peak
    tf32 = np.isin(operators.dtype, _TF32) & ~narrow
    return _pad(context, padded, tf32, operators.bytes_moved.clip(0), "tf32")


def _pad(
    context: StepContext,
    dur_ns: Floats,
    chosen: Flags,
    moved: Floats,
    peak: str,
) -> Floats:
    operators, ceilings = context.operators, context.ceilings
    product = (operators.family == Family.MATMUL) & (operators.flops > 0) & chosen
    if ceilings is None or peak not in ceilings.flops or not product.any():
        return dur_ns
    unaligned = product & (find_alignment(context, PEAK_BYTES[peak]) < ALIGNED_BYTES)
    padded = dur_ns.copy()
    backward = context.task_phase == Phase.BACKWARD
    for in_backward in (False, True):
        mine = unaligned & (backward == in_backward)
        whole = roofline_ns(
            Family.MATMUL,
            operators.flops[mine],
            moved[mine],
            peak,
            ceilings,
            backward=in_backward,
        ) + copy_ns(moved[mine], ceilings)
        padded[mine] = np.minimum(dur_ns[mine], whole * operators.share[mine])
    return padded


# Masks that eager code leaves out after a look at them, and compiled code cannot.
#
# Libraries ask the device whether a mask masks anything, and call attention without one if not, for
# causal attention with its flag alone. A compiler cannot ask: there the question disappears, the
# mask is passed, and causal attention computes the half that it would skip.

_QUESTION = "aten::is_nonzero"
_MASK, _CAUSAL = 3, 5  # arguments of attention
_PRODUCTS = (Family.MATMUL, Family.CONVOLUTION, Family.ATTENTION)
# Half of the square, and the blocks on the diagonal as a whole: 1.8 to 2.2 on an H200 for lengths
# of 512 and 1024.
MASKED_LONGER = 1.9


def find_mask_checks(context: StepContext) -> Flags:
    """Calls of forward that wait for the answer about a tensor of the device, before the first
    product: what is asked is about inputs."""
    host, calls, tasks = context.trace.host, context.graph.calls, context.graph.tasks
    operators = host.kind == HostKind.OPERATOR
    questions = rows_named(context.trace, host, operators, _QUESTION.__eq__)
    asks = nearest_of(host, questions, calls.row) >= 0
    asks &= (calls.kind == CallKind.WAIT) & (calls.phase == Phase.FORWARD)
    products = tasks.call[np.isin(context.operators.family, _PRODUCTS)]
    if len(products):
        asks &= np.arange(len(calls)) < products.min()
    found: Flags = asks
    return found


def find_causal_attention(context: StepContext) -> Flags:
    """Tasks of attention that is causal by its flag, without a mask, in both passes."""
    return _find_attention(context, causal=True)


def find_plain_attention(context: StepContext) -> Flags:
    """The same for attention to everything."""
    return _find_attention(context, causal=False)


def _find_attention(context: StepContext, *, causal: bool) -> Flags:
    trace, graph = context.trace, context.graph
    host, calls = trace.host, graph.calls
    operators = host.kind == HostKind.OPERATOR
    attention = rows_named(trace, host, operators, ATTENTION.__eq__)
    rows = np.flatnonzero(attention)
    wanted = by_text(trace, host.concrete, rows, _is_causal, False) == causal
    wanted &= ~by_text(trace, host.shapes, rows, _has_mask, False)
    attention[rows[~wanted]] = False
    inside = nearest_of(host, attention, calls.row) >= 0
    inside |= nearest_of(host, attention, context.created_by) >= 0
    found: Flags = inside[graph.tasks.call] & (context.operators.family == Family.ATTENTION)
    return found


def _is_causal(concrete: str) -> bool:
    values = msgspec.json.decode(concrete)
    return len(values) > _CAUSAL and values[_CAUSAL] == "True"


def _has_mask(shapes: str) -> bool:
    given = msgspec.json.decode(shapes)
    return len(given) > _MASK and bool(given[_MASK])
