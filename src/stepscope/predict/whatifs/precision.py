"""precision=tf32|bf16|fp16|fp8: matrix products in another dtype.

tf32 changes the products alone. bf16 and fp16 are autocast's: products, attention and most
elementwise work in half the bytes, norms and losses in fp32, plus casts: each weight once per step
and its gradient back, and what norms pass on to products. Casts cost the host time, so a step that
waits for its host becomes slower.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.predict.autocast import (
    NORM,
    find_unfused_attention,
    fuse_attention,
    may_convolve_in_tf32,
    retime_elements,
)
from stepscope.predict.declaration import (
    NothingToChange,
    Outcome,
    Refused,
    WrongValue,
    changed,
    require_operators,
)
from stepscope.predict.kernel_costs import (
    Family,
    copy_ns,
    retime_tasks,
    roofline_ns,
    with_durations,
)
from stepscope.predict.operator_library import ProbedStep, find_probed
from stepscope.predict.peaks import peak_of
from stepscope.predict.step_context import StepContext, is_compiled, launch_ns
from stepscope.predict.step_spans import find_before_training
from stepscope.predict.tensor_cores import (
    find_alignment,
    find_convolution_doubt,
    find_convolution_ns,
    find_depthwise,
    find_depthwise_doubt,
    find_halfway_doubt,
    find_halfway_ns,
    find_sample_convolutions,
    narrow_depthwise,
)
from stepscope.records.dtypes import PEAKS
from stepscope.records.hardware import Ceilings
from stepscope.step.call_tree import by_text, tensor_shapes
from stepscope.step.edit import insert
from stepscope.step.graph import CallKind, Phase
from stepscope.text.figures import milliseconds
from stepscope.text.words import counted, lazy_pattern
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.step.graph import Flags, Floats, StepGraph

    Shape = tuple[int, ...]

_SPREAD = 0.12  # of what is modelled
_DTYPES = (*PEAKS, "")  # code -1 is an unknown dtype
_WIDER = {
    "tf32": ("fp32",),
    "bf16": ("fp32", "tf32"),
    "fp16": ("fp32", "tf32"),
    "fp8": ("fp32", "tf32", "bf16", "fp16"),
}
_LOSS = lazy_pattern(r"^aten::_?log_softmax$|^aten::cross_entropy|^aten::nll_loss_forward$")
# What autocast costs the host per operator of the forward pass, counted for both passes, as
# multiples of the step's mean host time per launch: a product's weights are cast, and what a norm
# reads and returns. Products of two results find them cast; experts' weights are no results.
_PRODUCT_HOST, _CONVOLUTION_HOST, _NORM_HOST = 1.9, 2.2, 2.0
_READS_PRODUCTS = lazy_pattern(r"bmm|attention|flash_attn", re.IGNORECASE)
_FOURIER = lazy_pattern(r"fft|_complex")
# Recurrent layers are many small products in sequence: they gain this much, whatever their FLOPs.
_RECURRENT_GAIN = {"tf32": 2.0}
_NARROW_RECURRENT_GAIN = 3.5


def predict(context: StepContext, value: str) -> Outcome:
    """Refuses if no product runs in a wider dtype, or the device has no rate for this one."""
    if value not in _WIDER:
        raise WrongValue(f"precision={value}: choose one of {', '.join(_WIDER)}")
    if context.on_host:
        return _apply_on_host(context, value)
    ceilings = context.ceilings
    if ceilings is None or value not in ceilings.flops:
        device = ceilings.device if ceilings else context.trace.device_name or "this device"
        raise Refused(f"precision={value}: the {value} rate of {device} is unknown")
    require_operators(context, f"precision={value}")
    stays = find_before_training(context) & (value != "tf32")  # outside of autocast
    wide = _find_wide(context, value) & ~stays
    depthwise = wide & find_depthwise(context)
    product = wide & (context.operators.flops > 0) & ~depthwise
    if not product.any():
        raise NothingToChange(f"precision={value}: no matmul runs in a wider dtype than {value}")
    probed, problem = find_probed(context, value)
    modelled_share = probed.modelled_share if probed else 1.0
    convolution_ns = np.where(product, find_convolution_ns(context, value, ceilings), 0.0)
    halfway = find_sample_convolutions(context) & (convolution_ns > 0)
    if halfway.any():
        halfway_ns = find_halfway_ns(context, value, ceilings, convolution_ns)
        convolution_ns = np.where(halfway, halfway_ns, convolution_ns)
    graph = _speed_up_products(context, product, convolution_ns, value, ceilings)
    assumptions = [
        f"matmuls reach the share of {value}'s peak that such matmuls reached on an H200"
    ]
    if convolution_ns.any():
        assumptions.append("convolutions take as long as cuDNN's of these shapes took on an H200")
    if value != "tf32":
        graph = retime_elements(context, graph, wide, ~product & ~depthwise)
        dur_ns = np.where(stays, context.graph.tasks.dur_ns, graph.tasks.dur_ns)
        graph = with_durations(graph, dur_ns)
        graph, depthwise = narrow_depthwise(context, graph, depthwise, ceilings)
    is_probed = probed.known if probed else np.zeros(len(graph.tasks), np.bool_)
    depthwise_doubt = find_depthwise_doubt(graph.tasks.dur_ns, depthwise & ~is_probed)
    if probed:
        probed_ns = context.graph.tasks.dur_ns * probed.factor
        dur_ns = np.where(is_probed, probed_ns, graph.tasks.dur_ns)
        graph = with_durations(graph, dur_ns)
    graph = retime_tasks(context.graph, graph.tasks.dur_ns, context.operators.row)
    convolution = (convolution_ns > 0) & ~is_probed
    convolution_doubt = math.hypot(
        find_convolution_doubt(graph.tasks.dur_ns, convolution & ~halfway),
        find_halfway_doubt(context, graph.tasks.dur_ns, halfway & convolution),
    )
    other_share = _share_of_change(context, graph, ~is_probed, ~convolution)
    others = ~is_probed & ~convolution
    cancelling_doubt = _SPREAD * _cancelling_share(context.graph, graph, others)
    if value != "tf32":
        graph, said = _under_autocast(context, graph, value, product, probed)
        assumptions += said
    if stays.any():
        assumptions.append(
            f"{counted(int(stays.sum()), 'kernel')} without gradients before the training "
            "pass stay outside autocast, as now"
        )
    assumptions += [problem] if problem else []
    assumptions += [probed.describe("modelled")] if probed else []
    return _with_peak(
        Outcome(
            context=changed(context, graph),
            assumptions=tuple(assumptions),
            spread=_SPREAD * modelled_share * other_share,
            doubt=math.hypot(
                probed.error * (1.0 - modelled_share) if probed else 0.0,
                depthwise_doubt,
                cancelling_doubt,
                convolution_doubt,
            ),
        ),
        value,
    )


def _under_autocast(
    context: StepContext, graph: StepGraph, value: str, product: Flags, probed: ProbedStep | None
) -> tuple[StepGraph, list[str]]:
    """With fused attention and casts; and what was assumed. Probed times have their casts in
    them."""
    ceilings = context.ceilings
    assert ceilings is not None
    is_probed = probed.known if probed else np.zeros(len(graph.tasks), np.bool_)
    attention = find_unfused_attention(context) if value != "fp8" else []
    graph = fuse_attention(graph, attention, value, ceilings, is_probed)
    unfused = product.copy()
    for call in attention:
        unfused[np.concatenate(call.tasks)] = False
    measured_ns = probed.host_added_ns if probed else None
    host_ns = _autocast_ns(context, unfused)
    if measured_ns is not None:  # a call alone differs from one in a step: the mean counts
        host_ns = (host_ns + max(0.0, measured_ns)) / 2
    modelled_share = probed.modelled_share if probed else 1.0
    graph, casts = _add_casts(context, graph, host_ns, ceilings, modelled_share)
    where = "of weights " if is_compiled(context) else ""
    said = [
        "autocast: what follows a matmul has half the bytes. Norms and losses stay FP32. "
        f"{casts:,} casts {where}are added, with their launches"
    ]
    if measured_ns is not None:
        said.append(
            f"autocast costs {milliseconds(host_ns / 1e6)} more CPU time. This is the "
            "mean of what was probed and what casts cost in other models"
        )
    if attention:
        said.append(
            f"{counted(len(attention), 'attention call')} of single operators in FP32: a "
            f"fused kernel runs {'it' if len(attention) == 1 else 'them'} in {value}"
        )
    return graph, said


def _with_peak(outcome: Outcome, value: str) -> Outcome:
    """tf32 changes no tensor's size, only what convolutions need; what fp8 would keep is not
    known."""
    if value == "fp8":
        return outcome
    is_tf32 = value == "tf32"
    before = outcome.context
    convolves = is_tf32 and not may_convolve_in_tf32(before)
    change = replace(before.memory_change, autocast=not is_tf32, tf32=convolves)
    change = change if is_tf32 else replace(change, autocast_dtype=value)
    context = replace(outcome.context, memory_change=change, is_as_traced=False)
    return replace(outcome, context=context, peak=peak_of(context))


def _apply_on_host(context: StepContext, value: str) -> Outcome:
    """A CPU's gain depends on its instructions: only measured operator times tell it."""
    if value == "tf32":
        raise NothingToChange("precision=tf32: the trace has no GPU, and a CPU has no TF32")
    probed, problem = find_probed(context, value)
    if probed is None:
        why = problem or (
            f"`stepscope probe PATH --set precision={value}` measures it where the job trained"
        )
        raise Refused(
            f"precision={value}: the trace has no GPU, and the gain on a CPU is unknown. {why}"
        )
    calls = context.graph.calls
    graph = replace(context.graph, calls=replace(calls, call_ns=calls.call_ns * probed.factor))
    return _with_peak(
        Outcome(
            context=changed(context, graph),
            assumptions=(probed.describe("as traced"),),
            spread=_SPREAD * probed.modelled_share,
            doubt=probed.error,
        ),
        value,
    )


