"""What following a plan asks of the device, the host and the link between them: transfers,
stalls, and where the pack hook can rest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from stepscope.fix.saved.selection import ValueSelection, is_planned
from stepscope.fix.saved.step_record import (
    OFFLOAD,
    HoldingOption,
    LinkSpeed,
    OffloadPoints,
    StepRecord,
    host_waits,
)

# Which values the link to host memory can take and bring back in time, and when.
#
# Forward sends values in the order in which they were saved. A value is offered if its copy ends
# before forward does, so that its memory is free when backward begins, and if it and all others can
# be fetched until they are needed. Each is fetched as late as that allows: until then its memory is
# free. What cannot be made again comes first: the rest has another way.

LEAST_BYTES = 1 << 20
_LINK_SHARE = 0.8  # of the time that a transfer may take: times vary
# Of forward: by then copies are over. A third of a step is taken for forward, which is less where
# the optimizer takes long; on an H200 the device waited 2 to 8 ms when forward was used up.
_FORWARD_SHARE = 0.85
_EARLY = 0.9  # of the time until a value is needed: by then it is there
_BACKWARD_PER_FORWARD = 2


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Of one value. Times are those of the device: `saved_ns` since the beginning of forward,
    `needed_ns` since that of backward."""

    value: int
    saved_ns: float
    needed_ns: float
    out_ns: float
    in_ns: float


def with_offload(record: StepRecord, speed: LinkSpeed) -> StepRecord:
    """The same record, with `offload` among the options of what fits on the link."""
    record = replace(record, link=speed)
    option = HoldingOption(encoding=OFFLOAD, held_bytes=0, cost_ns=speed.host_ns)
    values = list(record.values)
    for number in offered_values(record):
        value = values[number]
        values[number] = replace(value, options=(*value.options, option))
    return replace(record, values=tuple(values))


def offered_values(record: StepRecord) -> list[int]:
    accepted: list[_Transfer] = []
    forward_ns = _FORWARD_SHARE * _elapsed(record)[-1]
    for transfer in sorted(_transfers(record), key=lambda one: _is_repeatable(record, one.value)):
        tried = sorted([*accepted, transfer], key=lambda one: one.saved_ns)
        if _left_ns(tried)[-1] <= forward_ns and min(_latest_starts(tried).values()) >= 0:
            accepted = tried
    return [transfer.value for transfer in accepted]


def _is_repeatable(record: StepRecord, value: int) -> bool:
    producer = record.values[value].producer
    return producer is not None and record.operators[producer].refusal is None


def offload_points(record: StepRecord, values: Collection[int]) -> dict[int, OffloadPoints]:
    """For the values that are offloaded: the saved tensors at which their copies are over and at
    which they are fetched."""
    transfers = [one for one in _transfers(record) if one.value in values]
    if not transfers:
        return {}
    elapsed = _elapsed(record)
    packed = [elapsed[use.after] for use in record.uses]
    read = sorted(
        (_BACKWARD_PER_FORWARD * (elapsed[-1] - elapsed[use.after]), number)
        for number, use in enumerate(record.uses)
        if use.order is not None
    )
    starts = _latest_starts(transfers)
    points = {}
    for transfer, left_ns in zip(transfers, _left_ns(transfers), strict=True):
        left_at = min(bisect_left(packed, left_ns), len(packed) - 1)
        before = bisect_right(read, (starts[transfer.value], len(packed))) - 1
        points[transfer.value] = OffloadPoints(left_at, read[max(0, before)][1])
    return points


