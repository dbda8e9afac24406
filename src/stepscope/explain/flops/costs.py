"""FLOPs and bytes of every operator of a trace, and the device's work in pieces, each with
the operator that answers for it.
"""

from __future__ import annotations

import math
import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.explain.flops.call import (
    FP32,
    MATMUL_LIKE,
    OTHER,
    PREFIX,
    TF32,
    UNKNOWN,
    Call,
    read_name,
)
from stepscope.explain.flops.captured_graphs import (
    HostOperators,
    LaunchColumns,
    fill_replays,
    find_replays,
    find_unjoined,
    join_replays,
)
from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.explain.flops.prices import (
    LARGEST,
    RegionColumns,
    Signatures,
    fill_regions,
    price,
    summable,
)
from stepscope.records.compiled import CompiledGraph
from stepscope.records.dtypes import PROFILER_BYTES
from stepscope.records.explanation import Steps
from stepscope.records.trace import ABSENT, DeviceKind, HostKind, Trace
from stepscope.step.call_tree import children_sum, distinct_counts, enclosing, group
from stepscope.step.cuda_graphs import GraphRecording
from stepscope.step.phases import Phases, find_phases, find_recomputed
from stepscope.step.steps import find_steps, step_of
from stepscope.step.work import Kind, Work, comm_spans, find_work, rows_named
from stepscope.trace.links import distinct, nearest, nearest_of

