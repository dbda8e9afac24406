"""precision=tf32|bf16|fp16|fp8: matrix products in another dtype.

tf32 changes the products alone. bf16 and fp16 are autocast's: products, attention and most
elementwise work in half the bytes, norms and losses in fp32, and casts added: every weight once a
step and back again as a gradient, and what norms give to products. Casts cost the host time, so a
step that waits for its host comes out slower.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.call_tree import distinct_places, group
from stepscope.explain.flops import DTYPES
from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.predict.edit import insert
from stepscope.predict.kernels import FLOOR_NS, Family, copy_ns, roofline_ns
from stepscope.predict.whatifs.outcome import Outcome, Refused, WrongValue, changed
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Floats, StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.records.efficiency import Ceilings

HELP = "matrix products in tf32, bf16, fp16 (autocast) or fp8"
_DTYPES = (*DTYPES, "")  # of code -1 nobody knows which
VALUES = ("tf32", "bf16", "fp16", "fp8")
_WIDER = {"tf32": ("fp32",), "bf16": ("fp32", "tf32"), "fp16": ("fp32", "tf32")}
_WIDER["fp8"] = ("fp32", "tf32", "bf16", "fp16")
_STAYS_FP32 = lazy_pattern(
    r"norm|softmax|loss|entropy|exp|log|pow|sum|cumsum|embedding|foreach|index|topk|sort", re.I
)
_NORM = lazy_pattern(r"^aten::(?:native_)?(?:layer|group|rms)_norm$|^aten::_?fused_rms_norm$")
_LOSS = lazy_pattern(r"^aten::_?log_softmax$|^aten::cross_entropy|^aten::nll_loss_forward$")
# What autocast costs the host for every product of the forward pass, there and in backward: casts
# and the search for them, as so many times the step's mean host time for a launch.
_PRODUCT_HOST, _CONVOLUTION_HOST = 2.3, 1.8
_FOURIER = lazy_pattern(r"fft|_complex")
_DEPTHWISE = 4  # channels that each output of a convolution looks at, at most
# Recurrent layers are many small products one behind another: they gain this much, whatever their
# FLOPs say.
_RECURRENT_GAIN = {"tf32": 2.0}
_NARROW_RECURRENT_GAIN = 3.5
_ACTIVATION = lazy_pattern(r"gelu|silu|relu|glu|tanh|sigmoid|hardswish|mish", re.I)
_OWN_BATCH_NORM = {"aten::cudnn_batch_norm": 1.45, "aten::cudnn_batch_norm_backward": 1.1}


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where nothing runs in a wider dtype, or the device lacks the asked one."""
    if value not in VALUES:
        raise WrongValue(f"precision={value}: choose one of {', '.join(VALUES)}")
    if context.on_host:
        raise Refused(f"precision={value}: the trace has no accelerator; a CPU's gain is not known")
    ceilings = context.ceilings
    if ceilings is None or value not in ceilings.flops:
        device = ceilings.device if ceilings else context.trace.device_name or "this device"
        raise Refused(f"precision={value}: no {value} rate is known for {device}")
    wide = np.array([dtype in _WIDER[value] for dtype in _DTYPES])[context.operators.dtype]
    product = wide & (context.operators.flops > 0)
    thin = _depthwise(context)
    product &= ~thin
    if value == "tf32":
        product &= context.operators.family != Family.ATTENTION
    if not product.any():
        raise Refused(f"precision={value}: no matrix product runs in a wider dtype than {value}")
    graph = _faster_products(context, product, value, ceilings)
    said = [
        f"matrix products at the share of {value}'s peak that such products reached on an H200",
    ]
    if value != "tf32":
        narrow = wide & ~product & ~thin & _halved(context)
        graph = _narrower(context, graph, narrow)
        graph, casts = _with_casts(context, graph, product, ceilings)
        said.append(
            "autocast: what follows a product in half the bytes, norms and losses in fp32; "
            f"{casts} casts added with their launches"
        )
    return Outcome(context=changed(context, graph), assumptions=tuple(said), spread=0.12)