def copy_stalls_ns(
    record: StepRecord, offloaded: Collection[int], waiting: Collection[int]
) -> float:
    """How long the device waits in forward for the answers of `waiting` values. One engine makes
    all copies to host memory, in order: an answer of one byte that is asked for while offloaded
    values leave arrives after them, and the computing stream goes on only then (H200: 8.7 ms
    behind 720 MB)."""
    if record.link is None:
        return 0.0
    elapsed, first = _elapsed(record), dict[int, float]()
    for use in record.uses:
        if use.value is not None and (use.value in offloaded or use.value in waiting):
            first.setdefault(use.value, elapsed[use.after])
    copied_ns = stalled_ns = 0.0
    for value, saved_ns in first.items():  # in the order of saving
        now_ns = saved_ns + stalled_ns
        if value in waiting:
            stalled_ns += max(0.0, copied_ns - now_ns)
        else:
            size_bytes = record.values[value].size_bytes
            copied_ns = max(copied_ns, now_ns) + size_bytes / record.link.out_bytes_per_ns
    return stalled_ns


def _elapsed(record: StepRecord) -> list[float]:
    """Until each operator. A recorded pass is slower than others: the host watches it."""
    forward_ns = record.forward_ns
    usual_ns = record.step_ns / (1 + _BACKWARD_PER_FORWARD)
    scale = min(1.0, usual_ns / forward_ns) if forward_ns else 1.0
    return [0.0, *accumulate(scale * call.took_ns for call in record.operators)]


def _transfers(record: StepRecord) -> list[_Transfer]:
    """In the order of saving."""
    if record.link is None:
        return []
    elapsed = _elapsed(record)
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
                needed_ns=_EARLY * _BACKWARD_PER_FORWARD * (elapsed[-1] - last[value]),
                out_ns=known.size_bytes / record.link.out_bytes_per_ns / _LINK_SHARE,
                in_ns=known.size_bytes / record.link.in_bytes_per_ns / _LINK_SHARE,
            )
        )
    return found


def _left_ns(transfers: list[_Transfer]) -> list[float]:
    """When each copy to host memory is over, one after the other."""
    ends: list[float] = []
    for transfer in transfers:
        ends.append(max(transfer.saved_ns, ends[-1] if ends else 0.0) + transfer.out_ns)
    return ends


def _latest_starts(transfers: list[_Transfer]) -> dict[int, float]:
    """When each value has to be fetched at the latest, one after the other in the order of need;
    negative where it would have to begin before backward does."""
    starts: dict[int, float] = {}
    free_ns = float("inf")
    for transfer in sorted(transfers, key=lambda one: one.needed_ns, reverse=True):
        free_ns = min(free_ns, transfer.needed_ns) - transfer.in_ns
        starts[transfer.value] = free_ns
    return starts


# When the pack hook can rest: over saved tensors that are kept, and that nothing starts from.
#
# A hook costs a few microseconds for every saved tensor, and most are kept. The hook is taken away
# right after a tensor that it was needed for, and put back where a module is entered or left, just
# before the next such tensor. What is saved in between is autograd's own business.

# A module, and how often it was called before in the same pass.
ModuleCall = tuple[Any, int]
# A replaced tensor brings others before the hook: what it starts from, and what is saved beside it.
# Counted on ResNet-50, DenseNet-121, GPT-2 and BERT: 2.2 to 3.6 of them, itself among them.
HOOKED_FOR_EACH = 3
_FEWEST = 2  # saved tensors: a module's hook costs about as much as one of them


@dataclass(frozen=True, slots=True)
class PassPlace:
    """A place in a pass: the saved tensors and the nodes before it."""

    uses: int
    nodes: int


@dataclass(frozen=True, slots=True)
class ModuleBoundary:
    """Where a module is entered or left."""

    call: ModuleCall
    entering: bool
    place: PassPlace


@dataclass(slots=True)
class HookPauses:
    """After which saved tensors the hook rests, and where it goes on."""

    begins_paused: bool = False
    after: set[int] = field(default_factory=set)
    ends_at_entry: dict[ModuleCall, PassPlace] = field(default_factory=dict)
    ends_at_exit: dict[ModuleCall, PassPlace] = field(default_factory=dict)

    def end_at(self, boundary: ModuleBoundary) -> None:
        ends = self.ends_at_entry if boundary.entering else self.ends_at_exit
        ends[boundary.call] = boundary.place


