"""no-straggler: the slowest rank needs as long as the median rank does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.replay.schedule import step_ns
from stepscope.explain.work import Kind
from stepscope.predict.edit import scale_tasks
from stepscope.predict.slowest import slower
from stepscope.predict.whatifs.outcome import Outcome, Refused, changed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.scene import Scene

HELP = "the slowest rank takes as long as the median one"
_LEAST = 0.02  # of the step: less is no straggler
_HALVINGS = 30


def apply(scene: Scene, value: str) -> Outcome:
    """Refuses on one rank, and where no rank is slower than the others."""
    del value
    job = scene.job
    if job is None or len(job.ranks) < 2:
        raise Refused(
            "no-straggler: give all ranks of the job: one alone does not show which is slow"
        )
    whole = (job.own_ns > 0).all(axis=1)
    if not whole.any():
        raise Refused("no-straggler: no step was recorded on all ranks")
    own = job.own_ns[whole].astype(np.float64)
    slowest, gain, length = _gain(own, job.step_ns[whole].max(axis=1).astype(np.float64))
    rank = job.ranks[slowest]
    if gain < _LEAST * length:
        raise Refused("no-straggler: no rank is slower than the others")
    share = 1.0 - gain / length
    graph = _shorter(scene, rank, own, slowest, share * step_ns(scene.graph))
    usual = float(np.median(np.delete(own, slowest, axis=1)))
    return Outcome(
        scene=changed(scene, graph),
        assumptions=(
            f"rank {rank} needs {np.median(own[:, slowest]) / 1e6:.2f} ms per step without "
            "communication, "
            f"the median of the others {usual / 1e6:.2f}: without that, steps of "
            f"{length / 1e6:.2f} ms "
            f"(profiled) are {gain / 1e6:.2f} ms shorter",
            "the next slowest rank then sets the pace; verdict on stragglers: "
            f"{job.stragglers.verdict}",
        ),
        spread=0.05,
    )


def _gain(own: NDArray[np.float64], steps: NDArray[np.float64]) -> tuple[int, float, float]:
    """The rank that is slowest on the whole, what a step gains without it, and a step's length."""
    slowest = int(np.median(own, axis=0).argmax())
    others = np.median(np.delete(own, slowest, axis=1), axis=1)
    after = own.copy()
    after[:, slowest] = np.minimum(own[:, slowest], others)
    saved = own.max(axis=1) - after.max(axis=1)
    return slowest, float(np.median(saved)), float(np.median(steps))


def _shorter(
    scene: Scene, rank: int, own: NDArray[np.float64], slowest: int, wanted_ns: float
) -> StepGraph:
    """The slow rank's own work is shortened; on any other, what it waits inside collectives."""
    graph = scene.graph
    if scene.trace.rank == rank:
        others = np.median(np.delete(own, slowest, axis=1), axis=1)
        return slower(graph, float(np.median(others / own[:, slowest])))
    comm = graph.tasks.kind == Kind.COMM
    if not comm.any():
        raise Refused(f"no-straggler: the trace of rank {scene.trace.rank} shows no collectives")
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        short = step_ns(scale_tasks(graph, comm, middle)) < wanted_ns
        low, high = (middle, high) if short else (low, middle)
    return scale_tasks(graph, comm, high)
