"""Verdicts on steps that CUDA graphs launch: never about launches or short kernels."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from benches import analyse, bench_for
from stepscope import explain_rank, read_trace
from stepscope.explain.findings.compiled import compile_time
from stepscope.explain.findings.kernels import REACHABLE
from stepscope.explain.rank import explain_analysis
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.predict.declaration import Refused
from stepscope.predict.whatifs import cuda_graphs, optimizer, precision
from stepscope.records.compiled import CompiledGraph, CompiledWork, CompilerRecord, GraphKernel
from stepscope.records.rank import RankInputs
from stepscope.step.cuda_graphs import find_gaps_in_replays, find_replayed, replayed_share

from .build import Events, call, graph, kernel, op, step
from .conftest import Explain, Read

GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>"
H200 = "NVIDIA H200"


def replays(*nodes: tuple[str, float], apart: float = 1.0, count: int = 3) -> Events:
    """Steps of one graph with these kernels (name, µs)."""
    length = 10 + sum(dur + apart for _, dur in nodes)
    events: Events = []
    for number in range(count):
        at = number * length
        start, kernels = at + 5.0, []
        for name, dur in nodes:
            kernels.append(kernel(name, start=start, dur=dur))
            start += dur + apart
        events += step(number, start=at, dur=length) + graph(kernels, launched_at=at + 1)
    return events


def test_short_kernels_of_a_graph_are_no_finding(explained: Explain) -> None:
    rank = explained(replays(*[(ADD, 3.0)] * 40, apart=2.0))
    names = {finding.id for finding in rank.findings}
    assert not names & {"short-kernels", "launch-bound"}
    remedies = {remedy.id for finding in rank.findings for remedy in finding.remedies}
    assert "cuda-graphs" not in remedies


def test_short_kernels_beside_a_graph_still_count(explained: Explain) -> None:
    events = replays((GEMM, 60.0))
    for number in range(3):
        at = number * 71.0
        for place in range(8):
            events += kernel(ADD, start=at + 66 + place, dur=1, stream=9, launched_at=at + 2)
    found = next(f for f in explained(events).findings if f.id == "short-kernels")
    assert "24 of 24 kernels" in found.summary


def test_replays_launched_before_the_window_are_known_by_their_shared_number(read: Read) -> None:
    lost = [event for event in replays((GEMM, 20.0), (ADD, 5.0)) if event["cat"] == "kernel"]
    for event in lost:
        del event["args"]["graph node id"]
    alone = kernel("k", start=-50, dur=5, correlation=987_654)
    trace = read(lost, alone, call("cudaDeviceSynchronize", start=0, dur=1))
    replayed = find_replayed(trace)
    assert replayed.tolist() == [False] + [True] * 6
    assert replayed_share(trace) == pytest.approx(75 / 80)


def test_only_the_gap_before_a_graph_is_one_of_its_launch(read: Read) -> None:
    trace = read(replays((GEMM, 20.0), (ADD, 5.0), count=1))
    starts = trace.device.start_ns
    assert find_gaps_in_replays(trace, starts).tolist() == [False, True]
    assert find_gaps_in_replays(trace, starts + 1).tolist() == [False, False]


def test_a_trace_without_a_device_has_no_replays(read: Read) -> None:
    trace = read(op("aten::add", start=0, dur=5))
    assert replayed_share(trace) == 0
    assert not find_replayed(trace).any()
    assert find_gaps_in_replays(trace, np.array([5])).tolist() == [False]


def test_cuda_graphs_is_refused_for_a_graph_of_few_kernels(read: Read) -> None:
    context = bench_for(read(replays((GEMM, 20.0), (ADD, 5.0)))).context
    with pytest.raises(Refused, match="graph already"):
        cuda_graphs.predict(context, "")


@pytest.mark.parametrize(("change", "value"), [(precision, "bf16"), (optimizer, "fused")])
def test_changes_of_operators_are_refused_where_none_is_known(
    read: Read, change: ModuleType, value: str
) -> None:
    context = bench_for(read(replays((GEMM, 20.0), (ADD, 5.0)), device=H200)).context
    with pytest.raises(Refused, match="does not say which operators"):
        change.predict(context, value)


def test_a_graphs_elementwise_kernels_are_memory_bound_by_their_names(explained: Explain) -> None:
    nodes = [(GEMM, 20.0), (ADD, 30.0), (ADD, 30.0), (GEMM, 20.0), (ADD, 15.0)]
    rank = explained(replays(*nodes, apart=0.0))
    found = next(f for f in rank.findings if f.id == "memory-bound")
    # Of 115 µs, 75 move data; of the two neighbours one is saved.
    step_us = rank.budget.step_ms * 1e3
    assert found.share == pytest.approx(30 / step_us, rel=0.02)
    assert any("CUDA graphs" in line for line in found.evidence)


def compiled_steps(dur: float) -> Events:
    """A product inside a compiled graph: 2.1 GFLOP and a long kernel."""
    events: Events = []
    for number in range(3):
        at = number * (dur + 10)
        events += step(number, start=at, dur=dur + 10)
        events += op("## Call CompiledFxGraph abc ##", start=at, dur=9)
        shapes, types = [[1024, 1024], [1024, 1024]], ["c10::BFloat16"] * 2
        events += op("aten::mm", start=at + 1, dur=5, shapes=shapes, dtypes=types)
        events += kernel(GEMM, start=at + 10, dur=dur, launched_at=at + 2)
    return events


def test_a_compiled_steps_verdict_is_its_widest_gap_to_the_roof(explained: Explain) -> None:
    rank = explained(compiled_steps(100), device=H200)
    found = next(f for f in rank.findings if f.id == "below-roof")
    assert rank.efficiency is not None
    spot = rank.efficiency.spots[0]
    assert spot.roof_ns is not None
    lost_ms = (spot.device_ns - spot.roof_ns / REACHABLE) / 1e6
    assert found.share == pytest.approx(lost_ms / rank.budget.step_ms, rel=0.02)
    assert found.severity == "medium"
    assert "aten::mm" in found.summary
    assert "healthy" not in {f.id for f in rank.findings}


def test_a_compiled_step_near_its_roof_is_healthy(explained: Explain) -> None:
    rank = explained(compiled_steps(2.7), device=H200)  # 2.1 GFLOP at 990 TFLOP/s: 2.17 µs
    assert "below-roof" not in {f.id for f in rank.findings}


def test_an_eager_step_is_not_judged_by_its_roof(explained: Explain) -> None:
    events = [e for e in compiled_steps(100) if "CompiledFxGraph" not in e["name"]]
    assert "below-roof" not in {f.id for f in explained(events, device=H200).findings}


def test_a_graph_that_was_to_be_replayed_is_named_with_the_reason(read: Read) -> None:
    why = "mutated inputs (1 instances)"
    record = CompilerRecord(graphs=(CompiledGraph(key="abc", not_graphed=why),))
    rank = explain_analysis(
        RankAnalysis(RankInputs(trace=read(compiled_steps(20)), compiler=record))
    )
    found = next(f for f in rank.findings if f.id == "graphs-skipped")
    assert "1 of 1 compiled graph is not replayed" in found.summary
    assert why in found.evidence[0]


def test_kernels_that_share_tensors_are_named_as_not_fused(read: Read) -> None:
    kernels = (GraphKernel(name="one"), GraphKernel(name="two", shared_bytes=24_000_000))
    record = CompilerRecord(graphs=(CompiledGraph(key="abc", kernels=kernels),))
    trace = read(compiled_steps(20), device=H200)
    rank = explain_analysis(RankAnalysis(RankInputs(trace=trace, compiler=record)))
    found = next(f for f in rank.findings if f.id == "not-fused")
    assert found.share == pytest.approx(24e6 / 4.8e12 * 1e3 / rank.budget.step_ms, rel=0.01)
    assert found.evidence[0].startswith("one, then two: 24.0 MB")


@pytest.mark.parametrize(("wall_s", "severity"), [(400.0, "medium"), (2000.0, None)])
def test_compiling_counts_by_its_share_of_the_run(wall_s: float, severity: str | None) -> None:
    compiled = CompiledWork(compilations=3, compile_s=90.0, cold_s=80.0, cached_s=10.0)
    run = SimpleNamespace(account=SimpleNamespace(wall_ms=1e3 * wall_s, parts=()))
    found = compile_time.find(SimpleNamespace(compiled=compiled, run=run))  # type: ignore[arg-type]
    assert (found and found.severity) == severity
    if found:
        assert (found.id, found.of) == ("compile-time", "run")
        assert found.share == pytest.approx(90 / wall_s)


@pytest.mark.parametrize("name", ["gpt2s_b8_bf16_graph", "mlp_b32_fp32_graph"])
def test_real_graphs_have_no_advice_to_use_graphs(shared: Path, name: str) -> None:
    trace = read_trace(str(shared / "traces" / "h200" / f"{name}.json.gz"))
    assert replayed_share(trace) == pytest.approx(1.0)
    rank = explain_rank(trace)
    assert not {f.id for f in rank.findings} & {"short-kernels", "launch-bound", "healthy"}
    assert all(r.id != "cuda-graphs" for f in rank.findings for r in f.remedies)
    assert analyse(trace).corrected is not None