def _find_wide(context: StepContext, value: str) -> Flags:
    """Tasks whose dtype is wider than the new one, and that could run in it."""
    family = context.operators.family
    wide: Flags = np.array([dtype in _WIDER[value] for dtype in _DTYPES])[context.operators.dtype]
    if value == "tf32":
        wide &= family != Family.ATTENTION
        if may_convolve_in_tf32(context):  # what still runs in fp32 has no such kernel
            wide &= family != Family.CONVOLUTION
    return wide


def _share_of_change(context: StepContext, graph: StepGraph, whole: Flags, part: Flags) -> float:
    """Of the change of the `whole` in device time, by those that are also in the `part`."""
    change = np.abs(graph.tasks.dur_ns - context.graph.tasks.dur_ns)
    return float(change[whole & part].sum()) / max(1.0, float(change[whole].sum()))


def _speed_up_products(
    context: StepContext, product: Flags, convolution_ns: Floats, dtype: str, ceilings: Ceilings
) -> StepGraph:
    """The kernels of each operator together take what the roofline of the new dtype says, or
    `convolution_ns` if that is known."""
    tasks, operators = context.graph.tasks, context.operators
    new = tasks.dur_ns.copy()
    half = 0.5 if dtype != "tf32" else 1.0
    # Inductor pads rows; fp8 needs aligned ones.
    aligns = is_compiled(context) or dtype == "fp8"
    alignment = None if aligns else find_alignment(context, int(4 * half))
    backward = context.task_phase == Phase.BACKWARD
    # No product gains more than the peak does.
    peak_gains = [ceilings.flops[dtype] / ceilings.flops.get(name, 1.0) for name in _DTYPES]
    most = np.where(_find_fourier(context), np.inf, np.array(peak_gains)[operators.dtype])
    for family in (Family.MATMUL, Family.ATTENTION, Family.CONVOLUTION, Family.RECURRENT):
        for in_backward in (False, True):
            mine = product & (operators.family == family) & (backward == in_backward)
            if not mine.any():
                continue
            moved = operators.bytes_moved[mine]
            whole = roofline_ns(
                family,
                operators.flops[mine],
                np.where(moved > 0, moved * half, 0.0),
                dtype,
                ceilings,
                backward=in_backward,
                alignment=alignment[mine] if alignment is not None else None,
            )
            new[mine] = np.minimum(whole * operators.share[mine], tasks.dur_ns[mine] * 1.5)
            new[mine] = np.maximum(new[mine], tasks.dur_ns[mine] / most[mine])
            if family == Family.RECURRENT:
                gain = _RECURRENT_GAIN.get(dtype, _NARROW_RECURRENT_GAIN)
                new[mine] = np.maximum(new[mine], tasks.dur_ns[mine] / gain)
    # A convolution may gain more than the peak does: cuDNN's kernels for fp32 are far from theirs.
    # It still has them when tf32 is allowed.
    most_ns = tasks.dur_ns * (1.0 if dtype == "tf32" else 1.5)
    by_shape = np.minimum(convolution_ns * operators.share, most_ns)
    new = np.where(convolution_ns > 0, by_shape, new)
    return with_durations(context.graph, new)


