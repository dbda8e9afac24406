"""What `save_memory` did in a training: memory-plan.json of a rank's folder."""

from __future__ import annotations

import msgspec

from stepscope.records.limits import Bytes, Count, DurationNs  # noqa: TC001  (decoded)

FILE = "memory-plan.json"
ACTIONS = ("keep", "recompute", "encode", "offload")


class SavedByAction(msgspec.Struct, frozen=True, kw_only=True):
    """All values that are treated alike."""

    action: str
    values: Count = 0
    before_bytes: Bytes = 0  # that they held without the plan
    held_bytes: Bytes = 0  # and hold with it
    cost_ns: DurationNs = 0


class SavedValue(msgspec.Struct, frozen=True, kw_only=True):
    """One of the largest values."""

    value: str = ""  # shape and dtype
    module: str = ""
    operator: str = ""  # that made it
    size_bytes: Bytes = 0
    held_bytes: Bytes = 0
    action: str = ""
    cost_ns: DurationNs = 0


class SavingTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes kept for backward through a step: `forward_points` of forward, then backward's."""

    forward_points: Count = 0
    before_bytes: dict[str, list[Bytes]] = {}  # by what is done with the values
    after_bytes: list[Bytes] = []

    def is_whole(self) -> bool:
        """Whether all its lines are equally long, and long enough to draw."""
        points = len(self.after_bytes)
        return points > 1 and all(len(line) == points for line in self.before_bytes.values())


class SavedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes are of what backward keeps, but `step_peak_bytes` of the whole step; None where torch
    keeps no account of its memory."""

    target: str = ""
    saved_bytes_before: Bytes = 0
    saved_bytes: Bytes = 0
    held_bytes: Bytes | None = None  # counted in a pass that followed the plan
    peak_bytes_before: Bytes = 0
    peak_bytes: Bytes = 0
    step_peak_bytes_before: Bytes | None = None
    step_peak_bytes: Bytes | None = None
    step_ns_before: DurationNs | None = None
    step_ns: DurationNs | None = None  # promised
    step_low_ns: DurationNs | None = None
    step_high_ns: DurationNs | None = None
    measured_step_ns: DurationNs | None = None
    extra_ns: DurationNs = 0
    actions: list[SavedByAction] = []
    values: list[SavedValue] = []
    timeline: SavingTimeline | None = None
    notes: list[str] = []
