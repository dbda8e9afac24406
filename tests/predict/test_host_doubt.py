"""How far a slower host could move a predicted step, and what neither host nor device explains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benches import ask, bench_for
from explain.build import call, kernel, op, step, write
from stepscope import read_trace
from stepscope.records.rank import MeasuredSteps

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.engine import Bench
    from stepscope.records.prediction import Prediction

GAP_US = 300.0


def bench(folder: Path, *, waits: bool, step_us: float | None = None) -> Bench:
    """Two kernels of 1000 us, launched 300 us of the host's time apart; at the end of the step the
    host waits for both, and if `waits` for the first one before it goes on."""
    events: list[dict[str, Any]] = []
    length = 2320.0 if waits else 2020.0
    for number in range(4):
        at = number * length
        events += step(number, start=at, dur=length)
        events += kernel("first", start=at + 15, dur=1000, launched_at=at + 10)
        now = at + 15
        if waits:
            events += call("cudaStreamSynchronize", start=now, dur=at + 1015 - now)
            now = at + 1015
        events += op("aten::mm", start=now + 10, dur=GAP_US - 5)
        launch = now + GAP_US
        begin = max(at + 1015, launch + 3)
        events += kernel("second", start=begin, dur=1000, launched_at=launch)
        events += call("cudaStreamSynchronize", start=launch + 5, dur=begin + 995 - launch)
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    if step_us is None:
        return bench_for(trace)
    ns = round(1e3 * step_us)
    known = {"steps": 9, "steps_ns": (ns,), "wall_ns": ns, "device_ns": ns, "phases_ns": {}}
    return bench_for(trace, measured=MeasuredSteps(step_ns=ns, **known))


def unchanged(made: Bench) -> Prediction:
    return ask(made, "scale=.*:1")


def width(found: Prediction) -> float:
    return found.high_ms / found.low_ms - 1


def test_a_host_that_is_busy_for_a_sixth_of_the_step_hardly_matters(tmp_path: Path) -> None:
    assert width(unchanged(bench(tmp_path, waits=False))) == pytest.approx(0.04, abs=0.005)


def test_but_it_does_if_it_waits_for_the_device_in_between(tmp_path: Path) -> None:
    """Then its 300 us are a part of the step."""
    found = unchanged(bench(tmp_path, waits=True))
    assert found.host_ms < 0.25 * found.baseline_ms
    assert width(found) > 0.05


def test_what_neither_host_nor_kernels_explain_is_doubtful(tmp_path: Path) -> None:
    """The kernels took 2000 us in the trace, the host shows for 15 us, and the steps took 2060."""
    as_traced = width(unchanged(bench(tmp_path, waits=False, step_us=2015)))
    longer = bench(tmp_path, waits=False, step_us=2060)
    assert longer.corrected.unexplained == pytest.approx(45 / 2000, rel=0.05)
    assert width(unchanged(longer)) > as_traced + 0.04