def _depthwise(context: StepContext) -> Flags:
    """Convolutions of a channel or few at a time: they move more than they multiply, and take as
    long in a narrow dtype."""
    host, strings = context.trace.host, context.trace.strings
    out = np.zeros(len(context.operators.row), np.bool_)
    mine = np.flatnonzero(context.operators.family == Family.CONVOLUTION)
    codes = host.shapes[context.operators.row[mine]]
    told, of = distinct_places(codes)
    found = [code >= 0 and _few_channels(_shapes(strings[code])) for code in told.tolist()]
    out[mine] = np.array(found, np.bool_)[of]
    return out


def _few_channels(shapes: list[tuple[int, ...]]) -> bool:
    """Of input and weight, as a convolution has them first; its backward has a gradient before."""
    wide = [shape for shape in shapes if len(shape) >= 3]
    if len(wide) < 2:
        return False
    given, weight = wide[-2:]
    return 0 < weight[1] <= _DEPTHWISE and given[1] > weight[1]


def _faster_products(
    context: StepContext, product: Flags, dtype: str, ceilings: Ceilings
) -> StepGraph:
    """Each operator's kernels take what the roofline of the new dtype says, together."""
    tasks, of = context.graph.tasks, context.operators
    new = tasks.dur_ns.copy()
    half = 0.5 if dtype != "tf32" else 1.0
    backward = context.task_phase == Phase.BACKWARD
    # No product gains more than the peak does.
    gains = [ceilings.flops[dtype] / ceilings.flops.get(each, 1.0) for each in _DTYPES]
    most = np.where(_transformed(context), np.inf, np.array(gains)[of.dtype])
    for family in (Family.MATMUL, Family.ATTENTION, Family.CONVOLUTION, Family.RECURRENT):
        for way in (False, True):
            mine = product & (of.family == family) & (backward == way)
            if mine.any():
                whole = roofline_ns(
                    family,
                    of.flops[mine],
                    np.where(of.bytes_moved[mine] > 0, of.bytes_moved[mine] * half, 0.0),
                    dtype,
                    ceilings,
                    backward=way,
                )
                new[mine] = np.minimum(whole * of.share[mine], tasks.dur_ns[mine] * 1.5)
                new[mine] = np.maximum(new[mine], tasks.dur_ns[mine] / most[mine])
                if family == Family.RECURRENT:
                    gain = _RECURRENT_GAIN.get(dtype, _NARROW_RECURRENT_GAIN)
                    new[mine] = np.maximum(new[mine], tasks.dur_ns[mine] / gain)
    return replace(context.graph, tasks=replace(tasks, dur_ns=new))


def _transformed(context: StepContext) -> Flags:
    """Convolutions by Fourier transforms, which only fp32 has: a narrow one goes another way."""
    tasks, of, trace = context.graph.tasks, context.operators, context.trace
    mine = np.flatnonzero((of.family == Family.CONVOLUTION) & (tasks.row >= 0))
    told, place = distinct_places(trace.device.name[tasks.row[mine]])
    found = [_FOURIER.search(trace.strings[code]) is not None for code in told.tolist()]
    fourier = mine[np.array(found, np.bool_)[place]]
    return np.isin(of.row, of.row[fourier])


def _halved(context: StepContext) -> Flags:
    """Tasks that autocast runs in the narrow dtype, because what feeds them is: all elementwise
    work, or, where norms give fp32 back and with them what is added up along the blocks, only what
    follows a product."""
    phase = context.task_phase
    stays = context.named(_STAYS_FP32.search)
    if context.named(_NORM.search).any():
        stays |= ~context.named(_ACTIVATION.search)
    found: Flags = ~stays & ((phase == Phase.FORWARD) | (phase == Phase.BACKWARD))
    return found


