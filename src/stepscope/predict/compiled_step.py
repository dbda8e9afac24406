"""Predict an eager step as torch.compile would run it: its tasks with their new times,
convolutions' layout, padded matmuls, attention masks, and the host's time for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.flops.call import Call, Dims, Unknown
from stepscope.explain.memory.model import ATTENTION
from stepscope.predict.fitted import fitted
from stepscope.predict.fused_loops import (
    CallValues,
    FusedLoop,
    Way,
    describe_call,
    fuse_loops,
)
from stepscope.predict.kernel_costs import (
    ALIGNED_BYTES,
    COMPILED_SPACING_NS,
    FLOOR_NS,
    LAUNCH_NS,
    MEMORY_SHARE,
    PER_NODE_NS,
    Family,
    copy_ns,
    roofline_ns,
    with_durations,
)
from stepscope.predict.step_context import StepContext
from stepscope.predict.step_spans import find_before_training
from stepscope.predict.tensor_cores import find_alignment
from stepscope.records.dtypes import PEAK_BYTES, PEAKS
from stepscope.records.normal import median, quantile
from stepscope.records.trace import HostKind
from stepscope.step.call_tree import by_text
from stepscope.step.edit import Selection, remove, scale_calls
from stepscope.step.graph import CallKind, Calls, Phase, StepGraph
from stepscope.step.replay import step_ns
from stepscope.step.work import rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from stepscope.step.graph import Flags, Floats, Ints

# Loops fuse along each pass (fused_loops.py). Products, convolutions and attention stay as they
# are; around convolutions, changes of layout disappear. The optimizer is not compiled.

# Where shapes were not recorded: what elementwise work and norms keep of their time.
UNKNOWN_SHARE = fitted("kernels.fused_unknown_share")
_START_NS = fitted("kernels.fused_start_ns")  # of each loop
_SUMS_LONGER = fitted("kernels.fused_sums")  # sums over all rows read few rows at a time
# An element that is added to memory takes as long as moving so many bytes. PyTorch's own kernels
# for the same are often faster.
_ADD_BYTES = fitted("kernels.fused_add_bytes")
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
    passes = (context.task_phase == Phase.FORWARD) | (context.task_phase == Phase.BACKWARD)
    made_calls = int((passes & (context.operators.row < 0)).sum())  # added, as casts
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
            known[signature] = CallValues(way=Way.ALONE)
            if signature >= 0:
                known[signature] = describe_call(costs.calls[signature])
        call = known[signature]
        if call is not None:
            values.append(call)
            tasks.append(groups[place].astype(np.int32))
    return _PassCalls(values=values, tasks=tasks)


def _loop_ns(context: StepContext, calls: _PassCalls, loop: FusedLoop, tasks: Ints) -> float | None:
    """None: it stays as it is."""
    if not loop.kernels:
        return 0.0
    members = [calls.values[place] for place in loop.calls]
    if len(members) == 1 and members[0].single_as_eager:
        return None
    eager_ns = float(context.graph.tasks.dur_ns[tasks].sum())
    ceilings = context.ceilings
    rate = MEMORY_SHARE * ((ceilings.bytes_s if ceilings else None) or _best_rate(context))
    paid_bytes = loop.bytes_moved + (_SUMS_LONGER - 1) * loop.sums_bytes + _ADD_BYTES * loop.added
    new_ns = loop.kernels * _START_NS + paid_bytes / rate * 1e9
    # Earlier what-ifs may have changed the times, as another precision does.
    rows = context.graph.tasks.row[tasks]
    traced_ns = float(context.trace.device.dur_ns[rows[rows >= 0]].sum())
    if traced_ns > 0:
        new_ns *= eager_ns / traced_ns
    costly = [
        calls.values[place].costly * float(context.graph.tasks.dur_ns[calls.tasks[place]].sum())
        for place in loop.calls
    ]
    new_ns = max([new_ns, *costly])
    return new_ns if loop.added else min(eager_ns, new_ns)


def _best_rate(context: StepContext) -> float:
    """Without a known device: what the trace's own loops reach at best, as 0.8 of the peak."""
    operators, tasks = context.operators, context.graph.tasks
    loops = (operators.family == Family.OTHER) & (operators.bytes_moved > 1 << 22)
    loops &= tasks.dur_ns > 2 * FLOOR_NS
    if not loops.any():
        return 1e12
    rates = operators.bytes_moved[loops] * operators.share[loops] / tasks.dur_ns[loops]
    return quantile(rates, 0.9) * 1e9 / MEMORY_SHARE