# Containers of other operators, without work of their own.
_CONTAINER = re.compile(
    r"^autograd::|^torch::autograd::|Backward\d*$|^CompiledFunction|^Torch-Compiled Region|"
    r"^## Call CompiledFxGraph|^(?:detach|detach_)$|^TorchDynamo |^AOTDispatcher |^Pregraph|"
    r"^(?:nccl|gloo|mpi|ucc):|^c10d::|^_c10d_functional::|^record_param_comms$|^ProfilerStep|"
    r"^torch::distributed::|^torch\.distributed\."
)
# Torch's own marks while it compiles; what they enclose computes nothing for the training.
_COMPILING = re.compile(r" \(dynamo_timed\)$|^dynamo$|^entire_(?:frame|backward)_compile$")
# Autograd's nodes of functions outside PyTorch: FLOPs as a multiple of the forward pass's, and the
# part that recomputes. Attention: five products for the forward's two, one of them recomputed.
BACKWARD_OF = {
    "FlashAttnFuncBackward": (2.5, 0.5),
    "FlashAttnQKVPackedFuncBackward": (2.5, 0.5),
    "_LinearBackward": (2.0, 0.0),
    "_LayerNormLinearBackward": (2.0, 0.0),
    "_LayerNormMLPBackward": (2.0, 0.0),
}
# PyTorch's own operators made of products that are not recorded.
_UNRECORDED = re.compile(
    r"aten::(?:_fft_|_?cholesky|_?lu_|triangular_solve|(?:_?linalg_)?(?:svd|qr|eig|inv|solve|lu|ldl|"
    r"lstsq|pinv|det|slogdet|matrix_exp|householder)|geqrf|ormqr|orgqr|_cdist)"
)


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of host rows, and one of device events. -1 is unknown, 0 is none."""

    flops: NDArray[np.int64]  # of matrix products and operators made of them
    model_flops: NDArray[np.int64]  # the same without recomputed results of the forward pass
    bytes_moved: NDArray[np.int64]  # inputs read once, outputs written once
    counted: NDArray[np.bool_]  # of nested operators, the one whose FLOPs count
    answering: NDArray[np.bool_]  # device events launched inside it are attributed to it
    dtype: NDArray[np.int8]  # code of records.dtypes.PEAKS, as computed; -1 is unknown
    in_fp32: NDArray[np.int64]  # of a compiled region's FLOPs, whose dtype is that of most
    recomputed: NDArray[np.bool_]  # a forward operator run again in the backward pass
    phase: NDArray[np.int8]  # code of flops.phases.PHASES
    signature: NDArray[np.int32]  # number of the distinct call in `calls`, -1 if not priced
    calls: tuple[Call, ...]
    operator: NDArray[np.int32]  # per device event: the host row it is attributed to, or -1
    launched: NDArray[np.bool_]  # device events were launched inside it, and not only replayed
    replayed: NDArray[np.bool_]  # per device event: a graph replays what the operator launched
    call_part: NDArray[np.float64]  # per replayed event: the part of one call that it stands for


def count_costs(
    trace: Trace,
    work: Work | None = None,
    steps: Steps | None = None,
    graphs: tuple[CompiledGraph, ...] = (),
    recordings: tuple[GraphRecording, ...] = (),
) -> Costs:
    """Each distinct call is parsed and priced once. `graphs` and `recordings` are the compiled
    graphs and the CUDA graphs that capture recorded."""
    host = trace.host
    work = work or find_work(trace)
    steps = steps or find_steps(trace, work)
    is_operator = host.kind == HostKind.OPERATOR
    families = _families(trace, is_operator)
    rows = np.flatnonzero(families == _PRICED)
    priced = price(trace, rows)
    flops = np.where(families == _FOREIGN, np.int64(UNKNOWN), np.int64(0))
    moved = np.where(families == _NOTHING, np.int64(0), np.int64(UNKNOWN))
    signature = np.full(len(host), ABSENT, np.int32)
    signature[rows] = priced.of
    flops[rows], moved[rows] = priced.flops[priced.of], priced.moved[priced.of]
    dtype = np.full(len(host), ABSENT, np.int8)
    dtype[rows] = priced.dtype[priced.of]
    again = np.zeros(len(host), np.int64)
    again[rows] = priced.again[priced.of]
    like = _matmul_like(trace, rows, priced)
    like |= _backward_by_forward(trace, is_operator, flops, again)
    counted, answering = _counted(trace, families, like, flops)
    in_fp32 = np.zeros(len(host), np.int64)
    if graphs:
        columns = RegionColumns(
            flops=flops,
            again=again,
            counted=counted,
            answering=answering,
            dtype=dtype,
            in_fp32=in_fp32,
        )
        fill_regions(trace, graphs, columns)
    own = _find_operators(trace, is_operator, answering)
    launched = _ran(trace, own)
    known = HostOperators(
        is_operator=is_operator, answering=answering, signature=signature, operator=own
    )
    operator, replayed, call_part = _add_replays(trace, known, recordings)
    if recordings and not work.on_host:
        unjoined = find_unjoined(trace, known, replayed)
        launches = LaunchColumns(
            flops=flops,
            again=again,
            counted=counted,
            answering=answering,
            dtype=dtype,
            operator=operator,
            call_part=call_part,
        )
        replays = find_replays(trace, known)
        replayed |= fill_replays(trace, replays, recordings, launches, unjoined)
    counted &= launched | launching_rows(trace, operator)
    phases = find_phases(trace, steps)
    recomputed = np.zeros(len(host), np.bool_)
    recomputed[rows] = find_recomputed(trace, phases, rows, priced.of, counted)
    _mark_tf32(trace, operator, counted, dtype)
    moved[rows] = summable(list_bytes(trace, rows, priced, phases, own))
    return Costs(
        flops=flops,
        model_flops=np.where(recomputed & (flops > 0), 0, flops - again),
        bytes_moved=moved,
        counted=counted,
        answering=answering,
        dtype=dtype,
        in_fp32=in_fp32,
        recomputed=recomputed,
        phase=phases.phase,
        signature=signature,
        calls=priced.calls,
        operator=operator,
        launched=launched,
        replayed=replayed,
        call_part=call_part,
    )


_PLAIN, _PRICED, _NOTHING, _FOREIGN = range(4)


def _families(trace: Trace, is_operator: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Per host row, by name: _PRICED by a table, moving _NOTHING, _FOREIGN (unknown), or _PLAIN."""
    family = np.zeros(len(trace.strings), np.int8)
    used = np.zeros(len(trace.strings), np.bool_)
    used[trace.host.name[is_operator].astype(np.intp)] = True
    for code in np.flatnonzero(used).tolist():
        family[code] = _family(trace.strings[code])
    families: NDArray[np.int8] = np.where(
        is_operator, family.take(trace.host.name), np.int8(_PLAIN)
    )
    compiling = rows_named(trace, trace.host, is_operator, _COMPILING.search)
    if compiling.any():
        foreign = np.flatnonzero(families == _FOREIGN)
        families[foreign[nearest_of(trace.host, compiling, foreign) >= 0]] = _PLAIN
    return families


def _family(name: str) -> int:
    if name in VIEWS:
        return _NOTHING
    if name in MATMUL_LIKE or name in OTHER or name.startswith(PREFIX):
        return _PRICED
    if name.startswith("aten::"):
        return _FOREIGN if _UNRECORDED.match(name) else _PLAIN
    return _PLAIN if _CONTAINER.search(name) else _FOREIGN


def _matmul_like(trace: Trace, rows: NDArray[np.intp], priced: Signatures) -> NDArray[np.bool_]:
    multiplies = np.array([call.name in MATMUL_LIKE for call in priced.calls], np.bool_)
    like = np.zeros(len(trace.host), np.bool_)
    like[rows[multiplies[priced.of]]] = True
    return like


