"""One packed part of a rank's steps -> columns. A part is read whole or not at all."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.errors import UnreadableInputError
from stepscope.records.limits import MAX_BYTES, MAX_DURATION_NS, MAX_STAMP_NS
from stepscope.records.packed_steps import (
    ABSENT,
    END,
    EXTRA_FIELDS,
    MARKS,
    OTHER,
    PHASE_FIELDS,
    SCHEMA,
    STEP,
    WALL,
)
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.regular_files import read_whole

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.step_columns import Ints

_MAX_TEXT_BYTES = 256 << 20
_MAX_STEP = 1 << 48


class _Part(msgspec.Struct, frozen=True):
    schema: int
    steps: int
    base: dict[str, int]
    columns: dict[str, list[int]]
    unit: dict[str, int] = {}
    marks: dict[str, list[int]] = {}


def read_part(file: Path) -> dict[str, Ints]:
    """Every field of the part's steps, in the order of the lines that they were, and the marks as
    zeros and ones. Raises UnreadableInputError."""
    part = _decode_part(file)
    try:
        columns = {name: _column(part, name) for name in part.columns}
        _require_whole(columns, part.steps)
        columns = _restore(columns)
        columns |= {
            name: _flags(places, part.steps)
            for name, places in part.marks.items()
            if places and name in MARKS
        }
    except (OverflowError, ValueError, IndexError) as error:
        raise UnreadableInputError(str(error)) from None
    _require_possible(columns)
    return columns


def _column(part: _Part, name: str) -> Ints:
    values = np.array(part.columns[name], np.int64) + part.base.get(name, 0)
    unit = part.unit.get(name, 1)
    return values if unit == 1 else np.where(values < 0, ABSENT, values * unit)


def _decode_part(file: Path) -> _Part:
    try:
        part = decode(_decompress(read_whole(file)), _Part)
    except (NotJsonError, zlib.error) as error:
        raise UnreadableInputError(str(error)) from None
    if part.schema != SCHEMA:
        raise UnreadableInputError(f"a newer stepscope wrote it (schema {part.schema})")
    return part


def _decompress(data: bytes) -> bytes:
    unpack = zlib.decompressobj(wbits=31)
    text = unpack.decompress(data, _MAX_TEXT_BYTES)
    if not unpack.eof:
        raise UnreadableInputError("it ends early")
    return text


def _require_whole(columns: dict[str, Ints], steps: int) -> None:
    if steps < 1 or not {STEP, WALL} <= columns.keys():
        raise UnreadableInputError("it holds no steps")
    short = [name for name, values in columns.items() if values.shape != (steps,)]
    if short:
        raise UnreadableInputError(f"its column {short[0]} does not have {steps} values")


def _restore(columns: dict[str, Ints]) -> dict[str, Ints]:
    """The fields that were stored as what the others leave."""
    restored = dict(columns)
    restored[STEP] = np.cumsum(columns[STEP])
    if OTHER in columns:
        phases = (columns[name] for name in PHASE_FIELDS if name in columns)
        known = sum((np.maximum(values, 0) for values in phases), np.zeros_like(columns[WALL]))
        restored[OTHER] = columns[WALL] - known + columns[OTHER]
    if END in columns:
        restored[END] = np.cumsum(columns[END] + columns[WALL])
    return restored


def _flags(places: list[int], steps: int) -> Ints:
    flags = np.zeros(steps, np.int64)
    flags[np.array(places, np.int64)] = 1
    return flags


def _require_possible(columns: dict[str, Ints]) -> None:
    for name, values in columns.items():
        low, high = _bounds(name)
        if values.min() < low or values.max() > high:
            raise UnreadableInputError(f"its column {name} holds values that cannot be true")


def _bounds(name: str) -> tuple[int, int]:
    if name == STEP:
        return 0, _MAX_STEP
    if name == WALL:
        return 1, MAX_DURATION_NS
    if name in EXTRA_FIELDS and not name.endswith("_ns"):
        return ABSENT, MAX_BYTES
    return ABSENT, MAX_STAMP_NS if name == END else MAX_DURATION_NS
