"""A stall that nobody measured on this rank may be a wait for another one."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.explain.collective_waits import divide_unknown
from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.records.run import STALL_CAUSES

from .whole_run.columns import columns, ns


def test_unexplained_stalls_are_waits_where_the_rank_waited() -> None:
    """Steps 40 and 80 stall by 60 ms. In step 40 the rank waits for another one: 50 ms more than
    its usual 5."""
    wall = np.full(100, 30.0)
    wall[[40, 80]] += 60
    run = explain_run(columns(wall))
    waits = np.full(100, 5.0)
    waits[40] = 55
    divided = divide_unknown(run, np.arange(100), ns(waits))
    cost = {stall.cause: stall.cost_ms for stall in divided.stalls}
    assert cost == pytest.approx({"collective": 0.5, "unknown": 0.7})
    assert divided.times is not None
    assert divided.times.typical_ms + sum(cost.values()) == pytest.approx(divided.times.mean_ms)
    assert divided.series is not None
    names = [STALL_CAUSES[cause] for cause in divided.series.cause[[40, 80]]]
    assert names == ["collective", "unknown"]


def test_what_other_causes_explain_of_a_stall_stays_theirs() -> None:
    """Step 40 stalls by 60 ms: 20 ms without a core, 40 ms in a wait for another rank."""
    wall, without_core = np.full(100, 30.0), np.zeros(100)
    wall[40] += 60
    without_core[40] = 20
    run = explain_run(replace(columns(wall), cpu_wait_ns=ns(without_core)))
    waits = np.full(100, 5.0)
    waits[40] = 65
    divided = divide_unknown(run, np.arange(100), ns(waits))
    cost = {stall.cause: stall.cost_ms for stall in divided.stalls}
    assert cost == pytest.approx({"collective": 0.4, "operating_system": 0.2})


def test_a_rank_that_never_waited_longer_keeps_its_stalls() -> None:
    wall = np.full(100, 30.0)
    wall[40] += 60
    run = explain_run(columns(wall))
    assert divide_unknown(run, np.arange(100), ns(np.full(100, 5.0))) is run
    assert divide_unknown(run, np.arange(0), ns([])) is run


def test_waits_of_steps_that_were_not_seen_change_nothing() -> None:
    wall = np.full(100, 30.0)
    wall[40] += 60
    run = explain_run(columns(wall))
    assert divide_unknown(run, np.array([500, 501, 502]), ns([1, 1, 90])) is run


def test_stalls_with_a_known_cause_as_well_are_not_counted_twice() -> None:
    """Step 40 stalls by 60 ms, 20 of them for a checkpoint; the rank waits for another one in the
    rest of it. Step 80 stalls for a checkpoint most of all."""
    wall, checkpoint = np.full(100, 30.0), np.zeros(100)
    checkpoint[[40, 80]] = 20, 50
    wall[[40, 80]] += 60
    waits = np.full(100, 5.0)
    waits[[40, 80]] = 45
    run = explain_run(columns(wall, checkpoint=checkpoint))
    divided = divide_unknown(run, np.arange(100), ns(waits))
    cost = {stall.cause: stall.cost_ms for stall in divided.stalls}
    assert cost == pytest.approx({"checkpoint": 0.7, "collective": 0.5})
    assert divided.times is not None
    assert divided.times.typical_ms + sum(cost.values()) == pytest.approx(divided.times.mean_ms)
