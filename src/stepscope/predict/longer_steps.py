"""Regular steps that do more work than the others, as every fifth one of a GAN whose generator
trains less often than its critic.

Among the run's steps they look like stalls of no known cause. The trace shows that the device has
more to do in them: what changes a typical step changes that work too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.steps import step_of

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.explain.replay.graph import Floats
    from stepscope.predict.stalls import StepStalls

_UNKNOWN = "unknown"
_MORE = 1.05  # times the median: a longer step has so much more work, in so many more tasks
_FEWEST = 3  # traced steps


def with_longer_steps(stalls: StepStalls | None, analysis: RankAnalysis) -> StepStalls | None:
    """The stalls, knowing which share of the unexplained ones is work."""
    if stalls is None or _UNKNOWN not in stalls.periodic or analysis.work.on_host:
        return stalls
    longer = len(stalls.excess_ns.get(_UNKNOWN, ()))
    cost_ns = stalls.cost_ns.get(_UNKNOWN, 0.0) * stalls.steps
    if not longer or not cost_ns:
        return stalls
    more_ns = longer * _more_work_ns(*_work_by_step(analysis))
    return replace(stalls, work_share=min(1.0, more_ns / cost_ns))


def _more_work_ns(work_ns: Floats, tasks: Floats) -> float:
    """What a longer step has more than a typical one; 0 if no traced step has."""
    if len(work_ns) < _FEWEST:
        return 0.0
    usual_ns = float(np.median(work_ns))
    longer = (work_ns > _MORE * usual_ns) & (tasks > _MORE * np.median(tasks))
    return float(work_ns[longer].mean()) - usual_ns if longer.any() else 0.0


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
