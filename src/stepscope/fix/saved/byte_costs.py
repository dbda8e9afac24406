"""The same pass at other costs, for the search.

Bytes that an operator moves are the same on every machine and at every load: where no target limits
time, measured times would only make the search look elsewhere each time. What the host has to do
counts for nothing where the device's work hides it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stepscope.fix.saved.encoding_names import OFFLOAD
from stepscope.fix.saved.selection import ValueSelection

if TYPE_CHECKING:
    from stepscope.fix.saved.step_record import (
        HoldingOption,
        RecordedCall,
        SavedUse,
        StepRecord,
        StepValue,
    )


def with_byte_costs(record: StepRecord) -> StepRecord:
    """The same pass: every time is a number of bytes, and following a plan costs nothing."""
    return replace(
        record,
        operators=tuple(_moving(record, call) for call in record.operators),
        values=tuple(_held_for_bytes(value) for value in record.values),
        uses=tuple(_read_for_bytes(record, use) for use in record.uses),
        watch_ns=0,
        replace_ns=0,
        repeat_ns=0,
        launch_ns=0,
        measured_step_ns=None,
    )


def with_hidden_host(record: StepRecord, *, copies: bool) -> StepRecord:
    """The same pass: only the device's time counts. If `copies`, one to host memory takes none."""
    values = record.values
    if copies:
        values = tuple(
            replace(value, options=tuple(map(_without_host, value.options))) for value in values
        )
    return replace(record, values=values, watch_ns=0, replace_ns=0, repeat_ns=0, launch_ns=0)


def _without_host(option: HoldingOption) -> HoldingOption:
    return replace(option, cost_ns=0) if option.encoding == OFFLOAD else option


def with_measured_costs(record: StepRecord, selection: ValueSelection) -> ValueSelection:
    """The same selection, with the options of the record itself."""
    return ValueSelection(
        kept=selection.kept,
        encoded={
            value: _same_encoding(record.values[value].options, option)
            for value, option in selection.encoded.items()
        },
        repeated=selection.repeated,
        encoded_uses={
            use: _same_encoding(record.uses[use].options, option)
            for use, option in selection.encoded_uses.items()
        },
    )


def _moving(record: StepRecord, call: RecordedCall) -> RecordedCall:
    moved = sum(record.values[value].size_bytes for value in (*call.inputs, *call.outputs))
    return replace(call, took_ns=moved, cheaper_ns=None)


def _held_for_bytes(value: StepValue) -> StepValue:
    return replace(value, options=_priced(value.options, value.size_bytes))


def _read_for_bytes(record: StepRecord, use: SavedUse) -> SavedUse:
    size_bytes = 0 if use.value is None else record.values[use.value].size_bytes
    return replace(use, options=_priced(use.options, size_bytes))


def _priced(options: tuple[HoldingOption, ...], cost: int) -> tuple[HoldingOption, ...]:
    return tuple(replace(option, cost_ns=cost) for option in options)


def _same_encoding(options: tuple[HoldingOption, ...], wanted: HoldingOption) -> HoldingOption:
    return next(one for one in options if one.encoding == wanted.encoding)
