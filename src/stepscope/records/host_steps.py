"""Steps in which the host never waited for the device, as rank.json has them."""

from __future__ import annotations

import msgspec

from stepscope.records.limits import Count, DurationNs  # noqa: TC001  (decoded)


class HostStepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The host's own time of one step, by phase."""

    step: Count = 0
    fine: bool = False  # the queue was also emptied inside forward
    alone: bool = True  # no other rank trained: it was emptied inside the step, not only before it
    data_ns: DurationNs = 0
    forward_ns: DurationNs = 0
    backward_ns: DurationNs = 0
    optimizer_ns: DurationNs = 0
    stops: Count = 0
    blocking: Count = 0  # calls that would have waited for the device
    wait_ns: DurationNs = 0  # taken out of the phases
