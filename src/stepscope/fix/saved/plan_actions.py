"""What a selection does with every value, operator and saved tensor, as a plan writes it down."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from stepscope.fix.saved.encoding_names import OFFLOAD, described
from stepscope.fix.saved.offload_offers import offload_points
from stepscope.fix.saved.save_plan import (
    ENCODE,
    KEEP,
    RECOMPUTE,
    PlannedRepeat,
    PlannedResult,
    PlannedUse,
    PlanRow,
)
from stepscope.fix.saved.selection import is_planned
from stepscope.fix.saved.step_record import HoldingOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope.fix.saved.selection import ValueSelection
    from stepscope.fix.saved.step_record import SavedUse, StepRecord, StepValue


def with_points(record: StepRecord, selection: ValueSelection) -> ValueSelection:
    """Offloaded values, with the points at which they leave and come back."""
    offloaded = [v for v, option in selection.encoded.items() if option.encoding == OFFLOAD]
    encoded = dict(selection.encoded)
    for value, points in offload_points(record, offloaded).items():
        encoded[value] = replace(encoded[value], encoding=points.encoding())
    return replace(selection, encoded=encoded)


def repeats(record: StepRecord, selection: ValueSelection) -> Iterator[PlannedRepeat]:
    for number in sorted(selection.repeated):
        call = record.operators[number]
        recomputed = tuple(_action(record, selection, value) == RECOMPUTE for value in call.inputs)
        copied = tuple(record.values[value].copied for value in call.inputs)
        yield PlannedRepeat(
            operator=number, recomputed_inputs=recomputed, again=call.again, copied_inputs=copied
        )


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
    stays = number in selection.kept or value.needed_again
    return KEEP if stays or value.producer not in selection.repeated else RECOMPUTE


def _shown_action(record: StepRecord, selection: ValueSelection, number: int) -> str:
    """For people: offloading is carried out as an encoding, but it is none."""
    option = selection.encoded.get(number)
    is_offloaded = option is not None and described(option.encoding) == OFFLOAD
    return OFFLOAD if is_offloaded else _action(record, selection, number)


def use_action(record: StepRecord, selection: ValueSelection) -> Callable[[int], str]:
    """What is done with a value that backward kept; where only its uses are encoded, that."""
    whole = {
        use.value for number, use in enumerate(record.uses) if number not in selection.encoded_uses
    }
    return lambda value: _shown_action(record, selection, value) if value in whole else ENCODE


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
        if number in needed:
            action, held_bytes, cost_ns = _treatment(record, selection, number)
            cost_ns = repeated_ns.get(number, cost_ns)
            row = _row(record, value, action, held_bytes, cost_ns)
        else:
            options = sorted(encoded_uses[number], key=lambda option: option.encoding)
            names = ", ".join(dict.fromkeys(described(option.encoding) for option in options))
            held_bytes = sum(option.held_bytes for option in options)
            cost_ns = sum(option.cost_ns for option in options)
            row = _row(record, value, f"{ENCODE}: {names}", held_bytes, cost_ns)
        yield replace(row, was_kept=number in before)


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
            times[number] += call.again_ns
            waiting += [
                record.values[value].producer
                for value in call.inputs
                if value not in shown and _action(record, selection, value) == RECOMPUTE
            ]
    return times


def _treatment(record: StepRecord, selection: ValueSelection, number: int) -> tuple[str, int, int]:
    """Action, bytes held and time; recomputed ones have theirs elsewhere."""
    value, action = record.values[number], _shown_action(record, selection, number)
    if action == RECOMPUTE:
        return action, 0, 0
    option = selection.encoded.get(number)
    if option is None:
        return action, value.size_bytes, 0
    label = f"{action}: {described(option.encoding)}" if action == ENCODE else action
    return label, option.held_bytes, option.cost_ns


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
