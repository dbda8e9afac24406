"""A block of lines of steps.jsonl -> the text of a packed part, in small pieces.

Runs in the writer's thread while the model trains: no piece holds Python's lock for long.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stepscope.records.packed_steps import (
    ABSENT,
    END,
    MARKS,
    OTHER,
    PHASE_FIELDS,
    SCHEMA,
    STEP,
    WALL,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    Line = dict[str, Any]

_PIECE = 500  # numbers: about 50 us


class PartText:
    """The JSON of one packed part. Fields that it does not know are packed like the others."""

    def __init__(self, lines: list[Line]) -> None:
        self._lines = lines

    def encode(self) -> Iterator[bytes]:
        """Pieces of the text; joined they are one JSON object."""
        names: dict[str, None] = {}
        for line in self._lines:
            names.update(dict.fromkeys(line))
        base: dict[str, int] = {}
        yield f'{{"schema": {SCHEMA}, "steps": {len(self._lines)}, "columns": {{'.encode()
        for place, name in enumerate(name for name in names if name not in MARKS):
            values = self._stored(name)
            base[name] = min(values)
            yield f'{", " if place else ""}"{name}": ['.encode()
            yield from _numbers(values, base[name])
            yield b"]"
        marks = {name: self._places(name) for name in MARKS if name in names}
        yield f'}}, "base": {json.dumps(base)}, "marks": {json.dumps(marks)}}}'.encode()

    def _stored(self, name: str) -> list[int]:
        """What the other fields do not already say."""
        if name == STEP:
            return _distances([line[STEP] for line in self._lines])
        if name == OTHER:
            return [line.get(OTHER, 0) - line[WALL] + _phases(line) for line in self._lines]
        if name == END:
            apart = _distances([line.get(END, 0) for line in self._lines])
            return [end - line[WALL] for end, line in zip(apart, self._lines, strict=True)]
        return [line.get(name, ABSENT) for line in self._lines]

    def _places(self, name: str) -> list[int]:
        return [place for place, line in enumerate(self._lines) if line.get(name)]


def _phases(line: Line) -> int:
    return sum(line.get(name, 0) for name in PHASE_FIELDS)


def _distances(values: list[int]) -> list[int]:
    return [value - before for value, before in zip(values, [0, *values[:-1]], strict=True)]


def _numbers(values: list[int], base: int) -> Iterator[bytes]:
    """Small numbers take little space once compressed, so all are above the smallest one."""
    for start in range(0, len(values), _PIECE):
        piece = ",".join([str(value - base) for value in values[start : start + _PIECE]])
        yield f"{',' if start else ''}{piece}".encode()