def _cancelling_share(before: StepGraph, after: StepGraph, modelled: Flags) -> float:
    """What some tasks lose and others gain, over the device's time. The step hardly changes by it,
    so its change does not show how doubtful it is."""
    changes = np.where(modelled, after.tasks.dur_ns - before.tasks.dur_ns, 0.0)
    both_ways = float(np.abs(changes).sum()) - abs(float(changes.sum()))
    total = float(after.tasks.dur_ns.sum())
    return both_ways / total if total else 0.0


def _find_fourier(context: StepContext) -> Flags:
    """Convolutions by Fourier transforms. Only fp32 has them; a narrow dtype takes another way."""
    operators = context.operators
    fourier = context.kernels_named(_FOURIER.search) & (operators.family == Family.CONVOLUTION)
    return np.isin(operators.row, operators.row[fourier])


def _add_casts(
    context: StepContext, graph: StepGraph, host_ns: float, ceilings: Ceilings, share: float
) -> tuple[StepGraph, int]:
    """Insert casts before the products they feed; in backward, casts of the gradients. Together
    they take `host_ns` of the host, and `share` of their device time: probed operators have the
    rest."""
    elements = _cast_elements(context)
    if not len(elements):
        return graph, 0
    calls = graph.calls
    launching = np.flatnonzero(calls.kind == CallKind.LAUNCH)
    before: list[int] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        mine = launching[calls.phase[launching] == phase]
        if not len(mine):
            mine = launching
        # Casts are spread evenly over the pass.
        before += mine[np.linspace(0, len(mine) - 1, len(elements)).astype(int)].tolist()
    both = np.concatenate((elements, elements))
    host = launch_ns(context) if is_compiled(context) else host_ns / len(both)
    return insert(
        graph,
        np.array(before, np.int32),
        gap_ns=host * 0.85,
        call_ns=host * 0.15,
        dur_ns=copy_ns(both * 6.0, ceilings) * share,
        stream=int(graph.tasks.stream[0]) if len(graph.tasks) else 0,
    ), len(both)


