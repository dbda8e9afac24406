"""Microseconds with decimals -> exact integer nanoseconds.

A double holds a time below 2**43 µs (three months, Kineto's base interval) to better than half a
nanosecond, if the whole and the fractional part are converted separately. Beyond that, whole
numbers are still exact, and numbers with decimals must be read from their text.
"""

from __future__ import annotations

import struct
from decimal import Decimal, InvalidOperation, Overflow
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.records.trace import Int64

INVALID_NS = np.int64(-(2**63))
LIMIT_NS = 2**62  # years 1824 to 2116: anything outside is not a time
LIMIT_DUR_NS = 100 * 86_400 * 10**9  # 100 days
_EXACT_BELOW_US = float(2**43)
_MAX_DIGITS = 40


class NeedsTextError(Exception):
    """These numbers cannot be converted exactly from doubles."""


def microseconds_to_ns(values: Sequence[Any]) -> Int64:
    """Convert ints and floats exactly; INVALID_NS for None, NaN and values out of range."""
    if values and type(values[0]) is int and set(map(type, values)) == {int}:
        return _whole_to_ns(values)
    number = np.empty(len(values))
    try:  # a third of the time of np.array
        struct.pack_into(f"{len(values)}d", number.data, 0, *values)
    except (struct.error, OverflowError):
        number = np.array([_float_or_nan(value) for value in values])
    if not len(number):
        return np.empty(0, np.int64)
    with np.errstate(invalid="ignore"):
        largest = np.abs(number).max(initial=0.0)
        if largest < _EXACT_BELOW_US:
            return _split_to_ns(number)
        out = _split_to_ns(np.where(np.abs(number) < _EXACT_BELOW_US, number, np.nan))
        big = np.flatnonzero(~(np.abs(number) < _EXACT_BELOW_US) & ~np.isnan(number))
    for row in big.tolist():
        value = values[row]
        if not isinstance(value, int) and abs(value) < LIMIT_NS / 1000:
            raise NeedsTextError
    if len(big):
        whole = np.where(np.abs(number[big]) < LIMIT_NS / 1000, number[big], 0).astype(np.int64)
        out[big] = np.where(np.abs(number[big]) < LIMIT_NS / 1000, whole * 1000, INVALID_NS)
    return out


def durations_to_ns(values: Sequence[Any]) -> Int64:
    """Convert durations: those that doubles cannot hold are beyond LIMIT_DUR_NS anyway."""
    try:
        durations = microseconds_to_ns(values)
        if INVALID_NS not in durations:
            return durations
    except NeedsTextError:
        pass
    number = np.array([_float_or_nan(value) for value in values])
    return _split_to_ns(np.clip(number, -_EXACT_BELOW_US, _EXACT_BELOW_US))


def _whole_to_ns(values: Sequence[int]) -> Int64:
    limit = LIMIT_NS // 1000
    if max(values) < limit and min(values) > -limit:
        return np.array(values, dtype=np.int64) * 1000
    return np.array([v * 1000 if abs(v) < limit else INVALID_NS for v in values], dtype=np.int64)


def text_to_ns(texts: Sequence[Any]) -> Int64:
    return np.array([_one_text_to_ns(bytes(text)) for text in texts], dtype=np.int64)


def _split_to_ns(number: NDArray[np.float64]) -> Int64:
    whole = np.floor(number)
    ns = np.rint((number - whole) * 1000.0)
    bad = np.isnan(number)
    if bad.any():
        whole, ns = np.where(bad, 0, whole), np.where(bad, 0, ns)
        result: Int64 = whole.astype(np.int64) * 1000 + ns.astype(np.int64)
        result[bad] = INVALID_NS
        return result
    return whole.astype(np.int64) * 1000 + ns.astype(np.int64)


def _one_text_to_ns(text: bytes) -> int:
    whole, dot, fraction = text.partition(b".")
    if len(fraction) <= 3 and whole.isdigit() and (fraction.isdigit() or not dot):
        if len(whole) > _MAX_DIGITS:
            return int(INVALID_NS)
        ns = int(whole) * 1000 + int(fraction.ljust(3, b"0"))
    else:
        try:
            number = Decimal(text.decode("ascii", "replace").strip(' "')) * 1000
            if number.adjusted() > _MAX_DIGITS:  # converting it would take forever
                return int(INVALID_NS)
            ns = round(number)
        except (InvalidOperation, Overflow, ValueError, OverflowError):
            return int(INVALID_NS)
    return ns if abs(ns) < LIMIT_NS else int(INVALID_NS)


def _float_or_nan(value: Any) -> float:
    try:
        return float("nan") if value is None else float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
