"""Memory that grows for ever, told from caches, saws and noise."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.whole_run.rank_run import find_memory_growth
from stepscope.records.rank import StepColumns

STEP = np.arange(600)
GB, MB = 1e9, 1e6


def columns(alive: np.ndarray, every: int = 1) -> StepColumns:
    n = len(alive)
    none = np.zeros(n, np.bool_)
    number = np.arange(n)
    return StepColumns(
        number=number, wall_ns=np.ones(n, np.int64), end_unix_ns=np.zeros(n, np.int64),
        phases_ns={}, window=none, memory=none, whole=~none,
        allocated_bytes=np.where(number % every == 0, alive.astype(np.int64), -1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("alive", "every"),
    [
        (GB + MB * STEP, 1),
        (GB + MB * STEP, 10),
        (GB + MB * STEP + np.random.default_rng(0).normal(0, 20 * MB, 600), 1),
        (GB + MB * STEP + 5 * MB * (STEP % 50), 1),
        (GB + 50 * MB * (STEP // 50), 1),
    ],
    ids=["leak", "read every tenth step", "noise", "saw", "a leak in every epoch"],
)
def test_a_leak_of_a_megabyte_per_step(alive: np.ndarray, every: int) -> None:
    growth = find_memory_growth(columns(alive, every))
    assert growth is not None
    assert growth.bytes_per_step == pytest.approx(MB, rel=0.05)
    assert growth.low <= growth.bytes_per_step <= growth.high
    assert growth.of == "device"
    assert growth.last_bytes > growth.first_bytes


@pytest.mark.parametrize(
    "alive",
    [
        np.full(600, GB),
        GB + np.random.default_rng(0).normal(0, 10 * MB, 600),
        GB + np.minimum(STEP, 300) * MB,
        GB + np.minimum(STEP, 500) * MB,
        GB + 5 * MB * (STEP % 50),
        GB + 5 * MB * (STEP % 200),
        GB + np.where(STEP > 300, GB, 0),
        GB + 30 * MB * np.log1p(STEP),
        GB + 1e3 * STEP,
        2 * GB - MB * STEP,
    ],
    ids=[
        "flat", "noise", "a cache that fills", "a cache that fills late", "saw", "long saw",
        "one step up", "ever slower", "under the floor", "shrinks",
    ],
)  # fmt: skip
def test_what_is_no_leak(alive: np.ndarray) -> None:
    assert find_memory_growth(columns(alive)) is None


def test_memory_that_wanders_is_no_leak() -> None:
    """Some wander upwards all the time: nobody can tell those from a leak."""
    walks = [GB + np.cumsum(np.random.default_rng(s).normal(0, MB, 600)) for s in range(50)]
    assert sum(find_memory_growth(columns(walk)) is not None for walk in walks) <= 2


def test_a_process_may_grow_by_more_than_a_device_before_it_counts() -> None:
    alive = GB + 5e4 * STEP
    assert find_memory_growth(columns(alive)) is not None
    assert find_memory_growth(columns(alive), "host") is None


def test_memory_that_was_not_read_says_nothing() -> None:
    assert find_memory_growth(columns(GB + MB * STEP, every=100)) is None
    without = columns(GB + MB * STEP)
    assert find_memory_growth(
        StepColumns(**{**{name: getattr(without, name) for name in without.__struct_fields__},
                       "allocated_bytes": None})
    ) is None  # fmt: skip
