"""compile=reduce-overhead of a step that is compiled already: its graphs become CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benches import ask, bench_for
from explain.build import graph, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.compiled_step import find_compiled_launches, launch_as_graphs
from stepscope.predict.kernel_costs import COMPILED_SPACING_NS, LAUNCH_NS, PER_NODE_NS

if TYPE_CHECKING:
    from pathlib import Path

    from explain.build import Events
    from stepscope.predict.engine import Bench

KERNELS = 20


def _pass(name: str, at: float, *, gap: float) -> Events:
    """Twenty kernels of 5 us, `gap` us of the host for each; the first comes after 50 us."""
    events = op(name, start=at, dur=50 + gap * KERNELS)
    for number in range(KERNELS):
        called = at + 50 + gap * number
        events += kernel("triton_poi", start=called + 8, dur=5, launched_at=called, launch_dur=4)
    return events


def _bench(folder: Path, *, gap: float = 30) -> Bench:
    """A compiled graph, an eager operator, another compiled graph; 1,600 us."""
    events: Events = []
    for number in range(3):
        at = number * 1600.0
        events += step(number, start=at, dur=1600)
        events += _pass("Torch-Compiled Region: 0/0", at + 10, gap=gap)
        events += op("aten::relu", start=at + 700, dur=20)
        events += kernel("relu", start=at + 715, dur=5, launched_at=at + 705, launch_dur=4)
        events += _pass("Torch-Compiled Region: 1/0", at + 730, gap=gap)
    return bench_for(read_trace(write(folder / "made.json", events, device="NVIDIA H200")))


def test_one_launch_for_each_compiled_graph(tmp_path: Path) -> None:
    context = _bench(tmp_path).context
    launches = find_compiled_launches(context)
    before, after = context.graph, launch_as_graphs(context, launches)
    assert launches.sum() == 2 * KERNELS
    first = [0, KERNELS + 1]
    eager = KERNELS
    assert after.calls.gap_ns[first].tolist() == before.calls.gap_ns[first].tolist()
    assert after.calls.call_ns[first].tolist() == [LAUNCH_NS + PER_NODE_NS] * 2
    assert after.calls.gap_ns[1:KERNELS].sum() == 0
    assert after.calls.call_ns[1:KERNELS].tolist() == [PER_NODE_NS] * (KERNELS - 1)
    assert after.calls.gap_ns[eager] == before.calls.gap_ns[eager]
    assert after.calls.call_ns[eager] == before.calls.call_ns[eager]
    assert max(after.tasks.spacing_ns[1:KERNELS]) <= COMPILED_SPACING_NS
    assert after.tasks.dur_ns.tolist() == before.tasks.dur_ns.tolist()


def test_a_host_that_launches_too_slowly_no_longer_decides(tmp_path: Path) -> None:
    prediction = ask(_bench(tmp_path), "compile=reduce-overhead")
    assert not prediction.refused
    assert prediction.predicted_ms < 0.5 * prediction.baseline_ms
    assert "40 launches of compiled code become 2 CUDA graphs" in prediction.assumptions[0]


def test_what_is_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    for value in ("", "=default", "=max-autotune-no-cudagraphs"):
        refused = ask(_bench(tmp_path), f"compile{value}").refused
        assert "compiled already" in refused[0]


def test_graphs_that_are_replayed_already_are_refused(tmp_path: Path) -> None:
    events: Events = []
    for number in range(3):
        at = number * 1600.0
        events += step(number, start=at, dur=1600)
        events += op("Torch-Compiled Region: 0/0", start=at + 10, dur=100)
        kernels = [kernel("triton_poi", start=at + 90 + 6 * n, dur=5) for n in range(KERNELS)]
        events += graph(kernels, launched_at=at + 60)
    bench = bench_for(read_trace(write(tmp_path / "made.json", events, device="NVIDIA H200")))
    refused = ask(bench, "compile=reduce-overhead").refused
    assert "launches kernels one by one" in refused[0]


@pytest.mark.parametrize("value", ["reduce-overhead", "max-autotune"])
def test_modes_with_cuda_graphs(tmp_path: Path, value: str) -> None:
    prediction = ask(_bench(tmp_path), f"compile={value}")
    tuned = any("autotuning" in assumption for assumption in prediction.assumptions)
    assert tuned is (value == "max-autotune")
