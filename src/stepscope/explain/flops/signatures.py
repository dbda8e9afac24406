"""Every distinct call of a trace, parsed and priced once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.call_tree import group
from stepscope.explain.flops import (  # noqa: F401
    attention,
    convolution,
    elementwise,
    matmul,
    memory_bound,
    recurrent,
    tensor_lists,
)
from stepscope.explain.flops.call import Call, Unknown
from stepscope.explain.flops.compiled import PREFIX, compiled
from stepscope.explain.flops.cost import MATMUL_LIKE, OTHER, UNKNOWN, Cost
from stepscope.explain.flops.dtypes import dtype_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.records.trace import Trace

# The fastest device needs 20 minutes for this many FLOPs: more come from damaged shapes. A backward
# pass multiplies them by up to three, and the sum must still fit 64 bits.
LARGEST = 1 << 60
_UNKNOWN_ERRORS = (
    Unknown,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    ZeroDivisionError,
    OverflowError,
)


class Signatures(msgspec.Struct, frozen=True, kw_only=True):
    """Distinct calls as columns; `of` is the distinct call of each priced row."""

    of: NDArray[np.intp]
    flops: NDArray[np.int64]
    again: NDArray[np.int64]
    moved: NDArray[np.int64]
    list_elements: NDArray[np.int64]
    list_passes: NDArray[np.int64]
    dtype: NDArray[np.int8]
    calls: tuple[Call, ...]


def price(trace: Trace, rows: NDArray[np.intp]) -> Signatures:
    """The cost of host rows whose operators are in the tables."""
    host = trace.host
    columns = [column[rows] for column in (host.shapes, host.dtypes, host.concrete, host.name)]
    first, of, _ = group(*columns)
    distinct = [column[first].tolist() for column in columns]
    texts: dict[int, Any] = {-1: None}
    calls, costs = [], []
    for *codes, name in zip(*distinct, strict=True):
        shapes, kinds, concrete = (_decoded(trace.strings, code, texts) for code in codes)
        call = Call(trace.strings[name], shapes, kinds, concrete)
        calls.append(call)
        costs.append(price_call(call))
    dtypes = {code: dtype_code(texts[code]) for code in set(distinct[1])}
    columns_of = {
        field: np.array([getattr(cost, field) for cost in costs], np.int64)
        for field in ("flops", "again", "moved", "list_elements", "list_passes")
    }
    times = np.bincount(of, minlength=len(costs))
    columns_of["flops"] = summable(columns_of["flops"], times)
    columns_of["again"][columns_of["flops"] < 0] = 0
    return Signatures(
        of=of,
        **columns_of,
        dtype=np.array([dtypes[code] for code in distinct[1]], np.int8),
        calls=tuple(calls),
    )


def summable(amounts: NDArray[np.int64], times: NDArray[np.int64] | int = 1) -> NDArray[np.int64]:
    """Amounts whose sum, each counted `times`, fits 64 bits: the largest become unknown."""
    order = np.argsort(amounts, kind="stable")
    total = np.cumsum((np.maximum(amounts, 0).astype(np.float64) * times)[order])
    if not len(total) or total[-1] < LARGEST:
        return amounts
    limited = amounts.copy()
    limited[order[total >= LARGEST]] = UNKNOWN
    return limited


def _decoded(strings: Sequence[str], code: int, known: dict[int, Any]) -> Any:
    if code not in known:
        try:
            known[code] = msgspec.json.decode(strings[code])
        except msgspec.DecodeError:
            known[code] = None
    return known[code]


def price_call(call: Call) -> Cost:
    """The cost of one call; unknown where shapes are missing or damaged."""
    multiplies = call.name in MATMUL_LIKE
    formula = MATMUL_LIKE.get(call.name) or OTHER.get(call.name)
    if formula is None and call.name.startswith(PREFIX):
        formula = compiled
    try:
        cost = formula(call) if formula else Cost(flops=UNKNOWN)
    except _UNKNOWN_ERRORS:
        return Cost(flops=UNKNOWN if multiplies else 0)
    amounts = (cost.flops, cost.moved, cost.list_elements)
    if max(amounts) >= LARGEST or min(amounts) < UNKNOWN:  # damaged shapes
        return Cost(flops=UNKNOWN if multiplies else 0)
    return cost
