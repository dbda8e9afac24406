"""Strategies brought from the profiler's window to the step of record."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.strategies.join import strategy_of_record
from stepscope.records.explanation import Budget, Part
from stepscope.records.job import RankSteps
from stepscope.records.strategies import (
    Bucket,
    DataParallel,
    Pipeline,
    Stage,
)


def budget(**ms: float) -> Budget:
    whole = sum(ms.values())
    parts = tuple(Part(id=name, ms=value, share=value / whole) for name, value in ms.items())
    return Budget(step_ms=whole, parts=parts, basis="measured")


def pace(*, steps: int = 2, dur: int, compute: int, exposed: int) -> RankSteps:
    """Milliseconds of every step."""
    columns = {"dur_ns": dur, "compute_ns": compute, "exposed_comm_ns": exposed, "input_ns": 0}
    return RankSteps(
        number=np.arange(steps),
        start_ns=np.arange(steps) * dur * 1_000_000,
        **{name: np.full(steps, ms * 1_000_000, np.int64) for name, ms in columns.items()},
    )


def replicas() -> DataParallel:
    """10 of 15 ms exposed in a window's step of 40."""
    bucket = Bucket(
        index=0, size_bytes=8, ready_ns=2_000_000, start_ns=3_000_000, end_ns=18_000_000,
        time_ns=15_000_000, exposed_ns=10_000_000, why="last",
    )  # fmt: skip
    return DataParallel(
        ranks=(0, 1), size=2, groups=(), evidence=(), step_ns=40_000_000, backward_ns=None,
        comm_ns=15_000_000, exposed_ns=10_000_000, exposed_share=0.25, buckets=(bucket,),
    )  # fmt: skip


def test_exposed_communication_is_the_budgets() -> None:
    # Window: 40 ms, of which 30 compute and 10 exposed. Measured: 50 ms, all by 1.25.
    window = pace(dur=40, compute=30, exposed=10)
    found = strategy_of_record(
        replicas(), budget(compute=37.5, exposed_comm=12.5), [window, window]
    )
    assert isinstance(found, DataParallel)
    assert (found.step_ns, found.exposed_ns, found.comm_ns) == (50_000_000, 12_500_000, 18_750_000)
    assert found.exposed_share == pytest.approx(0.25)
    (bucket,) = found.buckets
    assert (bucket.start_ns, bucket.exposed_ns) == (3_750_000, 12_500_000)


def test_a_profiler_that_slowed_the_host_changes_shares_not_times() -> None:
    # Window: 40 ms with 20 of idle host. Measured: 25 ms, 15 of them off the idle time.
    window = pace(dur=40, compute=10, exposed=10)
    found = strategy_of_record(replicas(), budget(compute=10, exposed_comm=10, python=5), [window])
    assert isinstance(found, DataParallel)
    assert (found.step_ns, found.exposed_ns) == (25_000_000, 10_000_000)
    assert found.exposed_share == pytest.approx(0.4)


def test_hidden_communication_goes_with_compute() -> None:
    window = pace(dur=40, compute=40, exposed=0)
    found = strategy_of_record(replicas(), budget(compute=20, exposed_comm=0), [window])
    assert isinstance(found, DataParallel)
    assert found.comm_ns == 7_500_000


def test_a_pipelines_stages_keep_their_shares() -> None:
    stage = Stage(
        stage_indices=(0,), ranks=(0,), step_ns=40_000_000, compute_ns=30_000_000, other_comm_ns=0,
        bubble_ns=10_000_000, bubble_share=0.25, receive_wait_ns=4_000_000,
    )  # fmt: skip
    pipeline = Pipeline(
        ranks=(0,), size=1, replicas=1, groups=(), evidence=(), schedule=None, microbatches=None,
        stages=(stage,), bubble_share=0.25, bound_share=None, imbalance=1.0, deciding_stage=None,
    )  # fmt: skip
    window = pace(dur=40, compute=30, exposed=4)
    found = strategy_of_record(pipeline, budget(compute=40, exposed_comm=40), [window])
    assert isinstance(found, Pipeline)
    (now,) = found.stages
    assert (now.step_ns, now.compute_ns, now.bubble_ns) == (80_000_000, 60_000_000, 20_000_000)
    assert now.bubble_share == 0.25


def test_without_a_step_nothing_is_converted() -> None:
    same = replicas()
    assert strategy_of_record(same, budget(compute=5, exposed_comm=5), []) == same