def _narrower(context: StepContext, graph: StepGraph, narrow: Flags) -> StepGraph:
    dur = graph.tasks.dur_ns
    shorter = np.minimum(dur, FLOOR_NS) + np.maximum(dur - FLOOR_NS, 0.0) * 0.5
    dur = np.where(narrow, shorter, dur)
    # cuDNN has no batch norm from bf16 to fp32 statistics; PyTorch's own takes this much longer.
    for name, slower in _OWN_BATCH_NORM.items():
        dur = np.where(context.named(name.__eq__), slower * dur, dur)
    return replace(graph, tasks=replace(graph.tasks, dur_ns=dur))


def _with_casts(
    context: StepContext, graph: StepGraph, product: Flags, ceilings: Ceilings
) -> tuple[StepGraph, int]:
    """Launches before the products they feed; in backward the gradients' way back."""
    elements = _cast_elements(context)
    if not len(elements):
        return graph, 0
    calls = graph.calls
    launching = np.flatnonzero(calls.kind == CallKind.LAUNCH)
    every: list[int] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        mine = launching[calls.phase[launching] == phase]
        if not len(mine):
            mine = launching
        # Casts come all along the pass.
        every += mine[np.linspace(0, len(mine) - 1, len(elements)).astype(int)].tolist()
    both = np.concatenate((elements, elements))
    host = _autocast_ns(context, product) / len(both)
    return insert(
        graph,
        np.array(every, np.int32),
        gap_ns=host * 0.85,
        call_ns=host * 0.15,
        dur_ns=copy_ns(both * 6.0, ceilings),
        stream=int(graph.tasks.stream[0]) if len(graph.tasks) else 0,
    ), len(both)


def _autocast_ns(context: StepContext, product: Flags) -> float:
    """Of the host, for all products of the step."""
    of, graph = context.operators, context.graph
    forward = product & (context.task_phase == Phase.FORWARD)
    convolution = of.family == Family.CONVOLUTION
    launches = max(1, int((graph.calls.kind == CallKind.LAUNCH).sum()))
    costs = _PRODUCT_HOST * len(distinct(of.row[forward & ~convolution]))
    costs += _CONVOLUTION_HOST * len(distinct(of.row[forward & convolution]))
    return costs * graph.host_ns / launches


def _cast_elements(context: StepContext) -> Floats:
    """Of every tensor that autocast would cast on the way forward: weights and biases of products,
    what norms give to products, and what a loss takes."""
    host, strings, of = context.trace.host, context.trace.strings, context.operators
    forward = np.flatnonzero((of.row >= 0) & (context.task_phase == Phase.FORWARD))
    first, _, _ = group(of.row[forward])
    tasks = forward[np.sort(first)]  # an operator's first, in the step's order
    rows = of.row[tasks]
    product = np.isin(of.family[tasks], (Family.MATMUL, Family.CONVOLUTION))
    weights = (
        {_squeezed(s) for s in set(context.parameters.shapes)} if context.parameters else set()
    )
    known: dict[tuple[int, int, bool], list[float]] = {}
    out: list[float] = []
    for key in zip(
        host.name[rows].tolist(), host.shapes[rows].tolist(), product.tolist(), strict=True
    ):
        if key not in known:
            name, shapes, multiplies = key
            told = _shapes(strings[shapes]) if shapes >= 0 else []
            known[key] = _weights(told, weights) if multiplies else _given_to(strings[name], told)
        out += known[key]
    return np.array(out, np.float64)


def _given_to(name: str, shapes: list[tuple[int, ...]]) -> list[float]:
    """What a norm or a loss takes."""
    meant = shapes and (_NORM.search(name) or _LOSS.search(name))
    return [float(math.prod(shapes[0]))] if meant else []


def _weights(shapes: list[tuple[int, ...]], known: set[tuple[int, ...]]) -> list[float]:
    """The inputs that are parameters: also transposed, as linear layers give them, and with a
    dimension of one more, as convolutions along time do."""
    told = [(_squeezed(s), _squeezed(s[::-1])) for s in shapes if s]
    return [float(math.prod(s)) for s, turned in told if s in known or turned in known]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _shapes(text: str) -> list[tuple[int, ...]]:
    try:
        told = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return []
    return [
        tuple(each)
        for each in told
        if isinstance(each, list) and all(isinstance(size, int) for size in each)
    ]