def _autocast_ns(context: StepContext, product: Flags) -> float:
    operators, graph = context.operators, context.graph
    trained = (context.task_phase == Phase.FORWARD) & ~find_before_training(context)
    forward = product & trained
    convolution = operators.family == Family.CONVOLUTION
    launches = max(1, int((graph.calls.kind == CallKind.LAUNCH).sum()))
    kinds = (
        (_CONVOLUTION_HOST, forward & convolution),
        (_PRODUCT_HOST, forward & ~convolution & ~_find_reading_results(context)),
        (_NORM_HOST, trained & context.named(NORM.search)),
    )
    costs = sum(cost * len(distinct(operators.row[kind])) for cost, kind in kinds)
    return costs * graph.host_ns / launches


def _find_reading_results(context: StepContext) -> Flags:
    """Batched products and attention, whose inputs are no parameters."""
    batched = context.named(_READS_PRODUCTS.search)
    parameters = context.parameters
    weights = set(map(_squeeze, parameters.shapes)) if parameters else set()

    def reads_weights(shapes: str) -> bool:
        return bool(_weight_sizes(tensor_shapes(shapes), weights))

    trace, rows = context.trace, np.where(batched, context.operators.row, -1)
    of_results: Flags = batched & ~by_text(trace, trace.host.shapes, rows, reads_weights, False)
    return of_results


def _cast_elements(context: StepContext) -> Floats:
    """The size of each tensor that autocast would cast in forward: weights and biases of products,
    what norms pass on to products, and what a loss takes."""
    host, strings, operators = context.trace.host, context.trace.strings, context.operators
    forward = np.flatnonzero(
        (operators.row >= 0)
        & (context.task_phase == Phase.FORWARD)
        & ~find_before_training(context)
    )
    _, first = np.unique(operators.row[forward], return_index=True)
    tasks = forward[np.sort(first)]  # the first task of each operator, in the step's order
    rows = operators.row[tasks]
    product = np.isin(operators.family[tasks], (Family.MATMUL, Family.CONVOLUTION))
    parameters = context.parameters
    weights = set(map(_squeeze, parameters.shapes)) if parameters else set()
    fuses = is_compiled(context)  # other casts are part of the loops around them
    known: dict[tuple[int, int, bool], list[float]] = {}
    sizes: list[float] = []
    for key in zip(
        host.name[rows].tolist(), host.shapes[rows].tolist(), product.tolist(), strict=True
    ):
        if key not in known:
            name, code, is_product = key
            shapes = tensor_shapes(strings[code]) if code >= 0 else []
            if is_product:
                known[key] = _weight_sizes(shapes, weights)
            else:
                known[key] = [] if fuses else _input_size(strings[name], shapes)
        sizes += known[key]
    return np.array(sizes, np.float64)


def _input_size(name: str, shapes: list[Shape]) -> list[float]:
    """What a norm or a loss takes; nothing for any other operator."""
    is_cast = shapes and (NORM.search(name) or _LOSS.search(name))
    return [float(math.prod(shapes[0]))] if is_cast else []


def _weight_sizes(shapes: list[Shape], weights: set[Shape]) -> list[float]:
    """The inputs that are parameters: also transposed, as linear layers pass them, and with one
    more dimension of size one, as convolutions over time do."""
    both_ways = [(_squeeze(shape), _squeeze(shape[::-1])) for shape in shapes if shape]
    return [
        float(math.prod(shape))
        for shape, transposed in both_ways
        if shape in weights or transposed in weights
    ]


def _squeeze(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)
