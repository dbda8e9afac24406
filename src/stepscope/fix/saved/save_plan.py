"""What is done with every value that backward keeps: printed, saved and carried out later;
and how a selection is written down as a plan.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from stepscope.errors import UnreadableInputError
from stepscope.fix.saved.memory_model import BackwardMemory, node_times
from stepscope.fix.saved.selection import ValueSelection, is_planned
from stepscope.fix.saved.step_record import (
    HoldingOption,
    SavedUse,
    StepRecord,
    described,
)
from stepscope.text.figures import duration, factor, percent, size

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
class LadderPoint:
    """The lowest peak of a compiled step for a share of added time."""

    share: float
    saved_bytes: int
    peak_bytes: int
    step_ns: int


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
    target: str = "max"  # as records/change_values.py writes it
    # Of the whole step, weights and gradients included; None where torch keeps no account.
    step_peak_bytes_before: int | None = None
    step_peak_bytes: int | None = None
    timeline: PlanTimeline | None = None
    ladder: tuple[LadderPoint, ...] = ()  # of compiled models

    def for_other_shapes(self) -> SavePlan:
        """The same actions, for batches of another size."""
        return replace(self, uses=tuple(replace(use, shape=None) for use in self.uses))

    def changes_something(self) -> bool:
        actions = [use.action for use in self.uses] + [row.action for row in self.rows]
        return any(action != KEEP for action in actions)

    @property
    def slowdown(self) -> float:
        return self.extra_ns / max(1, self.step_ns)

    def __str__(self) -> str:
        return "\n".join([self.verdict(), *self.notes, "", *self._table(), *self._ladder_lines()])

    def _ladder_lines(self) -> list[str]:
        """What more or less time would give."""
        return [
            f"{percent(point.share)} more time: peak {size(point.peak_bytes)}"
            for point in self.ladder
        ]

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
            ladder=tuple(LadderPoint(**point) for point in data.pop("ladder", ())),
            **data,
        )


def _repeat(data: dict[str, Any]) -> PlannedRepeat:
    copied = data.get("copied_inputs")
    return PlannedRepeat(
        operator=data["operator"],
        recomputed_inputs=tuple(data["recomputed_inputs"]),
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


# What a selection does with every value, operator and saved tensor, as a plan writes it down.


def repeats(record: StepRecord, selection: ValueSelection) -> Iterator[PlannedRepeat]:
    for number in sorted(selection.repeated):
        call = record.operators[number]
        recomputed = tuple(_action(record, selection, value) == RECOMPUTE for value in call.inputs)
        copied = tuple(record.values[value].copied for value in call.inputs)
        yield PlannedRepeat(operator=number, recomputed_inputs=recomputed, copied_inputs=copied)


def results(record: StepRecord, selection: ValueSelection) -> Iterator[PlannedResult]:
    for number in sorted(selection.encoded.keys() | selection.kept):
        value = record.values[number]
        option = selection.encoded.get(number)
        encoding = None if option is None else option.encoding
        repeated = value.producer in selection.repeated
        if value.producer is not None and (repeated or encoding is not None):
            slot = record.operators[value.producer].outputs.index(number)
            yield PlannedResult(operator=value.producer, slot=slot, encoding=encoding)


def planned_use(
    record: StepRecord, selection: ValueSelection, number: int, use: SavedUse
) -> PlannedUse:
    action, encoding = planned_action(record, selection, number, use), None
    if number in selection.encoded_uses:
        encoding = selection.encoded_uses[number].encoding
    elif action == ENCODE and use.value is not None:
        encoding = selection.encoded[use.value].encoding
    return PlannedUse(
        after=use.after, shape=use.shape, dtype=use.dtype, action=action, encoding=encoding
    )


def planned_action(
    record: StepRecord, selection: ValueSelection, number: int, use: SavedUse
) -> str:
    if number in selection.encoded_uses:
        return ENCODE
    if use.value is None or not is_planned(record, use):
        return KEEP
    return _action(record, selection, use.value)


def _action(record: StepRecord, selection: ValueSelection, number: int) -> str:
    if number in selection.encoded:
        return ENCODE
    value = record.values[number]
    stays = number in selection.kept
    return KEEP if stays or value.producer not in selection.repeated else RECOMPUTE


def rows(record: StepRecord, selection: ValueSelection) -> Iterator[PlanRow]:
    """Every value that backward kept, and those that are now kept to start from."""
    encoded_uses = defaultdict[int, set[HoldingOption]](set)
    needed = selection.kept | selection.encoded.keys()
    for number, use in enumerate(record.uses):
        if use.value is not None and number not in selection.encoded_uses:
            needed.add(use.value)
        elif use.value is not None:
            encoded_uses[use.value].add(selection.encoded_uses[number])
    before = {use.value for use in record.uses}
    repeated_ns = _repeated_ns(record, selection, needed)
    for number in sorted(needed | set(encoded_uses)):
        value = record.values[number]
        if value.owned:
            continue
        action = _action(record, selection, number) if number in needed else ENCODE
        options = sorted(encoded_uses[number], key=lambda option: option.encoding)
        if number in needed:
            options = [selection.encoded[number]] if action == ENCODE else []
        names = ", ".join(dict.fromkeys(described(option.encoding) for option in options))
        made_by = "" if value.producer is None else record.operators[value.producer].name
        yield PlanRow(
            value=f"{'x'.join(map(str, value.shape)) or 'scalar'} {value.dtype}",
            module=value.module,
            operator=made_by.removeprefix("aten."),
            size_bytes=value.size_bytes,
            held_bytes=value.size_bytes
            if action == KEEP
            else sum(option.held_bytes for option in options),
            action=f"{action}: {names}" if options else action,
            cost_ns=repeated_ns.get(number, sum(option.cost_ns for option in options)),
            was_kept=number in before,
        )


def _repeated_ns(record: StepRecord, selection: ValueSelection, shown: set[int]) -> dict[int, int]:
    """By recomputed value that is shown: what it takes, with all that is made on the way and not
    shown itself. What several need counts once, with the first: all add up to what is repeated."""
    taken: set[int] = set()
    times: dict[int, int] = {}
    for number in sorted(shown):
        if _action(record, selection, number) != RECOMPUTE:
            continue
        times[number], waiting = 0, [record.values[number].producer]
        while waiting:
            producer = waiting.pop()
            if producer is None or producer in taken:
                continue
            taken.add(producer)
            call = record.operators[producer]
            times[number] += call.took_ns
            waiting += [
                record.values[value].producer
                for value in call.inputs
                if value not in shown and _action(record, selection, value) == RECOMPUTE
            ]
    return times


# Memory through a step, without the plan and with it: what each action takes away, and when.

_POINTS = 120  # of each pass, at most


def plan_timeline(
    record: StepRecord,
    plain: BackwardMemory,
    selection: ValueSelection,
    memory: BackwardMemory,
) -> PlanTimeline:
    operators, nodes = len(record.operators) + 1, len(plain.levels)
    before = _before(record, selection, operators, nodes)
    forward_ends, backward_ends = _stretches(operators), _stretches(nodes - 1)
    packed: dict[int, int] = {}
    after = [0] * operators
    for number, use in enumerate(record.uses):
        if number in selection.encoded_uses:
            after[use.after] += selection.encoded_uses[number].held_bytes
        elif use.value is not None:
            packed.setdefault(use.value, use.after)
    for value in selection.kept | selection.encoded.keys():
        known, option = record.values[value], selection.encoded.get(value)
        begins = packed.get(value, 0 if known.producer is None else known.producer + 1)
        after[begins] += known.size_bytes if option is None else option.held_bytes
    after[0] += max(0, memory.saved_bytes - sum(after))  # what cannot be planned
    forward_after = list(accumulate(after))
    return PlanTimeline(
        forward_points=len(forward_ends),
        before_bytes={
            action: (*_highest(forward_ends, forward), *_highest(backward_ends, backward))
            for action, (forward, backward) in sorted(before.items())
        },
        after_bytes=(
            *_highest(forward_ends, forward_after),
            *_highest(backward_ends, memory.replay_levels[:-1]),
        ),
    )


def _before(
    record: StepRecord, selection: ValueSelection, operators: int, nodes: int
) -> dict[str, tuple[list[int], list[int]]]:
    """Return bytes by action at every operator of forward and node of backward."""
    whole = {
        use.value for number, use in enumerate(record.uses) if number not in selection.encoded_uses
    }
    first, last, known = dict[int, int](), dict[int, int](), dict[int, tuple[int, str]]()
    for use, time in zip(record.uses, node_times(record), strict=True):
        if use.value is None or record.values[use.value].owned:
            continue
        value, planned = record.values[use.value], is_planned(record, use)
        first.setdefault(value.storage, use.after)
        last[value.storage] = max(last.get(value.storage, 0), time if planned else nodes - 2)
        action = _action(record, selection, use.value) if use.value in whole else ENCODE
        known[value.storage] = (value.size_bytes, action if planned else KEEP)
    changes: dict[str, tuple[list[int], list[int]]] = {}
    for storage, (size_bytes, action) in known.items():
        forward, backward = changes.setdefault(action, ([0] * operators, [0] * (nodes + 1)))
        forward[first[storage]] += size_bytes
        backward[0] += size_bytes
        backward[last[storage] + 1] -= size_bytes
    return {
        action: (list(accumulate(forward)), list(accumulate(backward)))
        for action, (forward, backward) in changes.items()
    }


def _stretches(count: int) -> list[int]:
    """The ends of at most so many stretches of equal length."""
    points = min(_POINTS, max(1, count))
    return [-(-count * (point + 1) // points) for point in range(points)]


def _highest(ends: list[int], levels: Sequence[int]) -> list[int]:
    """The highest level of each stretch."""
    starts = [0, *ends[:-1]]
    return [max(levels[start:end], default=0) for start, end in zip(starts, ends, strict=True)]
