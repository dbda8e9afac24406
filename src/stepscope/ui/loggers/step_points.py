"""Steps as points along the run: means over short stretches that grow with the run.

A stretch is 2 s long at first, and 1/500 of the run so far later on, so that a week has some
thousand points. Profiled steps and the memory step do not count for step times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.ui.loggers.metric_log import PREFIX, MetricPoint

if TYPE_CHECKING:
    from stepscope.records.step_columns import StepColumns

_SHORTEST_NS = 2_000_000_000
_OF_THE_RUN = 500


class StepPoints:
    """Called with the steps so far, again and again; each step counts in one point."""

    def __init__(self) -> None:
        self._last_step = -1  # that a point has counted
        self._began_ns: int | None = None

    @property
    def last_step(self) -> int:
        return max(self._last_step, 0)

    def take(self, steps: StepColumns, *, all_ended: bool = False) -> list[MetricPoint]:
        """Points for stretches that are over, or for all when the run is."""
        new = np.flatnonzero(steps.number > self._last_step)
        if not len(new):
            return []
        ends = steps.end_unix_ns[new]
        first_begins = int(ends[0] - steps.wall_ns[new[0]])
        if self._began_ns is None:
            self._began_ns = first_begins
        points, at = [], 0
        while at < len(new):
            begins = int(ends[at] - steps.wall_ns[new[at]])
            edge = begins + max(_SHORTEST_NS, (begins - self._began_ns) // _OF_THE_RUN)
            until = max(at + 1, int(np.searchsorted(ends, edge, side="right")))
            if until == len(new) and not all_ended:
                break  # more steps may belong to it
            points.append(_point(steps, new[at:until]))
            self._last_step = points[-1].step
            at = until
        return points


def _point(steps: StepColumns, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> MetricPoint:
    last = int(rows[-1])
    wall_s = float(steps.wall_ns[rows].sum()) / 1e9
    values = {"steps_per_s": len(rows) / wall_s} if wall_s > 0 else {}
    plain = rows[steps.plain[rows]]
    if len(plain):
        own_ms = steps.step_ns[plain] / 1e6
        values |= {"step_ms": float(own_ms.mean()), "slowest_step_ms": float(own_ms.max())}
        for phase, column in steps.phases_ns.items():
            values[f"phase/{phase}_ms"] = float(column[plain].mean()) / 1e6
    if steps.allocated_bytes is not None:
        known = steps.allocated_bytes[rows]
        known = known[known >= 0]
        if len(known):
            values["memory_bytes"] = float(known[-1])
    named = {f"{PREFIX}/{name}": value for name, value in values.items()}
    return MetricPoint(int(steps.number[last]), float(steps.end_unix_ns[last]) / 1e9, named)
