"""Check values that other programs wrote: exact integer nanoseconds from decimal
microseconds; what cannot be true becomes "not captured", counted, with an example.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation, Overflow
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.quality import MAX_EVENT_BYTES, MAX_RANKS, Note, replace_invalid
from stepscope.records.trace import ABSENT, Columns, Int64
from stepscope.text.words import counted
from stepscope.trace.decode import DECODE_ERRORS

# Code after this point trusts its columns: sizes and counts fit their meaning, their sums fit 64
# bits, and the text of a shape, a dtype or a grid decodes to what its name says.

MAX_ELEMENTS = 1 << 44
MAX_IDS = 1 << 62
MAX_DEVICES = 1 << 16
_MAX_SIDES = 64  # torch's own limit on a tensor's dimensions
_AS_MANY = msgspec.Meta(max_length=_MAX_SIDES)
# Most texts are lists of these, which msgspec checks much faster than code here could.
_SHAPES = msgspec.json.Decoder(list[Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], _AS_MANY]])
_STRIDES = msgspec.json.Decoder(
    list[Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]], _AS_MANY]]
)
_TEXTS = msgspec.json.Decoder(list[str])
_MAX_GRID_SIDE = (1 << 31) - 1  # CUDA's own limit
_SHOWN_CHARACTERS = 60
_LARGEST_SHOWN = 1 << 128

LIMITS = {
    "host": {"correlation": MAX_IDS, "sequence": MAX_IDS},
    "device": {
        "correlation": MAX_IDS,
        "device": MAX_DEVICES,
        "size_bytes": MAX_EVENT_BYTES,
        "graph_node": MAX_IDS,
    },
    "memory": {
        "address": MAX_IDS,
        "allocated_bytes": MAX_EVENT_BYTES,
        "reserved_bytes": MAX_EVENT_BYTES,
        "device": MAX_DEVICES,
    },
}


class OddValues:
    """Values treated as not captured, by field: how many, and the first example."""

    def __init__(self) -> None:
        self._fields: dict[str, tuple[int, str]] = {}

    def add(self, field: str, rows: int, example: object, place: str = "") -> None:
        if not rows:
            return
        count, first = self._fields.get(field, (0, ""))
        self._fields[field] = count + rows, first or _example(example, place)

    def notes(self) -> tuple[Note, ...]:
        return tuple(
            Note(
                id="odd-values",
                detail=f"{field}: {counted(rows, 'value')} that cannot be true, such as {example}; "
                "they count as not captured",
                count=rows,
            )
            for field, (rows, example) in self._fields.items()
        )


def _example(value: object, place: str) -> str:
    shown = _shown(value)
    return f"{shown} in {place}" if place else shown


def _shown(value: object) -> str:
    """The value in a few characters, however long, large or deep it is."""
    if isinstance(value, int) and abs(value) >= _LARGEST_SHOWN:
        return f"an integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    text = replace_invalid(value[:_SHOWN_CHARACTERS])
    return text if len(value) <= _SHOWN_CHARACTERS else f"{text}…"


def limit_numbers(table: str, columns: Columns, odd: OddValues) -> None:
    """Negative numbers and numbers beyond their limit become ABSENT."""
    for name, limit in LIMITS[table].items():
        values = columns[name]
        if len(values) and (values.min() < ABSENT or values.max() > limit):
            outside = (values < ABSENT) | (values > limit)
            odd.add(name, int(outside.sum()), int(values[outside][0]))
            columns[name] = np.where(outside, ABSENT, values)


def limit_sizes(columns: Columns, odd: OddValues) -> None:
    """Impossible allocations, and frees (which are negative), become 0 bytes."""
    sizes = columns["size_bytes"]
    outside = (sizes > MAX_EVENT_BYTES) | (sizes < -MAX_EVENT_BYTES)
    if outside.any():
        odd.add("Bytes", int(outside.sum()), int(sizes[outside][0]))
        columns["size_bytes"] = np.where(outside, 0, sizes)


def limit_texts(
    columns: Columns, texts: Sequence[bytes], names: Sequence[str], odd: OddValues
) -> None:
    """Codes of texts that do not decode to what their column should hold become ABSENT."""
    for column, (field, is_plausible) in TEXTS.items():
        if column not in columns:
            continue
        codes = columns[column]
        used = np.flatnonzero(np.bincount(codes[codes >= 0], minlength=1)).tolist()
        wrong = [code for code in used if not is_plausible(texts[code])]
        if wrong:
            rows = np.isin(codes, wrong)
            first = int(rows.argmax())
            example = texts[codes[first]].decode("utf-8", "replace")
            odd.add(field, int(rows.sum()), example, names[columns["name"][first]])
            columns[column] = np.where(rows, ABSENT, codes).astype(np.int32)


def are_shapes(text: bytes) -> bool:
    """Whether the text lists the shape of each argument, or of each tensor in a list."""
    try:
        shapes = _SHAPES.decode(text)
    except DECODE_ERRORS:  # lists of tensors, or no shapes
        arguments = decode_or_none(text, list[Any])
        return arguments is not None and all(map(_is_shape_or_list, arguments))
    return all(math.prod(filter(None, sides)) <= MAX_ELEMENTS for sides in shapes)


def _is_shape_or_list(argument: Any) -> bool:
    if not isinstance(argument, list):
        return False
    if argument and isinstance(argument[0], list):
        return all(isinstance(shape, list) and _is_shape(shape) for shape in argument)
    return _is_shape(argument)


def _is_shape(sides: list[Any]) -> bool:
    if len(sides) > _MAX_SIDES or not all(type(side) is int and side >= 0 for side in sides):
        return False
    return bool(math.prod(filter(None, sides)) <= MAX_ELEMENTS)


def are_strides(text: bytes) -> bool:
    """Whether the text lists the strides of each argument, or of each tensor in a list."""
    if _is_valid(_STRIDES, text):
        return True
    arguments = decode_or_none(text, list[Any])
    return arguments is not None and all(map(_are_steps_or_lists, arguments))


def _are_steps_or_lists(argument: Any) -> bool:
    if not isinstance(argument, list):
        return False
    listed = argument if argument and isinstance(argument[0], list) else [argument]
    return all(isinstance(steps, list) and _are_steps(steps) for steps in listed)


def _are_steps(steps: list[Any]) -> bool:
    return len(steps) <= _MAX_SIDES and all(is_whole(step, MAX_ELEMENTS) for step in steps)


def are_texts(text: bytes) -> bool:
    return _is_valid(_TEXTS, text)


def _is_valid(decoder: msgspec.json.Decoder[Any], text: bytes) -> bool:
    try:
        decoder.decode(text)
    except DECODE_ERRORS:
        return False
    return True


def is_grid(text: bytes) -> bool:
    sides = decode_or_none(text, list[int]) or ()
    return 0 < len(sides) <= 3 and all(0 < side <= _MAX_GRID_SIDE for side in sides)


# Column of text codes -> the field's name in the file, and what its text must be.
TEXTS: dict[str, tuple[str, Callable[[bytes], bool]]] = {
    "shapes": ("Input Dims", are_shapes),
    "dtypes": ("Input type", are_texts),
    "strides": ("Input Strides", are_strides),
    "concrete": ("Concrete Inputs", are_texts),
    "grid": ("grid", is_grid),
}


def decode_or_none(text: bytes | str, kind: Any) -> Any:
    """The value that JSON text holds, or None if it is not of that kind."""
    try:
        return msgspec.json.decode(text, type=kind)
    except DECODE_ERRORS:
        return None


def is_whole(value: Any, limit: int) -> bool:
    """Whether it is a whole number from zero to `limit`."""
    return type(value) is int and 0 <= value <= limit


def rank_list(ranks: Any) -> list[int] | None:
    """The ranks of a group, each once; None if they cannot be true."""
    if not isinstance(ranks, list) or not all(is_whole(rank, MAX_RANKS) for rank in ranks):
        return None
    return ranks if len(set(ranks)) == len(ranks) else None


def is_rank_text(text: str) -> bool:
    """Whether the text lists a group's ranks as JSON, cut with dots if long, or is empty."""
    return not text or "..." in text or rank_list(decode_or_none(text, list[int])) is not None


