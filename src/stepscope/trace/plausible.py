"""Values that cannot be true become "not captured" here, counted, with an example.

Code after this point trusts its columns: sizes and counts fit their meaning, their sums fit 64
bits, and the text of a shape, a dtype or a grid decodes to what its name says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from stepscope.records.encode_json import replace_invalid
from stepscope.records.limits import MAX_EVENT_BYTES, MAX_RANKS
from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT
from stepscope.records.words import counted
from stepscope.trace.decode import DECODE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.trace import Columns


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
