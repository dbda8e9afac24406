"""Which values the link to host memory can take and bring back in time.

Forward sends values in the order in which they were saved, backward fetches them in the opposite
one. A value is offered if its copy ends before forward does, so that its memory is free when
backward begins, and if it and all that are needed before it can be fetched until its own use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from stepscope.fix.saved.encoding_names import OFFLOAD
from stepscope.fix.saved.selection import is_planned
from stepscope.fix.saved.step_record import HoldingOption

if TYPE_CHECKING:
    from stepscope.fix.saved.encodings.offload import LinkSpeed
    from stepscope.fix.saved.step_record import StepRecord

LEAST_BYTES = 1 << 20
_LINK_SHARE = 0.8  # of the time that a transfer may take: times vary
_BACKWARD_PER_FORWARD = 2


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Times of the step: forward ends at `forward_ns`, backward begins."""

    value: int
    saved_ns: float
    needed_ns: float  # since the beginning of backward
    out_ns: float
    in_ns: float


def with_offload(record: StepRecord, speed: LinkSpeed) -> StepRecord:
    """The same record, with `offload` among the options of what fits on the link."""
    option = HoldingOption(encoding=OFFLOAD, held_bytes=0, cost_ns=speed.host_ns)
    values = list(record.values)
    for number in offered_values(record, speed):
        value = values[number]
        values[number] = replace(value, options=(*value.options, option))
    return replace(record, values=tuple(values))


def offered_values(record: StepRecord, speed: LinkSpeed) -> list[int]:
    accepted: list[_Transfer] = []
    free_ns = 0.0
    for transfer in _transfers(record, speed):
        end_ns = max(free_ns, transfer.saved_ns) + transfer.out_ns
        if end_ns > record.forward_ns or not _in_time([*accepted, transfer]):
            continue
        free_ns = end_ns
        accepted.append(transfer)
    return [transfer.value for transfer in accepted]


def _transfers(record: StepRecord, speed: LinkSpeed) -> list[_Transfer]:
    """In the order of saving."""
    elapsed = [0.0, *accumulate(float(call.took_ns) for call in record.operators)]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for use in record.uses:
        if is_planned(record, use) and use.value is not None:
            at = elapsed[use.after]
            first.setdefault(use.value, at)
            last[use.value] = at
    found = []
    for value, saved_ns in first.items():
        known = record.values[value]
        if known.producer is None or known.size_bytes < LEAST_BYTES:
            continue
        found.append(
            _Transfer(
                value=value,
                saved_ns=saved_ns,
                needed_ns=_BACKWARD_PER_FORWARD * (elapsed[-1] - last[value]),
                out_ns=known.size_bytes / speed.out_bytes_per_ns,
                in_ns=known.size_bytes / speed.in_bytes_per_ns,
            )
        )
    return found


def _in_time(transfers: list[_Transfer]) -> bool:
    """Fetched one after the other, in the order of need."""
    order = sorted(transfers, key=lambda transfer: transfer.needed_ns)
    arrivals = accumulate(transfer.in_ns for transfer in order)
    return all(
        arrival <= _LINK_SHARE * transfer.needed_ns
        for transfer, arrival in zip(order, arrivals, strict=True)
    )
