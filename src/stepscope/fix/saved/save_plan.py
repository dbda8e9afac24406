"""What is done with every value that backward keeps: printed, saved, and carried out later."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from stepscope.errors import UnreadableInputError
from stepscope.records.figures import duration, factor, percent, size

KEEP, RECOMPUTE, ENCODE = "keep", "recompute", "encode"
_MOST_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUse:
    """One saved tensor, in the order of saving: where it is expected, and what happens to it."""

    after: int  # operators that ran before
    shape: tuple[int, ...] | None  # None: any
    dtype: str
    action: str
    encoding: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRepeat:
    """An operator that backward may ask for again."""

    operator: int
    recomputed_inputs: tuple[bool, ...]  # of every tensor argument; the others are kept
    again: str | None = None  # a cheaper way than the operator itself
    # Of the kept arguments, those that the pass did not make: backward starts from copies. None in
    # plans without this entry: every argument that no differentiable operator made is copied.
    copied_inputs: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedResult:
    """A value that is kept for all who need it: a result of one operator."""

    operator: int
    slot: int  # among the storages that the operator made
    encoding: str | None  # None: as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One value, for people to read."""

    value: str
    module: str
    operator: str
    size_bytes: int
    held_bytes: int
    action: str
    cost_ns: int
    was_kept: bool = True  # for backward, without the plan; else only to start from


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimeline:
    """Bytes kept for backward through one step: first `forward_points` of the forward pass, then
    those of backward. `before_bytes` by what the plan does with the values; all actions add up to
    the step without a plan."""

    forward_points: int
    before_bytes: dict[str, tuple[int, ...]]
    after_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """For one forward pass, recognised by its operators. Bytes are of what backward keeps, without
    parameters; a peak counts what backward itself makes again."""

    operators: tuple[str, ...]
    repeated: tuple[PlannedRepeat, ...]
    results: tuple[PlannedResult, ...]  # encoded, or kept though their operator is repeated
    uses: tuple[PlannedUse, ...]
    rows: tuple[PlanRow, ...]
    saved_bytes_before: int
    saved_bytes: int
    peak_bytes_before: int
    peak_bytes: int
    extra_ns: int
    step_ns: int
    notes: tuple[str, ...] = ()
    target: str = "max"  # as records/memory_targets.py writes it
    # Of the whole step, weights and gradients included; None where torch keeps no account.
    step_peak_bytes_before: int | None = None
    step_peak_bytes: int | None = None
    timeline: PlanTimeline | None = None

    def for_other_shapes(self) -> SavePlan:
        """The same actions, for batches of another size."""
        return replace(self, uses=tuple(replace(use, shape=None) for use in self.uses))

    def changes_something(self) -> bool:
        return any(use.action != KEEP for use in self.uses)

    @property
    def slowdown(self) -> float:
        return self.extra_ns / max(1, self.step_ns)

    def __str__(self) -> str:
        return "\n".join([self.verdict(), *self.notes, "", *self._table()])

    def verdict(self) -> str:
        if self.peak_bytes >= self.peak_bytes_before:
            return f"Backward needs {size(self.saved_bytes_before)}. Nothing is changed."
        ratio = self.peak_bytes_before / max(1, self.peak_bytes)
        return (
            f"Backward needs {size(self.saved_bytes)} instead of "
            f"{size(self.saved_bytes_before)}. The peak is {size(self.peak_bytes)} instead of "
            f"{size(self.peak_bytes_before)} ({factor(ratio)} times less), for about "
            f"{duration(self.extra_ns)} more ({percent(self.slowdown)}) "
            f"per step.{self._step_words()}"
        )

    def _step_words(self) -> str:
        if self.step_peak_bytes is None or self.step_peak_bytes_before is None:
            return ""
        return (
            f" The whole step needs {size(self.step_peak_bytes)} instead of "
            f"{size(self.step_peak_bytes_before)}."
        )

    def _table(self) -> list[str]:
        shown = sorted(self.rows, key=lambda row: -max(row.size_bytes, row.held_bytes))
        cells = [("value", "made by", "module", "bytes", "held", "action", "cost")]
        for row in shown[:_MOST_ROWS]:
            cost = duration(row.cost_ns) if row.cost_ns else ""
            sizes = size(row.size_bytes), size(row.held_bytes)
            cells.append((row.value, row.operator, row.module, *sizes, row.action, cost))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        if len(shown) > _MOST_ROWS:
            rest = shown[_MOST_ROWS:]
            total = size(sum(row.size_bytes for row in rest))
            lines.append(f"and {len(rest)} smaller values ({total})")
        return lines

    def to_json(self) -> str:
        """`from_json` reads it back, equal."""
        return json.dumps({"schema": 1, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> SavePlan:
        try:
            data = json.loads(text)
            if data.pop("schema") != 1:
                raise ValueError("its schema is not 1")
            return cls._from(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnreadableInputError(
                f"not a plan of save_memory ({error}). Pass what SavePlan.to_json() returned"
            ) from None

    @classmethod
    def _from(cls, data: dict[str, Any]) -> SavePlan:
        uses = tuple(
            PlannedUse(**{**use, "shape": use["shape"] and tuple(use["shape"])})
            for use in data.pop("uses")
        )
        repeated = tuple(_repeat(call) for call in data.pop("repeated"))
        return cls(
            operators=tuple(data.pop("operators")),
            repeated=repeated,
            results=tuple(PlannedResult(**result) for result in data.pop("results")),
            uses=uses,
            rows=tuple(PlanRow(**row) for row in data.pop("rows")),
            notes=tuple(data.pop("notes")),
            timeline=_timeline(data.pop("timeline", None)),
            **data,
        )


def _repeat(data: dict[str, Any]) -> PlannedRepeat:
    copied = data.get("copied_inputs")
    return PlannedRepeat(
        operator=data["operator"],
        recomputed_inputs=tuple(data["recomputed_inputs"]),
        again=data.get("again"),
        copied_inputs=None if copied is None else tuple(copied),
    )


def _timeline(data: dict[str, Any] | None) -> PlanTimeline | None:
    if data is None:
        return None
    return PlanTimeline(
        forward_points=data["forward_points"],
        before_bytes={action: tuple(levels) for action, levels in data["before_bytes"].items()},
        after_bytes=tuple(data["after_bytes"]),
    )
