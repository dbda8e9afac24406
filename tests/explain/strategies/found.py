"""From a trace (or several) to its strategies, without the rest of the explanation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.explain.strategies.join import join_strategies
from stepscope.records.job import Clock, Job, RankFolder, Stragglers
from stepscope.records.rank import MemoryInputs, RankInputs
from stepscope.records.strategies import RankStrategy, Strategy
from stepscope.records.trace import Trace
from stepscope.trace.run_folder.rank_folder import read_captured

from ..build import AUTOGRAD, MAIN, Events, kernel, nccl, op

US = 1_000  # build's times are microseconds
ENGINE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def strategies_of(
    trace: Trace,
    layout: dict[str, Any] | None = None,
    folder: RankFolder | None = None,
) -> tuple[RankStrategy, ...]:
    if layout is not None:
        folder = RankFolder(layout=layout)
    captured, _ = read_captured(Path(trace.path).parent)
    memory = MemoryInputs(captured=captured)
    return RankAnalysis(RankInputs(trace=trace, folder=folder, memory=memory)).strategies


def job_with() -> Job:
    """A job that knows nothing."""
    none = np.empty((0, 0), np.int64)
    return Job(
        ranks=(),
        times=(),
        hosts={},
        steps=(),
        step_ns=none,
        own_ns=none,
        input_ns=none,
        exposed_comm_ns=none,
        clock=Clock(aligned=False),
        collectives=(),
        arrivals=(),
        stragglers=Stragglers(verdict="none"),
        path=None,
        lanes=None,
    )


def join(
    parts: Sequence[tuple[RankStrategy, ...]], clock: Clock | None = None
) -> tuple[Strategy, ...]:
    return join_strategies(list(enumerate(parts)), clock or Clock(aligned=False))


def compute(start: float, end: float, *, launched_at: float, backward: bool = False) -> Events:
    """A kernel; in backward its launch is inside the engine."""
    thread = AUTOGRAD if backward else MAIN
    out = kernel("gemm", start=start, dur=end - start, launched_at=launched_at, thread=thread)
    around = ENGINE if backward else "aten::mm"
    return out + op(around, start=launched_at - 1, dur=3, thread=thread)


def comm(
    kind: str,
    start: float,
    end: float,
    *,
    launched_at: float,
    thread: int = MAIN,
    around: Sequence[str] = (),
    elements: int = 1000,
    group: str = "0",
    size: int = 4,
    description: str = "",
) -> Events:
    """An NCCL kernel whose launch is inside these host events, the outermost first."""
    names = {"allreduce": "AllReduce", "_allgather_base": "AllGather"}
    name = f"ncclDevKernel_{names.get(kind, kind)}_RING"
    args = nccl(kind, in_elements=elements, out_elements=elements, group=group, group_size=size)
    args["Process Group Description"] = description
    out = kernel(
        name,
        start=start,
        dur=end - start,
        stream=20,
        launched_at=launched_at,
        thread=thread,
        **args,
    )
    for depth, around_name in enumerate(reversed(around), 1):
        out += op(around_name, start=launched_at - depth, dur=1 + 2 * depth, thread=thread)
    return out
