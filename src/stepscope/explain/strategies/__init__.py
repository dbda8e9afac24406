"""How a job is spread over its ranks, one file per strategy: what it costs and why.

Every file has `find(evidence, free) -> (record or None, the calls it explains)`. The surest come
first, and a call belongs to one strategy only. The rest is reported as other communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepscope.records.job import CollectiveCalls, RankFolder, RankSteps
from stepscope.records.memory import CapturedMemory
from stepscope.records.strategies import RankStrategy
from stepscope.records.trace import Trace

if TYPE_CHECKING:
    from stepscope.step.work import Work


def find_strategies(
    trace: Trace,
    work: Work,
    calls: CollectiveCalls,
    rows: NDArray[np.int32],
    pace: RankSteps,
    folder: RankFolder | None,
    captured: CapturedMemory | None = None,
) -> tuple[RankStrategy, ...]:
    """The strategies of one rank; empty if it communicates with no other.

    `rows` are the host events that made the calls (see collectives.py).
    """
    if not len(calls):
        return ()
    from stepscope.explain.strategies import (  # most traces show no other rank
        data_parallel,
        fully_sharded,
        other,
        pipeline,
        tensor_parallel,
    )
    from stepscope.explain.strategies.evidence import gather_evidence

    evidence = gather_evidence(trace, work, calls, rows, pace, folder, captured)
    free = np.asarray(evidence.step >= 0)
    strategies: list[RankStrategy] = []
    for strategy in (pipeline, fully_sharded, tensor_parallel, data_parallel, other):
        record, explained = strategy.find(evidence, free)
        if record is not None:
            strategies.append(record)
            free &= ~explained
    return tuple(strategies)
