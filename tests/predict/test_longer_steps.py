"""Every third step does more work: what looks like a stall changes as the typical step does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benches import ask, bench_for
from explain.build import kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.stalls import StepStalls
from stepscope.records.rank import MeasuredSteps
from stepscope.records.run import RankRun, Stall, StepTimes

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.engine import Bench

HOST_US, LONGER_US = 100.0, 600.0
TYPICAL_MS, STEPS = 0.81, 30


def bench_of(folder: Path, *, more_work: bool = True, period: int | None = 3) -> Bench:
    """Steps of two kernels of 400 us, whose host needs 100 us; each third one takes 600 us longer,
    with two more kernels of 300 us or without them."""
    events: list[dict[str, Any]] = []
    begin = 10.0
    for number in range(10):
        at, longer = HOST_US * number, number % 3 == 0
        events += step(number, start=at, dur=HOST_US)
        kernels = [("work", 400.0)] * 2 + [("more", 300.0)] * 2 * (longer and more_work)
        for place, (name, us) in enumerate(kernels):
            host = at + 5 + 10 * place
            events += op("aten::relu", start=host, dur=8, shapes=[[8, 8]], dtypes=["float"])
            events += kernel(name, start=begin, dur=us, launched_at=host + 1)
            begin += us + 5
    cost = LONGER_US / 1e3 / 3
    times = StepTimes(
        steps=STEPS,
        mean_ms=TYPICAL_MS + cost,
        low_ms=TYPICAL_MS + cost,
        high_ms=TYPICAL_MS + cost,
        median_ms=TYPICAL_MS,
        typical_ms=TYPICAL_MS,
        p99_ms=1.5,
        longest_ms=1.5,
        variation=0.0,
    )
    stall = Stall(
        cause="unknown", steps=10, cost_ms=cost, share=cost / times.mean_ms, typical_ms=0.6,
        longest_ms=0.6, period=period,
    )  # fmt: skip
    ns = round(1e6 * TYPICAL_MS)
    measured = MeasuredSteps(
        steps=20, steps_ns=(ns,) * 20, step_ns=ns, wall_ns=ns, device_ns=None, phases_ns={}
    )
    run = RankRun(rank=0, steps=STEPS, warm_up=0, times=times, stalls=(stall,))
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    return bench_for(trace, measured=measured, run=run)


def with_excess(share: float) -> StepStalls:
    return StepStalls(
        cost_ns={"unknown": 200.0, "gc": 50.0},
        steps=STEPS,
        excess_ns={"unknown": np.full(10, 600.0)},
        periodic=frozenset({"unknown"}),
        run_ns=250.0,
        deviation_ns=0.0,
        work_share=share,
    )


def test_work_of_longer_steps_takes_as_much_less_as_a_typical_step() -> None:
    """Three quarters of 200 ns are work: 150 become 60."""
    changed = with_excess(0.75).with_step(0.4)
    assert changed.cost_ns == pytest.approx({"unknown": 110.0, "gc": 50.0})
    assert changed.work_share == pytest.approx(60 / 110)
    assert changed.doubt_ns == pytest.approx(0.25 * 90)
    assert changed.with_step(2.5).cost_ns["unknown"] == pytest.approx(200.0)
    assert with_excess(0.0).with_step(0.4).cost_ns == with_excess(0.0).cost_ns


def test_work_is_no_stall_that_could_go_away() -> None:
    left = with_excess(0.75).without(("unknown", "gc"))
    assert left.cost_ns == {"unknown": 150.0}
    assert left.with_step(0.5).cost_ns == {"unknown": 75.0}
    assert with_excess(0.0).without(("unknown", "gc")).cost_ns == {}


def test_the_trace_shows_what_longer_steps_do_more(tmp_path: Path) -> None:
    """600 us of 600 are kernels, which take half as long if those of other steps do."""
    bench = bench_of(tmp_path)
    assert bench.context.stalls is not None
    assert bench.context.stalls.work_share == pytest.approx(1.0)
    half = ask(bench, "scale=work|more:0.5")
    kept = half.stall_ms / half.baseline_stall_ms
    typical_ms = half.predicted_ms - half.stall_ms
    assert kept == pytest.approx(typical_ms / TYPICAL_MS, rel=0.01)
    assert kept == pytest.approx(0.5, abs=0.02)
    assert "some steps regularly do more work" in " ".join(half.assumptions)


def test_without_stalls_longer_steps_stay(tmp_path: Path) -> None:
    refusal = ask(bench_of(tmp_path), "no-stalls").refused
    assert "no stalls" in refusal[0]
    assert ask(bench_of(tmp_path, more_work=False), "no-stalls").stall_ms == 0


def test_more_passes_have_longer_steps_as_often(tmp_path: Path) -> None:
    """accumulate=2 repeats the typical step and what longer steps do more: nothing is left over."""
    twice = ask(bench_of(tmp_path), "accumulate=2")
    typical = (twice.predicted_ms - twice.stall_ms) / (twice.baseline_ms - twice.baseline_stall_ms)
    assert twice.stall_ms / twice.baseline_stall_ms == pytest.approx(typical, rel=0.01)


@pytest.mark.parametrize(("more_work", "period"), [(False, 3), (True, None)])
def test_other_stalls_stay_as_they_are(tmp_path: Path, more_work: bool, period: int | None) -> None:
    """The device waits in them, or they come now and then."""
    half = ask(bench_of(tmp_path, more_work=more_work, period=period), "scale=work|more:0.5")
    assert half.stall_ms == half.baseline_stall_ms
