"""Bytes of operators on lists of tensors, filled in from what surrounds the call.

A list's dtype is not recorded: an element's size comes from the kernel's name, else from the
nearest operator around the call, else (in an optimizer) from the gradients. A list of more than 30
tensors is not recorded at all: one that an optimizer passes to one operator once per step is taken
to be all parameters, whose shapes come from autograd's accumulation of gradients. Lists of step
counters look the same, but launch nothing.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.call_tree import distinct_counts, group
from stepscope.explain.flops.call import ITEM_BYTES
from stepscope.explain.flops.cost import UNKNOWN
from stepscope.explain.flops.signatures import LARGEST
from stepscope.explain.work import rows_named
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.flops.phases import Phases
    from stepscope.explain.flops.signatures import Signatures
    from stepscope.records.trace import Trace

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
    whole[~launches & ~_fused(priced)[priced.of[lists]]] = UNKNOWN
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


def _fused(priced: Signatures) -> NDArray[np.bool_]:
    return np.array([call.name.startswith("aten::_fused_") for call in priced.calls], np.bool_)


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
    return ITEM_BYTES[match[1]] if match else UNKNOWN


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
    known = (ITEM_BYTES.get(dtype, UNKNOWN) for dtype in dtypes if isinstance(dtype, str))
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
