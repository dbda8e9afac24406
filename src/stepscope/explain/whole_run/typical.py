"""The typical step of a run: steady steps that are no stalls, and their host's phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.whole_run.steady import find_steady
from stepscope.records.measured_steps import MeasuredSteps
from stepscope.records.step_columns import USUAL_PHASES

if TYPE_CHECKING:
    from stepscope.records.step_columns import Flags, Ints, StepColumns
    from stepscope.records.whole_run import RankRun

_AHEAD = 0.93  # of the device's time for that step
_FREELY = 1.4  # times the quickest one: a longer one was held up inside
_MOST_TIMES = 10_000


def measure_typical_step(steps: StepColumns, run: RankRun) -> MeasuredSteps | None:
    """None without steady steps."""
    if run.times is None or run.series is None:
        return None
    steady, _ = find_steady(steps)
    calm = steady & (run.series.cause < 0)
    device = steps.device_ns[calm] if steps.device_ns is not None else np.empty(0, np.int64)
    device = device[device >= 0]
    return MeasuredSteps(
        steps=run.times.steps,
        steps_ns=tuple(_thin(steps.step_ns[steady]).tolist()),
        step_ns=round(1e6 * run.times.typical_ms),
        wall_ns=round(float(np.median(steps.wall_ns[calm]))),
        device_ns=round(float(np.median(device))) if len(device) else None,
        phases_ns=_median_phases(steps, calm),
        data_ns=_mean_wait(steps.phases_ns.get("data"), steady, calm),
        host_ns=_median_phases(steps, _ran_ahead(steps, steady)),
    )


def _thin(times: Ints) -> Ints:
    return times[:: 1 + (len(times) - 1) // _MOST_TIMES]


def _mean_wait(data_ns: Ints | None, steady: Flags, calm: Flags) -> int | None:
    """None without a data loader. Where a step stalled, its calm neighbours say what it would have
    waited: stalls may be common where waits are long."""
    if data_ns is None or not calm.any():
        return None
    places = np.flatnonzero(calm)
    return round(float(np.interp(np.flatnonzero(steady), places, data_ns[places]).mean()))


def _median_phases(steps: StepColumns, chosen: Flags) -> dict[str, int]:
    if not chosen.any():
        return {}
    return {
        phase: round(float(np.median(column[chosen]))) if column is not None else 0
        for phase in USUAL_PHASES
        for column in (steps.phases_ns.get(phase),)
    }


def _ran_ahead(steps: StepColumns, steady: Flags) -> Flags:
    """Steps that the host was through with before the device: nothing held it up. The queue of
    launches fills up in a run of them, so most steps of a device-bound training are not such; the
    first ones and those after the window are."""
    if steps.device_ns is None:
        return np.zeros(len(steps), np.bool_)
    ahead = steady & (steps.wall_ns < _AHEAD * steps.device_ns)
    least = steps.wall_ns[ahead].min() if ahead.any() else 0
    free: Flags = ahead & (steps.wall_ns < _FREELY * least)
    return free
