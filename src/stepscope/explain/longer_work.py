"""Steps that take longer because they do more work, as every fifth one of a GAN whose generator
trains less often than its critic.

Among a run's steps they look like stalls of no known cause. The trace shows that the device has
more to do in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.steps import step_of

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.explain.replay.graph import Floats
    from stepscope.records.whole_run import RankRun

_MORE = 1.05  # times the median: a longer step has so much more work, in so many more tasks
_FEWEST = 3  # traced steps


def longer_work_ns(analysis: RankAnalysis) -> float:
    """What the device does more in a longer step than in a typical one; 0 if no traced step is
    longer for that reason, and on CPUs."""
    if analysis.work.on_host:
        return 0.0
    work_ns, tasks = _work_by_step(analysis)
    if len(work_ns) < _FEWEST:
        return 0.0
    usual_ns = float(np.median(work_ns))
    longer = (work_ns > _MORE * usual_ns) & (tasks > _MORE * np.median(tasks))
    return float(work_ns[longer].mean()) - usual_ns if longer.any() else 0.0


def periodic_work_ns(analysis: RankAnalysis, run: RankRun | None) -> float:
    """The same for a run in which something of no known cause comes at a fixed distance; else 0."""
    stalls = run.stalls if run else ()
    if not any(stall.cause == "unknown" and stall.period for stall in stalls):
        return 0.0
    return longer_work_ns(analysis)


def _work_by_step(analysis: RankAnalysis) -> tuple[Floats, Floats]:
    """The device's time for what each traced step launched, and how many tasks that is."""
    trace, work, steps = analysis.trace, analysis.work, analysis.steps.steps
    operator = analysis.costs.operator[work.rows]
    known = operator >= 0
    number = step_of(steps, trace.host.start_ns[operator[known]])
    inside = (number >= 0) & (number < len(steps))
    dur_ns = (work.end_ns - work.start_ns)[known][inside].astype(np.float64)
    number = number[inside]
    return (
        np.bincount(number, dur_ns, minlength=len(steps)).astype(np.float64),
        np.bincount(number, minlength=len(steps)).astype(np.float64),
    )