def plan_pauses(needed: Iterable[int], boundaries: Iterable[ModuleBoundary]) -> HookPauses:
    """`needed` are the saved tensors that the hook must see, in order."""
    # One boundary for each number of saved tensors before it; entries, as they cost less.
    times: dict[tuple[ModuleCall, bool], int] = {}
    listed = list(boundaries)
    for boundary in listed:
        key = boundary.call, boundary.entering
        times[key] = times.get(key, 0) + 1
    at_use: dict[int, ModuleBoundary] = {}
    for boundary in listed:
        if times[boundary.call, boundary.entering] > 1:
            continue  # a module that calls itself
        known = at_use.get(boundary.place.uses)
        if known is None or (boundary.entering and not known.entering):
            at_use[boundary.place.uses] = boundary
    needed = [-1, *needed]
    pauses = HookPauses()
    for before, following in pairwise(needed):
        for uses in range(following, before + _FEWEST, -1):
            if uses in at_use:
                _pause_after(pauses, before)
                pauses.end_at(at_use[uses])
                break
    _pause_after(pauses, needed[-1])
    return pauses


def _pause_after(pauses: HookPauses, use: int) -> None:
    if use < 0:
        pauses.begins_paused = True
    else:
        pauses.after.add(use)


# What following a plan asks of the device and of the host.

_ENCODING_CALLS = 2  # to encode and to decode


@dataclass(frozen=True, slots=True)
class PlanLoad:
    """By the record's costs: those of operators alone, and of a small chain on the host."""

    device_ns: int
    host_ns: int

    def towards(self, other: PlanLoad, share: float) -> PlanLoad:
        return PlanLoad(
            round(self.device_ns + share * (other.device_ns - self.device_ns)),
            round(self.host_ns + share * (other.host_ns - self.host_ns)),
        )

    def times(self, factor: float) -> PlanLoad:
        return PlanLoad(round(self.device_ns * factor), round(self.host_ns * factor))

    def part_of(self, other: PlanLoad) -> float:
        """The device's part and the host's, together: which of two plans asks less of both."""
        device = self.device_ns / max(1, other.device_ns)
        return device + self.host_ns / max(1, other.host_ns)


NO_LOAD = PlanLoad(0, 0)


def plan_load(record: StepRecord, selection: ValueSelection, replaced: int) -> PlanLoad:
    """`replaced` saved tensors are not kept."""
    repeated_ns = sum(record.operators[number].again_ns for number in selection.repeated)
    options = [*selection.encoded.values(), *selection.encoded_uses.values()]
    offloaded_ns = sum(one.cost_ns for one in options if one.encoding == OFFLOAD)  # the host's
    options = [one for one in options if one.encoding != OFFLOAD]
    following_ns = host_ns(record, replaced, len(selection.repeated)) + offloaded_ns
    if not record.on_host:  # on a CPU the time of an encoding holds its calls
        calls = _ENCODING_CALLS * len(options)
        following_ns += record.repeat_ns * calls
        following_ns += record.launch_ns * (calls + len(selection.repeated))
    device_ns = repeated_ns + sum(one.cost_ns for one in options)
    # Where values are offloaded and the answers of encodings are copied to the host, too.
    encoded = selection.encoded.items()
    offloaded = {value for value, option in encoded if option.encoding == OFFLOAD}
    waiting = {value for value, option in encoded if host_waits(option.encoding)}
    return PlanLoad(
        device_ns
        + (round(copy_stalls_ns(record, offloaded, waiting)) if offloaded and waiting else 0),
        following_ns,
    )


def host_ns(record: StepRecord, replaced: int, repeated: int) -> int:
    """What it costs the host to follow a plan with so many uses that are not kept, and operators
    that are repeated."""
    watched = min(len(record.uses), HOOKED_FOR_EACH * replaced)
    hooks_ns = record.watch_ns * watched + record.replace_ns * replaced
    return hooks_ns + record.repeat_ns * repeated