def _change_layout(context: StepContext, dur_ns: Floats, gone: Flags) -> bool:
    """Take away changes of layout around convolutions, if the compiler changes them itself."""
    convolution = context.operators.family == Family.CONVOLUTION
    if not convolution.any():
        return False
    costs, row = context.costs, context.operators.row
    launching = distinct(row[(context.task_phase == Phase.FORWARD) & (row >= 0)])
    signatures = costs.signature[launching]
    forward = [costs.calls[code] for code in signatures[signatures >= 0].tolist()]
    if not keeps_channels_last(forward):
        return False
    conversion = convolution & context.kernels_named(CONVERSION.search)
    gone |= conversion
    own = convolution & context.kernels_named(_OWN_DEPTHWISE.search)
    rates = context.ceilings.flops if context.ceilings else {}
    dtype = next((name for name in _DTYPE_OF_CONVOLUTIONS if name in rates), None)
    if own.any() and context.ceilings and dtype:  # at the rate that convolutions reach
        operators = context.operators
        whole = roofline_ns(
            Family.CONVOLUTION,
            operators.flops[own],
            operators.bytes_moved[own],
            dtype,
            context.ceilings,
            backward=False,
        )
        dur_ns[own] = np.minimum(dur_ns[own], whole * operators.share[own])
    return bool(conversion.any() or own.any())


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
    for given, weight in weights:
        is_grouped = given[1] > weight[1] > 1  # a depthwise one has one channel per group
        halves = 2 * weight[0] <= weight[1] and weight[2] > 1
        if is_grouped or halves:
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
# Half of the square, and the blocks on the diagonal as a whole.
MASKED_LONGER = fitted("kernels.masked_attention")


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
    return find_plain_attention(context, causal=True)


def find_plain_attention(context: StepContext, *, causal: bool = False) -> Flags:
    """The same for attention to everything."""
    trace, graph = context.trace, context.graph
    host, calls = trace.host, graph.calls
    operators = host.kind == HostKind.OPERATOR
    attention = rows_named(trace, host, operators, ATTENTION.__eq__)
    rows = np.flatnonzero(attention)

    def is_causal(concrete: str) -> bool:
        values = msgspec.json.decode(concrete)
        return len(values) > _CAUSAL and values[_CAUSAL] == "True"

    def has_mask(shapes: str) -> bool:
        given = msgspec.json.decode(shapes)
        return len(given) > _MASK and bool(given[_MASK])

    wanted = by_text(trace, host.concrete, rows, is_causal, False) == causal
    wanted &= ~by_text(trace, host.shapes, rows, has_mask, False)
    attention[rows[~wanted]] = False
    inside = nearest_of(host, attention, calls.row) >= 0
    inside |= nearest_of(host, attention, context.created_by) >= 0
    found: Flags = inside[graph.tasks.call] & (context.operators.family == Family.ATTENTION)
    return found


# The host's time for a compiled step.
#
# A compiled pass is Python code that calls its kernels one by one. The eager step shows the host's
# pace: its time per operator, where one that launches something counts as several of those that do
# not (views, allocations). A compiled pass takes as long as a few such operators per launch, more
# per parameter (its checks, its casts and those of its gradient, its products), and many per graph
# that is entered: guards, autograd, and making tensors of the results. As CUDA graphs, entering and
# a few per gradient are left.
#
# The pace of a host changes from one moment to the next, by a deviation of 0.13 of its logarithm
# among the measured eager steps, and the compiled step runs at another moment. So an unusual pace
# is taken as half the moment's, and half of it is doubtful.