def plausible_groups(groups: Any, odd: OddValues) -> tuple[dict[str, Any], ...]:
    """The process groups of a file, without values that cannot be true."""
    listed = groups if isinstance(groups, list) else []
    return tuple(_group(group, odd) for group in listed if isinstance(group, dict))


def _group(group: dict[str, Any], odd: OddValues) -> dict[str, Any]:
    checks: dict[str, Callable[[Any], bool]] = {
        "pg_name": lambda name: isinstance(name, str),
        "pg_desc": lambda text: isinstance(text, str),
        "backend_config": lambda text: isinstance(text, str),
        "pg_size": lambda size: is_whole(size, MAX_RANKS),
        "ranks": lambda ranks: rank_list(ranks) is not None,
    }
    plausible = {}
    for name, is_plausible in checks.items():
        if name in group and is_plausible(group[name]):
            plausible[name] = group[name]
        elif group.get(name) is not None:
            odd.add(name, 1, group[name], "pg_config")
    return plausible


# Microseconds with decimals -> exact integer nanoseconds.
#
# A double holds a time below 2**43 µs (three months, Kineto's base interval) to better than half a
# nanosecond, if the whole and the fractional part are converted separately. Beyond that, whole
# numbers are still exact, and numbers with decimals must be read from their text.

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


# The types of the columns of a Trace, as records/trace.py declares them.

_CODES = {"Int8": "<i1", "Int32": "<i4", "Int64": "<i8"}


def column_types(table: type[Any]) -> dict[str, np.dtype[Any]]:
    return {name: np.dtype(_CODES[table.__annotations__[name]]) for name in table.__struct_fields__}
