"""The cells of the fuse table, in the order in which they say most."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from fuse_processes import MPS, PROCESSES
from fuse_ways import SERIAL

_FIRST_MODELS = 32
_MOST_STREAMS, _MOST_PROCESSES = 8, 8
_LATE = (PROCESSES, MPS, "streams")
_GOAL_FIRST = (  # what the goal compares: the best fused way with the best serial one
    "fused+compile+graph", "serial compiled+graphed", "fused+graph", "serial graphed",
    "serial eager", "vmap",
)  # fmt: skip
_SLOW_TO_START = 3  # rounds: what compiles or spawns comes after what does not


@dataclass(frozen=True)
class FuseCell:
    """One number of the table: this training in this way."""

    case: str
    dtype: str
    way: str
    models: int

    @classmethod
    def of(cls, result: dict[str, Any]) -> FuseCell:
        return cls(**{field.name: result[field.name] for field in fields(cls)})

    def named(self) -> dict[str, Any]:
        return asdict(self)

    def is_like(self, other: FuseCell) -> bool:
        """But for the number of models."""
        return (self.case, self.dtype, self.way) == (other.case, other.dtype, other.way)


def plan(cases: list[str], dtypes: list[str], models: list[int], ways: list[str]) -> list[FuseCell]:
    """ResNet-18 in bf16 with 32 models first; then every training at 32, then fewer models."""
    cells = [
        FuseCell(case, dtype, way, count)
        for case in cases
        for dtype in dtypes
        for way in ways
        for count in _counts(way, models)
    ]

    def rank(cell: FuseCell) -> tuple[int, ...]:
        largest = cell.models == max(models) or cell.way in SERIAL
        first_case = cell.case == cases[0] and cell.dtype == dtypes[0]
        slow = "compile" in cell.way or cell.way in _LATE
        wave = 0 if first_case and largest else 1 + 2 * (not largest) + (cell.dtype != dtypes[0])
        late = cell.way in _LATE
        return (
            wave + _SLOW_TO_START * (slow and not first_case) + 2 * late,
            cases.index(cell.case),
            _goal_place(cell.way) if wave == 0 else -cell.models,
            ways.index(cell.way),
        )

    return sorted(cells, key=rank)


def _goal_place(way: str) -> int:
    return _GOAL_FIRST.index(way) if way in _GOAL_FIRST else len(_GOAL_FIRST)


def _counts(way: str, models: list[int]) -> list[int]:
    if way in SERIAL:
        return [1]
    if way in (PROCESSES, MPS):
        return [max((one for one in models if one <= _MOST_PROCESSES), default=1)]
    if way == "streams":
        return [max((one for one in models if one <= _MOST_STREAMS), default=1)]
    if way == "vmap" or "compile" in way:
        return [max(models)]
    return sorted(models, reverse=True)
