"""The border: a value that cannot be true becomes "not captured" here, counted, with an example.

Code behind the border trusts its columns: sizes and counts fit their meaning, sums of them fit 64
bits, and the text of a shape, a dtype or a grid decodes to what its name says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.records.encode_json import replace_invalid
from stepscope.records.limits import MAX_EVENT_BYTES, MAX_RANKS
from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Columns = dict[str, NDArray[Any]]

MAX_ELEMENTS = 1 << 44
MAX_IDS = 1 << 62
MAX_DEVICES = 1 << 16
_MAX_SIDES = 64  # torch's own limit on a tensor's dimensions
_MAX_GRID_SIDE = (1 << 31) - 1  # CUDA's own limit
_SHOWN = 60
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
    """What was taken as not captured, by field: how often, and the first example."""

    def __init__(self) -> None:
        self._fields: dict[str, tuple[int, str]] = {}

    def add(self, field: str, rows: int, example: object, place: str = "") -> None:
        if not rows:
            return
        before, first = self._fields.get(field, (0, ""))
        self._fields[field] = before + rows, first or _example(example, place)

    def notes(self) -> tuple[Note, ...]:
        """One for each field."""
        return tuple(
            Note(
                id="odd-values",
                detail=f"{field}: {counted(rows, 'value')} that cannot be true, such as {example}; "
                f"taken as not captured",
                count=rows,
            )
            for field, (rows, example) in self._fields.items()
        )


def _example(value: object, place: str) -> str:
    shown = _shown(value)
    return f"{shown} in {place}" if place else shown


def _shown(value: object) -> str:
    """A few characters, however long, large or deep the value is, and whatever is in its text."""
    if isinstance(value, int) and abs(value) >= _LARGEST_SHOWN:
        return f"an integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    text = replace_invalid(value[:_SHOWN])
    return text if len(value) <= _SHOWN else f"{text}…"


def limit_numbers(table: str, columns: Columns, odd: OddValues) -> None:
    """Numbers below zero or beyond what their meaning allows become ABSENT."""
    for name, most in LIMITS[table].items():
        values = columns[name]
        if len(values) and (values.min() < ABSENT or values.max() > most):
            outside = (values < ABSENT) | (values > most)
            odd.add(name, int(outside.sum()), int(values[outside][0]))
            columns[name] = np.where(outside, ABSENT, values)


def limit_sizes(columns: Columns, odd: OddValues) -> None:
    """Allocations and frees, which are negative: what is impossible moves no bytes."""
    sizes = columns["size_bytes"]
    outside = (sizes > MAX_EVENT_BYTES) | (sizes < -MAX_EVENT_BYTES)
    if outside.any():
        odd.add("Bytes", int(outside.sum()), int(sizes[outside][0]))
        columns["size_bytes"] = np.where(outside, 0, sizes)


def limit_texts(
    columns: Columns, texts: Sequence[bytes], names: Sequence[str], odd: OddValues
) -> None:
    """Codes of texts that do not decode to what their column holds become ABSENT."""
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
    """A list with the sizes of each argument, or with those of each tensor of a list."""
    arguments = decoded(text, list[Any])
    return arguments is not None and all(map(_is_shape_or_list, arguments))


def _is_shape_or_list(argument: Any) -> bool:
    if not isinstance(argument, list):
        return False
    if argument and isinstance(argument[0], list):
        return all(isinstance(shape, list) and _is_shape(shape) for shape in argument)
    return _is_shape(argument)


def _is_shape(sides: list[Any]) -> bool:
    if len(sides) > _MAX_SIDES or not all(type(side) is int and side >= 0 for side in sides):
        return False
    return bool(math.prod(side or 1 for side in sides) <= MAX_ELEMENTS)


def are_words(text: bytes) -> bool:
    """A list of texts."""
    return decoded(text, list[str]) is not None


def is_grid(text: bytes) -> bool:
    sides = decoded(text, list[int])
    return sides is not None and _is_grid(sides)


def _is_grid(sides: list[int]) -> bool:
    return 0 < len(sides) <= 3 and all(0 < side <= _MAX_GRID_SIDE for side in sides)


# A column of text codes: what its field is called in the file, and what the text must be.
TEXTS: dict[str, tuple[str, Callable[[bytes], bool]]] = {
    "shapes": ("Input Dims", are_shapes),
    "dtypes": ("Input type", are_words),
    "concrete": ("Concrete Inputs", are_words),
    "grid": ("grid", is_grid),
}


def decoded(text: bytes | str, kind: Any) -> Any:
    """What JSON text holds, or None where it is not of that kind."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_whole(value: Any, most: int) -> bool:
    """A whole number from zero to `most`."""
    return type(value) is int and 0 <= value <= most


def rank_list(ranks: Any) -> list[int] | None:
    """Ranks of a group, each once; None where they cannot be."""
    if not isinstance(ranks, list) or not all(is_whole(rank, MAX_RANKS) for rank in ranks):
        return None
    return ranks if len(set(ranks)) == len(ranks) else None


def is_rank_text(text: str) -> bool:
    """The ranks of a call's group as JSON, or nothing; long lists are cut with dots."""
    return not text or "..." in text or rank_list(decoded(text, list[int])) is not None


def plausible_groups(groups: Any, odd: OddValues) -> tuple[dict[str, Any], ...]:
    """Process groups as a file lists them, without the values that cannot be true."""
    listed = groups if isinstance(groups, list) else []
    return tuple(_group(group, odd) for group in listed if isinstance(group, dict))


def _group(group: dict[str, Any], odd: OddValues) -> dict[str, Any]:
    checks: dict[str, Callable[[Any], bool]] = {
        "pg_name": lambda name: isinstance(name, str),
        "pg_desc": lambda words: isinstance(words, str),
        "backend_config": lambda words: isinstance(words, str),
        "pg_size": lambda size: is_whole(size, MAX_RANKS),
        "ranks": lambda ranks: rank_list(ranks) is not None,
    }
    kept = {}
    for name, holds in checks.items():
        if name in group and holds(group[name]):
            kept[name] = group[name]
        elif group.get(name) is not None:
            odd.add(name, 1, group[name], "pg_config")
    return kept
