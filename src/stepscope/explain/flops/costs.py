"""FLOPs and bytes of every operator of a trace, and the operator of every device event."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.flops.captured_graphs import LaunchColumns, fill_replays
from stepscope.explain.flops.compiled import PREFIX
from stepscope.explain.flops.compiled_regions import RegionColumns, fill_regions
from stepscope.explain.flops.cost import MATMUL_LIKE, OTHER, UNKNOWN
from stepscope.explain.flops.dtypes import FP32, TF32
from stepscope.explain.flops.kernel_names import read_name
from stepscope.explain.flops.lists import launching_rows, list_bytes
from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.explain.flops.phases import find_phases, find_recomputed
from stepscope.explain.flops.replayed import (
    HostOperators,
    find_replays,
    find_unjoined,
    join_replays,
)
from stepscope.explain.flops.signatures import price, summable
from stepscope.explain.steps import find_steps
from stepscope.explain.work import find_work, rows_named
from stepscope.records.trace import ABSENT, DeviceKind, HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.flops.call import Call
    from stepscope.explain.flops.signatures import Signatures
    from stepscope.explain.graph_recordings import GraphRecording
    from stepscope.explain.work import Work
    from stepscope.records.compiled import CompiledGraph
    from stepscope.records.explanation import Steps
    from stepscope.records.trace import Trace

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
    dtype: NDArray[np.int8]  # code of flops.dtypes.DTYPES, as computed; -1 is unknown
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
