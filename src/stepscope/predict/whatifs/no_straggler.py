"""no-straggler: the slowest rank needs as long as the median rank does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.replay.schedule import step_ns
from stepscope.explain.work import Kind
from stepscope.predict.edit import scale_tasks
from stepscope.predict.outcome import Outcome, Refused, changed
from stepscope.predict.slowest_worker import slower

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.records.job import Stragglers

    Floats = NDArray[np.float64]

HELP = "the slowest rank takes as long as the median one"
_LEAST = 0.02  # of the step: less is no straggler
_HALVINGS = 30


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses on one rank, and where no rank is known to be slower than the others."""
    del value
    job = context.job
    if job is None or len(job.ranks) < 2:
        raise Refused("no-straggler: give all ranks of the job: one alone is no comparison")
    own = np.array([each.own_ms for each in job.times])
    slowest, gain = _gain(own)
    rank, length = job.ranks[slowest], max(each.step_ms for each in job.times)
    if not _found_rank(job.stragglers) or gain < _LEAST * length:
        raise Refused(f"no-straggler: {_why_not(job.stragglers)}")
    graph = _shorter(context, rank, own, slowest, (1.0 - gain / length) * step_ns(context.graph))
    return Outcome(
        context=changed(context, graph),
        assumptions=(
            f"rank {rank} needs {own[slowest]:.2f} ms per step without communication, the others "
            f"{_usual(own, slowest):.2f} (median): without that, steps of {length:.2f} ms "
            f"(recorded) are {gain:.2f} ms shorter",
            "the next slowest rank then sets the pace",
        ),
        spread=0.05,
    )


def _found_rank(stragglers: Stragglers) -> bool:
    """A link that is slow is no rank to be made quicker."""
    links_only = stragglers.ranks and all(each.rank is None for each in stragglers.ranks)
    return stragglers.verdict == "found" and not links_only


def _why_not(stragglers: Stragglers) -> str:
    if stragglers.verdict == "not resolved":
        return f"whether a rank is slower than the others is not resolved: {stragglers.detail}"
    return "no rank is slower than the others"


def _usual(own: Floats, slowest: int) -> float:
    return float(np.median(np.delete(own, slowest)))


def _gain(own: Floats) -> tuple[int, float]:
    """The rank that is slowest, and what a step gains when it takes as long as the median one."""
    slowest = int(own.argmax())
    after = own.copy()
    after[slowest] = min(own[slowest], _usual(own, slowest))
    return slowest, float(own.max() - after.max())


def _shorter(
    context: StepContext, rank: int, own: Floats, slowest: int, wanted_ns: float
) -> StepGraph:
    """The slow rank's own work is shortened; on any other, what it waits inside collectives."""
    graph = context.graph
    if context.trace.rank == rank:
        return slower(graph, _usual(own, slowest) / float(own[slowest]))
    comm = graph.tasks.kind == Kind.COMM
    if not comm.any():
        raise Refused(f"no-straggler: the trace of rank {context.trace.rank} shows no collectives")
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        short = step_ns(scale_tasks(graph, comm, middle)) < wanted_ns
        low, high = (middle, high) if short else (low, middle)
    return scale_tasks(graph, comm, high)