# In operators of the eager step that launch nothing.
_EAGER_LAUNCH = fitted("host.compiled_eager_launch")  # more than other operators
_LAUNCH, _ENTRY = fitted("host.compiled_launch"), fitted("host.compiled_entry")
_LAUNCH_ALONE = fitted("host.compiled_launch_alone")  # where the parameters are not known
_GRADIENT, _PARAMETER = fitted("host.compiled_gradient"), fitted("host.compiled_parameter")
_CAST_PARAMETER = fitted("host.compiled_cast_parameter")
_MANY_CASTS = 0.25  # per parameter: autocast casts weights, and leaves norms alone
_USUAL_NS = fitted("host.compiled_usual_ns")  # per operator
_KEPT = fitted("host.compiled_pace_kept")  # how much of an unusual pace stays
_CALL_DOUBT = fitted("doubts.compiled_host")
_LONGEST = 20.0  # median launches: the rest of a longer gap is no launching, and stays


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    graph: StepGraph
    launches: int  # of both eager passes
    branches: int  # that split the compiled graphs
    share: float  # of the eager passes' host time
    doubt: float  # about the step's logarithm, as far as this host time decides it


def relaunch(context: StepContext, compiled: CompiledStep, *, graphed: bool) -> HostTimes:
    """The step with the compiled tasks and calls; `graphed` launches each graph as one."""
    graph = with_durations(context.graph, compiled.dur_ns)
    calls, before = graph.calls, in_passes(graph.calls)
    eager_ns = _host_ns(calls, before)
    eager = count_operators(context)
    # The eager step's time per operator that launches nothing, over the usual. Only calls that the
    # trace has count, not those that other what-ifs added.
    passes = (calls.phase == Phase.FORWARD) | (calls.phase == Phase.BACKWARD)
    traced = passes & (calls.row >= 0)
    operators = eager.operators + _EAGER_LAUNCH * int((before & (calls.row >= 0)).sum())
    seen_ns = _host_ns(calls, traced) / max(1.0, operators)
    unusual = math.log(seen_ns / _USUAL_NS) if seen_ns > 0 else 0.0
    operator_ns = _USUAL_NS * math.exp(_KEPT * unusual)
    doubt = math.hypot(_CALL_DOUBT, (1 - _KEPT) * unusual)
    # Calls that launched only tasks that are gone, and those that looked at a mask.
    launched = np.bincount(graph.tasks.call, minlength=len(calls))
    gone = np.bincount(graph.tasks.call[compiled.gone], minlength=len(calls))
    empty = (launched > 0) & (gone == launched)
    graph = remove(graph, Selection(calls=empty | compiled.checks, tasks=compiled.gone))
    after = in_passes(graph.calls)
    graphs = len(distinct(graph.calls.phase[after])) * (1 + eager.branches)
    parameters = context.parameters.tensors if context.parameters else 0
    fixed_ns = operator_ns * (_ENTRY * graphs + _GRADIENT * parameters)
    per_launch = _LAUNCH if parameters else _LAUNCH_ALONE
    is_cast = compiled.casts >= _MANY_CASTS * parameters
    per_parameter = _CAST_PARAMETER if is_cast else _PARAMETER
    calls_ns = operator_ns * (per_launch * compiled.launches + per_parameter * parameters)
    wanted_ns = operator_ns * _ENTRY * graphs + calls_ns
    if graphed:
        wanted_ns = min(wanted_ns, fixed_ns + graphs * LAUNCH_NS + compiled.calls * PER_NODE_NS)
        graph = _close_up(graph, after[graph.tasks.call])
    if not eager.operators:
        wanted_ns = eager_ns
    waits_ns = np.where(after, _other_ns(graph.calls), 0.0)
    left_ns = _host_ns(graph.calls, after)
    factor = wanted_ns / left_ns if left_ns > 0 else 1.0
    launching = scale_calls(_without_gaps(graph, waits_ns), after, factor)
    slower = scale_calls(launching, after, math.exp(2 * doubt))
    graph, slower = (_without_gaps(one, -waits_ns) for one in (launching, slower))
    now_ns = step_ns(graph)
    return HostTimes(
        graph=graph,
        launches=int(before.sum()),
        branches=eager.branches,
        share=wanted_ns / eager_ns if eager_ns > 0 else 1.0,
        # Two deviations away a host that just keeps up may yet pace the step.
        doubt=0.5 * math.log(max(1.0, step_ns(slower) / now_ns)) if now_ns > 0 else 0.0,
    )


def is_paced_by_host(graph: StepGraph) -> bool:
    """Whether launching takes longer than all that is launched."""
    return graph.host_ns > graph.device_ns


