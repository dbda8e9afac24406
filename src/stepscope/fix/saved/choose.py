"""The plan for a target: many selections are compared by their peak and their time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepscope.fix.saved.backward_memory import BackwardMemory, backward_memory
from stepscope.fix.saved.save_plan import (
    ENCODE,
    KEEP,
    RECOMPUTE,
    PlannedRepeat,
    PlannedResult,
    PlannedUse,
    PlanRow,
    SavePlan,
)
from stepscope.fix.saved.selection import (
    ValueSelection,
    coding_ns,
    is_planned,
    keep_everything,
    select,
)
from stepscope.records.figures import percent, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.fix.saved.step_record import SavedUse, StepRecord, StepValue

STEP_PER_FORWARD = 3  # backward does about twice the work of forward
_MOST_SEGMENTS = 64
_LEAST_IN_SEGMENT = 8  # operators
_PRICES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times the step's bytes for the step's time
_WORTH = 0.98  # of the peak: less saved is not worth a plan
_WEIGHTS_DOMINATE = 4


@dataclass(frozen=True, slots=True)
class MemoryTarget:
    """Of what backward keeps, at its peak. None: no limit; all None: as little as possible."""

    budget_bytes: int | None = None
    reduce: float | None = None
    max_slowdown: float | None = None

    def most_bytes(self, peak_bytes: int) -> int | None:
        limits = [] if self.budget_bytes is None else [self.budget_bytes]
        if self.reduce is not None:
            limits.append(int(peak_bytes * (1 - self.reduce)))
        return min(limits, default=None)

    def is_met(self, plan: SavePlan) -> bool:
        most_bytes = self.most_bytes(plan.peak_bytes_before)
        return most_bytes is None or plan.peak_bytes <= most_bytes

    def most_ns(self, step_ns: int) -> float | None:
        return None if self.max_slowdown is None else self.max_slowdown * step_ns


@dataclass(frozen=True, slots=True)
class _Candidate:
    selection: ValueSelection
    memory: BackwardMemory
    extra_ns: int


def make_plan(record: StepRecord, target: MemoryTarget) -> SavePlan:
    plain = _candidate(record, keep_everything(record))
    candidates = [plain, *_candidates(record)]
    step_ns = STEP_PER_FORWARD * record.forward_ns
    most_bytes = target.most_bytes(plain.memory.peak_bytes)
    chosen = _best(candidates, most_bytes, target.most_ns(step_ns))
    notes = []
    if most_bytes is not None and chosen.memory.peak_bytes > most_bytes:
        notes.append(
            f"The target of {size(most_bytes)} is out of reach: {size(chosen.memory.peak_bytes)} "
            "is the least within the time allowed."
        )
    if chosen.memory.peak_bytes > _WORTH * plain.memory.peak_bytes:
        chosen = plain
        notes.append("Nothing here is cheap to recompute or compresses exactly.")
    notes.extend(_advice(record, plain.memory.peak_bytes))
    return _plan(record, plain, chosen, step_ns, tuple(notes))


def without_repeating(record: StepRecord, operators: frozenset[int]) -> StepRecord:
    """These cannot be recognised in later passes."""
    calls = (
        replace(call, refusal="not recognised") if number in operators else call
        for number, call in enumerate(record.operators)
    )
    return replace(record, operators=tuple(calls))


def _candidates(record: StepRecord) -> Iterator[_Candidate]:
    best, best_segments, segments = None, 1, 1
    while segments <= min(_MOST_SEGMENTS, max(1, len(record.operators) // _LEAST_IN_SEGMENT)):
        candidate = _candidate(record, select(record, bytes_per_ns=0, segments=segments))
        yield candidate
        if best is None or candidate.memory.peak_bytes < best.memory.peak_bytes:
            best, best_segments = candidate, segments
        segments *= 2
    saved_bytes = sum(record.values[v].size_bytes for v in keep_everything(record).kept)
    pace = saved_bytes / max(1, record.forward_ns)
    for price in _PRICES:
        chosen = select(record, bytes_per_ns=price * pace, segments=best_segments)
        yield _candidate(record, chosen)


def _candidate(record: StepRecord, selection: ValueSelection) -> _Candidate:
    repeated_ns = sum(record.operators[number].took_ns for number in selection.repeated)
    sizes = [record.values[number].encoded_bytes for number in selection.encoded]
    sizes += [record.uses[number].encoded_bytes for number in selection.encoded_uses]
    extra_ns = repeated_ns + sum(coding_ns(record, size_bytes) for size_bytes in sizes)
    if selection.changes_something():
        extra_ns += record.watch_ns * len(record.uses)
        extra_ns += record.hold_ns * len(selection.repeated)
    return _Candidate(selection, backward_memory(record, selection), extra_ns)


def _best(
    candidates: list[_Candidate], most_bytes: int | None, most_ns: float | None
) -> _Candidate:
    """Within the time: the least bytes, or the least time that meets the bytes."""
    timely = [one for one in candidates if most_ns is None or one.extra_ns <= most_ns]
    fitting = [
        one for one in timely if most_bytes is not None and one.memory.peak_bytes <= most_bytes
    ]
    if fitting:
        return min(fitting, key=lambda one: (one.extra_ns, one.memory.peak_bytes))
    return min(timely, key=lambda one: (one.memory.peak_bytes, one.extra_ns))


def _advice(record: StepRecord, peak_bytes: int) -> Iterator[str]:
    owned = sum(value.size_bytes for value in record.values if value.owned)
    if owned > _WEIGHTS_DOMINATE * peak_bytes:
        share = percent(peak_bytes / (owned + peak_bytes))
        yield (
            f"The weights dominate: what backward keeps is only {share} of both. Sharding "
            "(FSDP, ZeRO) saves more."
        )


def _plan(
    record: StepRecord,
    plain: _Candidate,
    chosen: _Candidate,
    step_ns: int,
    notes: tuple[str, ...],
) -> SavePlan:
    selection = chosen.selection
    return SavePlan(
        operators=tuple(call.name for call in record.operators),
        repeated=tuple(_repeats(record, selection)),
        results=tuple(_results(record, selection)),
        uses=tuple(
            _planned_use(record, selection, number, use) for number, use in enumerate(record.uses)
        ),
        rows=tuple(_rows(record, selection)),
        saved_bytes_before=plain.memory.saved_bytes,
        saved_bytes=chosen.memory.saved_bytes,
        peak_bytes_before=plain.memory.peak_bytes,
        peak_bytes=chosen.memory.peak_bytes,
        extra_ns=chosen.extra_ns,
        step_ns=step_ns,
        notes=notes,
    )


def _repeats(record: StepRecord, selection: ValueSelection) -> Iterator[PlannedRepeat]:
    for number in sorted(selection.repeated):
        inputs = record.operators[number].inputs
        recomputed = tuple(_action(record, selection, value) == RECOMPUTE for value in inputs)
        yield PlannedRepeat(operator=number, recomputed_inputs=recomputed)


def _results(record: StepRecord, selection: ValueSelection) -> Iterator[PlannedResult]:
    for number in sorted(selection.encoded | selection.kept):
        value = record.values[number]
        encoding = value.encoding if number in selection.encoded else None
        repeated = value.producer in selection.repeated
        if value.producer is not None and (repeated or encoding is not None):
            slot = record.operators[value.producer].outputs.index(number)
            yield PlannedResult(operator=value.producer, slot=slot, encoding=encoding)


def _planned_use(
    record: StepRecord, selection: ValueSelection, number: int, use: SavedUse
) -> PlannedUse:
    action, encoding = KEEP, None
    if number in selection.encoded_uses:
        action, encoding = ENCODE, use.encoding
    elif is_planned(record, use) and use.value is not None:
        action = _action(record, selection, use.value)
        if action == ENCODE:
            encoding = record.values[use.value].encoding
    return PlannedUse(
        after=use.after, shape=use.shape, dtype=use.dtype, action=action, encoding=encoding
    )


def _action(record: StepRecord, selection: ValueSelection, number: int) -> str:
    if number in selection.encoded:
        return ENCODE
    if number in selection.kept or record.values[number].producer not in selection.repeated:
        return KEEP
    return RECOMPUTE


def _rows(record: StepRecord, selection: ValueSelection) -> Iterator[PlanRow]:
    """Every value that backward kept, and those that are now kept to start from."""
    encoded_uses = defaultdict[int, set[tuple[str, int]]](set)
    needed = selection.kept | selection.encoded
    for number, use in enumerate(record.uses):
        if use.value is not None and number not in selection.encoded_uses:
            needed.add(use.value)
        elif use.value is not None:
            encoded_uses[use.value].add((use.encoding or "", use.encoded_bytes))
    for number in sorted(needed | set(encoded_uses)):
        value = record.values[number]
        if value.owned:
            continue
        if number in needed:
            yield _row(record, value, *_treatment(record, selection, number))
        else:
            names, sizes = zip(*sorted(encoded_uses[number]), strict=True)
            cost_ns = sum(coding_ns(record, size_bytes) for size_bytes in sizes)
            yield _row(record, value, f"{ENCODE}: {', '.join(names)}", sum(sizes), cost_ns)


def _treatment(record: StepRecord, selection: ValueSelection, number: int) -> tuple[str, int, int]:
    """Action, bytes held and time."""
    value, action = record.values[number], _action(record, selection, number)
    if action == RECOMPUTE and value.producer is not None:
        return action, 0, record.operators[value.producer].took_ns
    if action == ENCODE:
        cost_ns = coding_ns(record, value.encoded_bytes)
        return f"{action}: {value.encoding}", value.encoded_bytes, cost_ns
    return action, value.size_bytes, 0


def _row(
    record: StepRecord, value: StepValue, action: str, held_bytes: int, cost_ns: int
) -> PlanRow:
    shape = "x".join(map(str, value.shape)) or "scalar"
    made_by = "" if value.producer is None else record.operators[value.producer].name
    return PlanRow(
        value=f"{shape} {value.dtype}",
        module=value.module,
        operator=made_by.removeprefix("aten."),
        size_bytes=value.size_bytes,
        held_bytes=held_bytes,
        action=action,
        cost_ns=cost_ns,
    )
