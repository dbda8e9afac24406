"""What following a plan asks of the device and of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.fix.saved.encoding_names import OFFLOAD, host_waits
from stepscope.fix.saved.hook_pauses import HOOKED_FOR_EACH
from stepscope.fix.saved.offload_offers import copy_stalls_ns

if TYPE_CHECKING:
    from stepscope.fix.saved.selection import ValueSelection
    from stepscope.fix.saved.step_record import StepRecord

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
    return PlanLoad(device_ns + _stalled_ns(record, selection), following_ns)


def _stalled_ns(record: StepRecord, selection: ValueSelection) -> int:
    """Where values are offloaded and the answers of encodings are copied to the host, too."""
    encoded = selection.encoded.items()
    offloaded = {value for value, option in encoded if option.encoding == OFFLOAD}
    waiting = {value for value, option in encoded if host_waits(option.encoding)}
    return round(copy_stalls_ns(record, offloaded, waiting)) if offloaded and waiting else 0


def host_ns(record: StepRecord, replaced: int, repeated: int) -> int:
    """What it costs the host to follow a plan with so many uses that are not kept, and operators
    that are repeated."""
    watched = min(len(record.uses), HOOKED_FOR_EACH * replaced)
    hooks_ns = record.watch_ns * watched + record.replace_ns * replaced
    return hooks_ns + record.repeat_ns * repeated