def _backward_by_forward(
    trace: Trace, is_operator: NDArray[np.bool_], flops: NDArray[np.int64], again: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """A backward recorded with gradients only costs a multiple of its forward. Fills `flops` and
    `again` of these rows, and returns which they are."""
    host = trace.host
    marked = rows_named(trace, host, is_operator, BACKWARD_OF.__contains__)
    rows = np.flatnonzero(marked & (host.forward_of >= 0))
    if len(rows):
        names = [BACKWARD_OF[trace.strings[code]] for code in host.name[rows].tolist()]
        times, twice = np.array(names, np.float64).T
        forward = flops[host.forward_of[rows]]
        flops[rows] = np.where(forward > 0, forward * times, UNKNOWN).astype(np.int64)
        again[rows] = np.where(forward > 0, forward * twice, 0).astype(np.int64)
    return marked


def _counted(
    trace: Trace, families: NDArray[np.int8], like: NDArray[np.bool_], flops: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Rows whose FLOPs count, and rows that device events inside them are attributed to."""
    host = trace.host
    known = like & (flops >= 0)
    outer = np.zeros(len(host), np.bool_)
    inner = np.flatnonzero(like)
    around = nearest_of(host, known, host.parent[inner])
    outer[around[(around >= 0) & known[inner]]] = True
    counted = known & ~outer
    answering = families == _PRICED
    answering[like] = counted[like]
    unknown = np.flatnonzero(like & ~known)
    if len(unknown):  # those neither inside nor around a known operator
        answering[unknown] = nearest_of(host, counted, unknown) < 0
        holds = nearest_of(host, like & ~known, np.flatnonzero(counted))
        answering[holds[holds >= 0]] = False
    return counted, answering


def _find_operators(
    trace: Trace, is_operator: NDArray[np.bool_], answering: NDArray[np.bool_]
) -> NDArray[np.int32]:
    """The nearest answering operator around a launch, else the nearest operator."""
    device, host = trace.device, trace.host
    launch = np.where(device.kind <= DeviceKind.MEMSET, device.launch, ABSENT)
    operator = nearest_of(host, answering, launch)
    lost = np.flatnonzero((operator < 0) & (launch >= 0))
    operator[lost] = nearest_of(host, is_operator, launch[lost])
    return operator


def _add_replays(
    trace: Trace, known: HostOperators, recordings: tuple[GraphRecording, ...]
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float64]]:
    """The operator of every device event, which of them are replays, and their parts of a call."""
    replays = join_replays(trace, known, recordings)
    if replays is None:
        events = len(trace.device)
        return known.operator.copy(), np.zeros(events, np.bool_), np.zeros(events)
    replayed = replays.operator >= 0
    return np.where(replayed, replays.operator, known.operator), replayed, replays.call_part


def _ran(trace: Trace, operator: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Rows that device events are attributed to; all if the trace links none.

    Others ran on the host, or never: a checkpoint stops at the first operator it does not need.
    """
    if not (trace.device.launch >= 0).any():
        return np.ones(len(trace.host), np.bool_)
    return launching_rows(trace, operator)


def _mark_tf32(
    trace: Trace, operator: NDArray[np.int32], counted: NDArray[np.bool_], dtype: NDArray[np.int8]
) -> None:
    """fp32 inputs may be multiplied as tf32: only the kernel's name says so."""
    full = counted & (dtype == FP32)
    if not full.any():
        return
    device = trace.device
    kernels = (device.kind == DeviceKind.KERNEL) & (operator >= 0) & full[operator]
    as_tf32 = rows_named(trace, device, kernels, lambda name: read_name(name).dtype == "tf32")
    dtype[operator[as_tf32]] = TF32


# Bytes of operators on lists of tensors, filled in from what surrounds the call.
#
# A list's dtype is not recorded: an element's size comes from the kernel's name, else from the
# nearest operator around the call, else (in an optimizer) from the gradients. A list of more than
# 30 tensors is not recorded at all: one that an optimizer passes to one operator once per step is
# taken to be all parameters, whose shapes come from autograd's accumulation of gradients. Lists of
# step counters look the same, but launch nothing.

_OPAQUE = re.compile(r"OpaqueType<(\d{1,3})\b")
_TYPED = re.compile(r"(?:Functor|Math\w*|Op)<(c10::BFloat16|c10::Half|float|double)")
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_SHARDED = re.compile("reduce_scatter|FullyShardedDataParallel|FSDP::|ZeroRedundancy|DeepSpeed")


def list_bytes(
    trace: Trace,
    rows: NDArray[np.intp],
    priced: Signatures,
    phases: Phases,
    operator: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Bytes moved by the priced rows, lists included."""
    moved = priced.moved[priced.of]
    elements, passes = priced.list_elements[priced.of], priced.list_passes[priced.of]
    lists = np.flatnonzero((elements > 0) | (passes > 0))
    if not len(lists):
        return moved
    item = _item_bytes(trace, rows[lists], operator)
    step = nearest_of(trace.host, phases.stepping, rows[lists])
    parameters = _accumulated(trace, step)
    item[(item < 0) & (step >= 0)] = parameters.item_bytes
    whole = _whole_lists(trace, step, priced.of[lists], parameters.elements)
    launches = launching_rows(trace, operator)[rows[lists]]
    whole[
        ~launches
        & ~np.array([call.name.startswith("aten::_fused_") for call in priced.calls], np.bool_)[
            priced.of[lists]
        ]
    ] = UNKNOWN
    total = elements[lists] + passes[lists] * np.maximum(whole, 0)
    known = (item > 0) & ((passes[lists] == 0) | (whole > 0)) & (moved[lists] >= 0)
    known &= total < LARGEST // np.maximum(item, 1)
    moved[lists] = np.where(known, moved[lists] + total * item, UNKNOWN)
    return moved


def launching_rows(trace: Trace, operator: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Rows that device events are attributed to."""
    launching = np.zeros(len(trace.host), np.bool_)
    launching[operator[operator >= 0]] = True
    return launching


def _item_bytes(
    trace: Trace, rows: NDArray[np.intp], operator: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Bytes of an element of each row's lists, or -1."""
    host, device = trace.host, trace.device
    place = np.full(len(host), -1, np.int64)
    place[rows] = np.arange(len(rows))
    item = np.full(len(rows), UNKNOWN, np.int64)
    launched = np.flatnonzero((operator >= 0) & (place[np.maximum(operator, 0)] >= 0))
    first, which, _ = group(device.name[launched])
    names = device.name[launched[first]].tolist()
    sizes = np.array([_in_name(trace.strings[code]) for code in names], np.int64)[which]
    np.maximum.at(item, place[operator[launched]], sizes)
    lost = np.flatnonzero(item < 0)
    if len(lost):
        item[lost] = _around(trace, rows[lost])
    return item


def _in_name(name: str) -> int:
    """Bytes of an element, from the template arguments of PyTorch's kernels."""
    if match := _OPAQUE.search(name):
        return int(match[1])
    match = _TYPED.search(name)
    return PROFILER_BYTES[match[1]] if match else UNKNOWN


def _around(trace: Trace, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """From the nearest operator above that takes single tensors."""
    host = trace.host
    sizes: dict[int, int] = {-1: UNKNOWN}
    item_bytes = np.full(len(rows), UNKNOWN, np.int64)
    above, open_places = host.parent[rows], np.arange(len(rows))
    while len(open_places):
        going = above[open_places] >= 0
        open_places = open_places[going]
        codes = host.dtypes[above[open_places]].tolist()
        for code in set(codes) - sizes.keys():
            sizes[code] = _first_size(trace.strings[code])
        item_bytes[open_places] = [sizes[code] for code in codes]
        open_places = open_places[item_bytes[open_places] < 0]
        above[open_places] = host.parent[above[open_places]]
    return item_bytes


def _first_size(text: str) -> int:
    try:
        dtypes = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return UNKNOWN
    known = (PROFILER_BYTES.get(dtype, UNKNOWN) for dtype in dtypes if isinstance(dtype, str))
    return next((size for size in known if size != UNKNOWN), UNKNOWN)


class _Parameters(msgspec.Struct, frozen=True):
    """The parameters that one step accumulates gradients of; -1 is unknown."""

    elements: int = UNKNOWN
    item_bytes: int = UNKNOWN


def _accumulated(trace: Trace, step: NDArray[np.int32]) -> _Parameters:
    """From the gradients that the recorded optimizer steps accumulated."""
    host, steps = trace.host, len(set(step[step >= 0].tolist()))
    rows = np.flatnonzero(
        rows_named(trace, host, host.kind == HostKind.OPERATOR, lambda name: name == _ACCUMULATE)
    )
    codes, counts = distinct_counts(host.shapes[rows])
    if not steps or not len(codes) or (codes < 0).any():
        return _Parameters()
    sizes = {_first_size(trace.strings[code]) for code in set(host.dtypes[rows].tolist())}
    item = sizes.pop() if len(sizes) == 1 else UNKNOWN
    if (counts % steps).any():
        return _Parameters(UNKNOWN, item)
    shapes = [msgspec.json.decode(trace.strings[code]) for code in codes.tolist()]
    total = sum(
        count // steps * math.prod(dims[0])
        for dims, count in zip(shapes, counts.tolist(), strict=True)
        if dims
    )
    return _Parameters(total if total < LARGEST else UNKNOWN, item)


def _whole_lists(
    trace: Trace, step: NDArray[np.int32], signature: NDArray[np.intp], elements: int
) -> NDArray[np.int64]:
    """All parameters, for an optimizer's only call of a kind; else, and if they are sharded, -1."""
    none = np.full(len(step), UNKNOWN, np.int64)
    inside = step >= 0
    if not inside.any() or _sharded(trace):
        return none
    key = step.astype(np.int64) * (int(signature.max()) + 1) + signature
    _, places, count = group(key)
    calls = np.bincount(places, minlength=count)
    return np.where(inside & (calls[places] == 1), elements, none)


def _sharded(trace: Trace) -> bool:
    host = trace.host
    annotated = host.kind <= HostKind.ANNOTATION
    return bool(rows_named(trace, host, annotated, _SHARDED.search).any())


# The device's work in pieces, each with the operator that answers for it.
#
# A piece is a device event; where the CPU is the device, the time an operator spends in itself.
# Communication is left out, as are copies from and to the host: no roof of the device holds for
# them.


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of those in the steady steps; amounts of one step are sums / `steps`."""

    steps: int
    devices: int  # that computed
    operator: NDArray[np.int32]  # host row, or -1
    name: NDArray[np.int32]  # string code: of the kernel, or of the operator on the CPU
    dur_ns: NDArray[np.int64]
    compute: NDArray[np.bool_]  # a kernel, and not a copy or memset
    replayed: NDArray[np.bool_]  # by a CUDA graph, and joined to the operator of its recording
    call_part: NDArray[np.float64]  # of a replayed one: the part of one call of its operator

    def __len__(self) -> int:
        return len(self.dur_ns)


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that amounts are averaged over."""

    steps: Steps
    first: int
    count: int

    def holds(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether host times fall into them; without steps, all do."""
        if not self.steps.steps:
            return np.ones(len(times), np.bool_)
        which = step_of(self.steps.steps, times)
        return (which >= self.first) & (which < self.first + self.count)


def choose(steps: Steps) -> Chosen:
    """Those that the cycles cover, else all that are marked, else the window as one."""
    if steps.cycles_ns:
        return Chosen(steps=steps, first=steps.first_cycle, count=len(steps.cycles_ns))
    return Chosen(steps=steps, first=0, count=max(1, len(steps.steps)))


def cut(trace: Trace, work: Work, costs: Costs, chosen: Chosen) -> Pieces:
    if work.on_host:
        return _of_host(trace, costs, chosen)
    device, rows = trace.device, work.rows
    launch = device.launch[rows]
    linked = launch >= 0
    inside = linked.copy()
    inside[linked] = chosen.holds(trace.host.start_ns[launch[linked]])
    start, end = chosen.steps.window_start_ns, chosen.steps.window_end_ns
    inside |= ~linked & (work.start_ns >= start) & (work.start_ns < end)
    to_host = rows_named(
        trace,
        device,
        device.kind == DeviceKind.MEMCPY,
        lambda name: "DtoD" not in name and "Device -> Device" not in name,
    )
    inside &= (work.kind != Kind.COMM) & ~to_host[rows]
    kept, compute = rows[inside], work.kind[inside] == Kind.COMPUTE
    return Pieces(
        steps=chosen.count,
        devices=max(1, len(distinct(device.device[kept[compute]]))),
        operator=costs.operator[kept],
        name=device.name[kept],
        dur_ns=device.dur_ns[kept],
        compute=compute,
        replayed=costs.replayed[kept],
        call_part=costs.call_part[kept],
    )


def _of_host(trace: Trace, costs: Costs, chosen: Chosen) -> Pieces:
    host = trace.host
    rows = np.flatnonzero(host.kind == HostKind.OPERATOR)
    own = host.dur_ns[rows] - children_sum(enclosing(host, rows), host.dur_ns[rows])
    inside = chosen.holds(host.start_ns[rows]) & (own > 0)
    inside &= nearest(host, comm_spans(trace))[rows] < 0
    kept = rows[inside]
    answer = nearest_of(host, costs.answering, kept)
    return Pieces(
        steps=chosen.count,
        devices=1,
        operator=np.where(answer >= 0, answer, kept).astype(np.int32),
        name=host.name[kept],
        dur_ns=own[inside],
        compute=np.ones(len(kept), np.bool_),
        replayed=np.zeros(len(kept), np.bool_),
        call_part=np.zeros(len(kept)),
    )
