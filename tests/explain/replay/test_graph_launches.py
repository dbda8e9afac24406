"""What the profiler costs inside a CUDA graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches import analyse
from stepscope import explain_rank, read_trace
from stepscope.step.correct import correct
from stepscope.step.cuda_graphs import (
    NODE_SPACING,
    find_graph_tasks,
    has_graphs,
    is_of_graphs,
    scale_node_spacing,
)

from ..build import graph, kernel, step
from ..conftest import Read

H200 = Path(__file__).parents[4] / "shared" / "traces" / "h200"


def graph_steps(count: int = 3) -> list[dict[str, object]]:
    """Steps of 100 µs: a graph of three kernels of 20 µs, 10 µs apart, then 20 µs of nothing."""
    events: list[dict[str, object]] = []
    for number in range(count):
        at = 100 * number
        nodes = [kernel("k", start=at + 5 + 30 * i, dur=20) for i in range(3)]
        events += step(number, start=at, dur=100) + graph(nodes, launched_at=at + 1)
    return events


def test_only_the_time_between_a_graphs_kernels_shrinks(read: Read) -> None:
    trace = read(graph_steps())
    before = analyse(trace).typical.graph
    assert find_graph_tasks(before, trace).all()
    after = scale_node_spacing(before, trace, 0.5)
    assert after.tasks.dur_ns.tolist() == before.tasks.dur_ns.tolist()
    spacings = before.tasks.spacing_ns.tolist()
    assert after.tasks.spacing_ns.tolist() == [spacings[0], *(0.5 * ns for ns in spacings[1:])]


def test_kernels_that_are_launched_one_by_one_keep_their_distance(read: Read) -> None:
    events: list[dict[str, object]] = []
    for number in range(3):
        at = 100 * number
        events += step(number, start=at, dur=100)
        events += kernel("k", start=at + 5, dur=20, launched_at=at + 1)
        events += kernel("k", start=at + 35, dur=20, launched_at=at + 3)
    trace = read(events)
    before = analyse(trace).typical.graph
    assert scale_node_spacing(before, trace, 0.5) is before
    assert not has_graphs(trace)
    assert not is_of_graphs(before, trace)


def test_a_trace_of_graphs_has_a_corrected_step_between_no_gaps_and_all_gaps(read: Read) -> None:
    trace = read(graph_steps())
    analysis = analyse(trace)
    assert analysis.slowness is None
    corrected = correct(analysis.typical.graph, trace)
    spacings = sum(analysis.typical.graph.tasks.spacing_ns.tolist()[1:])
    assert corrected.high_ns - corrected.low_ns == pytest.approx(spacings)
    assert corrected.high_ns - corrected.step_ns == pytest.approx((1 - NODE_SPACING) * spacings)


def test_a_graph_without_two_whole_steps_says_that_its_step_is_as_recorded(read: Read) -> None:
    rank = explain_rank(read(graph_steps(1)))
    assert rank.step_ms.corrected is None
    assert "graphs-not-corrected" in {note.id for note in rank.quality}


@pytest.mark.skipif(not H200.exists(), reason="the shared traces are not here")
@pytest.mark.parametrize("name", ["gpt2s_b8_bf16_graph", "mlp_b32_fp32_graph"])
def test_real_graphs_lie_in_their_interval(name: str) -> None:
    truth = json.loads((H200 / "truth.json").read_text())[name]["step_ms_pipelined"]
    step_ms = explain_rank(read_trace(str(H200 / f"{name}.json.gz"))).step_ms
    assert step_ms.corrected is not None
    assert step_ms.low is not None
    assert step_ms.high is not None
    assert step_ms.low <= truth <= step_ms.high
    assert step_ms.corrected == pytest.approx(truth, rel=0.025)