def in_passes(calls: Calls) -> Flags:
    """Launches of the forward and the backward pass."""
    passes = (calls.phase == Phase.FORWARD) | (calls.phase == Phase.BACKWARD)
    launches: Flags = passes & (calls.kind == CallKind.LAUNCH)
    return launches


def _host_ns(calls: Calls, chosen: Flags) -> float:
    """Spent on launching."""
    return float((calls.gap_ns - _other_ns(calls) + calls.call_ns)[chosen].sum())


def _other_ns(calls: Calls) -> Floats:
    """The part of each gap that is something else: data, logging, a pause."""
    launching = in_passes(calls)
    if not launching.any():
        return np.zeros(len(calls))
    typical = median((calls.gap_ns + calls.call_ns)[launching])
    other: Floats = np.maximum(calls.gap_ns - _LONGEST * typical, 0.0)
    return other


def _without_gaps(graph: StepGraph, gaps_ns: Floats) -> StepGraph:
    return replace(graph, calls=replace(graph.calls, gap_ns=graph.calls.gap_ns - gaps_ns))


def _close_up(graph: StepGraph, tasks: Flags) -> StepGraph:
    """Kernels of a graph follow each other closely."""
    spacing = graph.tasks.spacing_ns
    spacing = np.where(tasks, np.minimum(spacing, COMPILED_SPACING_NS), spacing)
    return replace(graph, tasks=replace(graph.tasks, spacing_ns=spacing))


# What the host did in the eager passes: operators that it ran, and branches on their results.
#
# An eager trace has all operators, views among them. The host's time per operator shows how fast it
# runs PyTorch's code, whatever the model.

_BRANCH = "aten::is_nonzero"


class EagerOperators(msgspec.Struct, frozen=True, kw_only=True):
    """Of the forward and the backward pass."""

    operators: int
    # Python asks whether a tensor of the host is true, and a compiler cannot know the answer.
    # Questions about the device's tensors stay out: they are mostly checks of a library's, which
    # leaves them out when it is compiled.
    branches: int


def count_operators(context: StepContext) -> EagerOperators:
    """Between the first and the last traced call of both passes."""
    host, calls = context.trace.host, context.graph.calls
    passes = (calls.phase == Phase.FORWARD) | (calls.phase == Phase.BACKWARD)
    rows = calls.row[passes & (calls.row >= 0)]
    if not len(rows):
        return EagerOperators(operators=0, branches=0)
    start = host.start_ns[rows]
    inside: Flags = (host.kind == HostKind.OPERATOR) & np.isin(host.thread, host.thread[rows])
    inside &= (host.start_ns >= start.min()) & (host.start_ns <= start.max())
    branch = rows_named(context.trace, host, inside, _BRANCH.__eq__)
    on_device = nearest_of(host, branch, calls.row[calls.row >= 0])
    branch[on_device[on_device >= 0]] = False
    return EagerOperators(operators=int(inside.sum()), branches=int(branch.sum()))


# A compiled step whose graphs are replayed as CUDA graphs: one launch for each of them.
#
# What the host does before a graph's first kernel stays: guards, and entering the compiled code.
# Each later kernel no longer needs a call of its own.

_REGION_MARKS = ("Torch-Compiled Region", "CompiledFunction")


def find_compiled_launches(context: StepContext) -> Flags:
    """Calls that compiled code makes."""
    calls, trace = context.graph.calls, context.trace
    inside = by_text(
        trace,
        trace.host.name,
        calls.operator,
        lambda name: any(mark in name for mark in _REGION_MARKS),
        False,
    )
    found: Flags = inside & (calls.kind == CallKind.LAUNCH)
    return found


def launch_as_graphs(context: StepContext, launches: Flags) -> StepGraph:
    """`launches` of one operator are one graph; a call that waits between them splits it."""
    graph = context.graph
    calls, tasks = graph.calls, graph.tasks
    owner = np.where(launches, calls.operator, -1)
    first = launches & (owner != np.concatenate(([-1], owner[:-1])))
    later = launches & ~first
    gap_ns = np.where(later, 0.0, calls.gap_ns)
    call_ns = np.where(launches, PER_NODE_NS, calls.call_ns) + LAUNCH_NS * first
    closed_up = _close_up(graph, later[tasks.call])
    return replace(closed_up, calls=replace(calls, gap_ns=gap_ns, call_ns=call_ns))
