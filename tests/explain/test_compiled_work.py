"""Graph breaks, regions and FLOPs of compiled graphs, on traces worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.explain.compiled.summary import (
    compile_seconds,
    explain_compiled,
    list_eager,
    list_recompiled,
)
from stepscope.explain.flops.prices import price_graph
from stepscope.explain.rank import explain_analysis, truncate_tables
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.records.compiled import (
    Compilation,
    CompiledGraph,
    CompilerRecord,
    GraphBreak,
    GraphKernel,
    GraphOperator,
)
from stepscope.records.hardware import find_device
from stepscope.records.rank import RankInputs
from stepscope.records.source_lines import Place

from .build import Events, graph, kernel, note, op, step
from .conftest import Read

LINE = Place(file="train.py", line=7, function="forward")
PRODUCT = GraphOperator(
    node="mm",
    name="aten::mm",
    shapes=[[8, 16], [16, 32]],
    dtypes=["float", "float"],
    concrete=["", ""],
    size_bytes=1024,
    place=LINE,
)  # 8192 FLOPs
ACCUMULATES = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
BREAK = GraphBreak(reason="Tensor.item()", hint="keep it", place=LINE, regions=("0/0",))


def call(key: str) -> str:
    return f"## Call CompiledFxGraph {key} ##"


def analysed(read: Read, record: CompilerRecord | None, *events: Events) -> RankAnalysis:
    return RankAnalysis(RankInputs(trace=read(*events), compiler=record))


def broken_step(start: float) -> list[Events]:
    """Two graphs of one function: 30 µs from one to the next, and 20 µs in backward."""
    first, second = int(start) + 2, int(start) + 1
    return [
        op("Torch-Compiled Region: 0/0", start=start, dur=60),
        op("CompiledFunction", start=start + 1, dur=20, sequence=first, forward_thread=0),
        note(call("a"), start=start + 2, dur=18),
        op("Torch-Compiled Region: 1/0", start=start + 40, dur=18),
        op("CompiledFunction", start=start + 45, dur=12, sequence=second, forward_thread=0),
        note(call("b"), start=start + 50, dur=5),
        op("CompiledFunctionBackward", start=start + 70, dur=12, sequence=second, forward_thread=1),
        note(call("b-back"), start=start + 71, dur=9),
        op(ACCUMULATES, start=start + 85, dur=8),
        op("CompiledFunctionBackward", start=start + 95, dur=16, sequence=first, forward_thread=1),
        note(call("a-back"), start=start + 100, dur=10),
    ]


def test_a_break_costs_the_time_between_its_graphs(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.explain.compiled.summary.event_cost_ns", lambda *_: 1000.0)
    steps = [step(n, start=1000 * n, dur=1000) for n in (1, 2)]
    analysis = analysed(
        read, CompilerRecord(breaks=(BREAK,)), *steps, *broken_step(1000), *broken_step(2000)
    )
    work = explain_compiled(analysis)
    assert work is not None
    (cost,) = work.breaks
    assert (cost.place, cost.hint, cost.times) == (LINE, "keep it", 1.0)
    # Forward: 30 µs with the region and the function of the second graph. Backward: 20 µs with
    # 8 µs of accumulation, and that event and the function recorded.
    assert cost.cost_ms == pytest.approx((30 - 2 + 20 - 2 - 8) / 1e3)


def test_graphs_of_different_calls_are_no_break(read: Read) -> None:
    two = [
        op("Torch-Compiled Region: 0/0", start=10, dur=20),
        note(call("a"), start=11, dur=18),
        op("Torch-Compiled Region: 0/0", start=50, dur=20),
        note(call("a"), start=51, dur=18),
    ]
    work = explain_compiled(analysed(read, None, step(1, start=0, dur=100), *two))
    assert work is not None
    assert work.breaks == ()
    assert [(region.key, region.region, region.calls) for region in work.regions] == [
        ("a", "0/0", 2.0)
    ]
    assert work.compilations is None
    assert "stepscope run" in work.notes[0]


def test_a_break_that_nobody_recorded_is_still_counted(read: Read) -> None:
    steps = [step(n, start=1000 * n, dur=1000) for n in (1, 2)]
    work = explain_compiled(analysed(read, None, *steps, *broken_step(1000), *broken_step(2000)))
    assert work is not None
    assert [(one.place, one.times) for one in work.breaks] == [(None, 1.0)]
    assert "not recorded" in work.breaks[0].reason


def test_a_step_without_compiled_graphs_has_no_part(read: Read) -> None:
    assert explain_compiled(analysed(read, None, step(1, start=0, dur=9))) is None


RECORDED = CompilerRecord(graphs=(CompiledGraph(key="a", region="0/0", operators=(PRODUCT,)),))


def counted_flops(analysis: RankAnalysis) -> int:
    costs = analysis.costs
    return int(costs.flops[costs.counted].sum())


ATTENTION_BACKWARD = GraphOperator(
    node="attention_backward",
    name="aten::_scaled_dot_product_flash_attention_backward",
    shapes=[[2, 4, 8, 16]] * 4,
    dtypes=["c10::BFloat16"] * 4,
    concrete=[""] * 4,
    size_bytes=1024,
    place=LINE,
)  # five products of 2 * 2 * 4 * 8 * 8 * 16 FLOPs, of which one is the forward's again


def test_what_attention_computes_again_in_a_compiled_backward_is_not_in_the_mfu(read: Read) -> None:
    record = CompilerRecord(
        graphs=(CompiledGraph(key="a", region="0/0", operators=(ATTENTION_BACKWARD,)),)
    )
    product = 2 * 2 * 4 * 8 * 8 * 16
    assert price_graph(record.graphs[0]).again == product
    events = [
        step(1, start=0, dur=100),
        note(call("a"), start=10, dur=20),
        graph([kernel("flash_bwd", start=20, dur=5)], launched_at=12),
    ]
    costs = analysed(read, record, *events).costs
    assert int(costs.flops[costs.counted].sum()) == 5 * product
    assert int(costs.model_flops[costs.counted].sum()) == 4 * product


def test_products_that_the_trace_does_not_show_come_from_the_recorded_graph(read: Read) -> None:
    """A CUDA graph: its kernels belong to no operator."""
    kernels = [kernel("nvjet_tst", start=20, dur=5), kernel("elementwise", start=25, dur=5)]
    events = [
        step(1, start=0, dur=100),
        op("CompiledFunction", start=5, dur=30),
        note(call("a"), start=10, dur=20),
        graph(kernels, launched_at=12),
    ]
    assert counted_flops(analysed(read, None, *events)) == 0
    analysis = analysed(read, RECORDED, *events)
    assert counted_flops(analysis) == 8192
    names = [
        analysis.trace.strings[analysis.trace.host.name[row]] for row in analysis.costs.operator
    ]
    assert set(names) == {call("a")}


def test_products_that_the_trace_shows_count_once(read: Read) -> None:
    product = op("aten::mm", start=12, dur=4, shapes=[[8, 16], [16, 32]], dtypes=["float", "float"])
    events = [step(1, start=0, dur=100), note(call("a"), start=10, dur=20), product]
    assert counted_flops(analysed(read, RECORDED, *events)) == 8192
    twice = CompiledGraph(key="a", operators=(PRODUCT, replace(PRODUCT, node="mm_1")))
    analysis = analysed(read, CompilerRecord(graphs=(twice,)), *events)
    assert counted_flops(analysis) == 2 * 8192
    region = analysis.costs.flops[np.flatnonzero(analysis.costs.counted)]
    assert sorted(region.tolist()) == [8192, 8192]


def test_symbolic_sizes_and_graphs_without_text_are_not_known() -> None:
    symbolic = replace(PRODUCT, shapes=[["?"], [16, 32]])
    assert price_graph(CompiledGraph(key="a", operators=(symbolic,))).flops is None
    assert price_graph(CompiledGraph(key="a")).flops is None


def test_a_graph_opens_up_to_lines(read: Read) -> None:
    other = Place(file="train.py", line=9, function="forward")
    relu = GraphOperator(
        node="relu",
        name="aten::relu",
        shapes=[[8, 32]],
        dtypes=["float"],
        concrete=[""],
        inputs=("mm",),
        size_bytes=1024,
        place=other,
    )
    record = CompilerRecord(graphs=(CompiledGraph(key="a", operators=(PRODUCT, relu)),))
    events = [step(1, start=0, dur=100), note(call("a"), start=10, dur=20)]
    work = explain_compiled(analysed(read, record, *events))
    assert work is not None
    lines = {line.place.line: line for line in work.regions[0].lines}
    assert (lines[7].flops, lines[9].flops) == (8192, 0)
    assert lines[7].bytes_moved == 4 * (8 * 16 + 16 * 32 + 8 * 32)
    assert lines[9].bytes_moved == 2 * 1024
    assert sum(line.share or 0.0 for line in lines.values()) == pytest.approx(1)
    assert work.is_most_of(0.03)
    assert not work.is_most_of(1.0)


def test_a_compiled_step_that_waits_for_its_host_is_not_told_to_compile(read: Read) -> None:
    """Its kernels run for a fifth of the step: the graph does all of the computing."""
    record = CompilerRecord(graphs=(CompiledGraph(key="a", operators=(PRODUCT,)),))
    events: list[Events] = []
    for number in (1, 2, 3):
        at = 1000.0 * number
        events += [step(number, start=at, dur=1000), note(call("a"), start=at + 10, dur=900)]
        events += [
            kernel("k", start=at + 90 * one + 20, dur=20, launched_at=at + 90 * one + 15)
            for one in range(1, 10)
        ]
    findings = explain_analysis(analysed(read, record, *events)).findings
    host_bound = next(finding for finding in findings if finding.id == "host-bound")
    remedies = [remedy.id for remedy in host_bound.remedies]
    assert {"reduce-overhead", "cuda-graphs"} <= set(remedies)
    assert "compile" not in remedies


def compilation(region: str, seconds: float, **more: Any) -> Compilation:
    return Compilation(region=region, function="forward", place=LINE, seconds=seconds, **more)


def test_one_gap_in_which_the_host_lost_its_core_does_not_count(read: Read) -> None:
    steps = [event for n in range(5) for event in broken_step(200.0 * n)]
    marks = [step(n, start=200.0 * n, dur=200) for n in range(5)]
    usual = explain_compiled(analysed(read, CompilerRecord(breaks=(BREAK,)), *marks, *steps))
    late = broken_step(1000.0)
    late[0][0]["dur"] += 20
    for event in (event for part in late[3:] for event in part):  # from the second graph on
        event["ts"] += 20
    events = (*marks, step(5, start=1000, dur=200), *steps, *late)
    found = explain_compiled(analysed(read, CompilerRecord(breaks=(BREAK,)), *events))
    assert usual is not None
    assert found is not None
    assert found.breaks[0].cost_ms == pytest.approx(usual.breaks[0].cost_ms)


def test_breaks_without_a_cost_are_named_after_the_others(read: Read) -> None:
    """Torch has given up compiling what follows: there is no second graph."""
    given_up = replace(BREAK, place=replace(LINE, line=9), regions=("1/0",))
    marks = [step(n, start=200.0 * n, dur=200) for n in range(3)]
    steps = [event for n in range(3) for event in broken_step(200.0 * n)]
    record = CompilerRecord(breaks=(given_up, BREAK))
    rank = explain_analysis(analysed(read, record, *marks, *steps))
    (finding,) = [finding for finding in rank.findings if finding.id == "graph-breaks"]
    assert [place.line for place in finding.where] == [7, 9]
    assert finding.summary.startswith("torch.compile cannot trace 1 line, ")
    assert finding.evidence[1] == "train.py:9 in forward: cost not known; Tensor.item()"


def test_torchs_marks_while_it_compiles_hide_no_products(read: Read) -> None:
    compiling = [
        op("_compile.compile_inner (dynamo_timed)", start=10, dur=50),
        op("entire_frame_compile", start=11, dur=40),
        op("code_gen", start=12, dur=20),
    ]
    rank = explain_analysis(analysed(read, None, step(0, start=0, dur=100), *compiling))
    assert rank.efficiency is not None
    assert rank.efficiency.unknown_share == 0


def test_guards_on_one_value_are_one_guard() -> None:
    every = [
        compilation("0/0", 5.0, cached=False),
        compilation("0/1", 2.0, again=True, guard="len(log) == 1", guard_place=LINE, cached=True),
        compilation("0/2", 2.0, again=True, guard="len(log) == 2", guard_place=LINE),
        compilation("0/2", 1.0, again=True),  # its backward
        compilation("0/3", 0.0, again=True, guard="x", failed="Dynamo recompile limit exceeded"),
    ]
    (again,) = list_recompiled(every)
    assert (again.times, again.seconds, again.gave_up) == (2, 5.0, True)
    assert [(guard.guard, guard.times) for guard in again.guards] == [("len(log)", 2), ("x", 1)]
    assert compile_seconds(every) == (10.0, 8.0, 2.0)
    assert compile_seconds([]) == (None, None, None)
    assert list_eager(every) == ()
    (eager,) = list_eager([compilation("4/0", 0.1, failed="cannot trace a generator")])
    assert eager.reason == "cannot trace a generator"


def test_the_finding_names_lines_and_cost(read: Read) -> None:
    steps = [step(n, start=1000 * n, dur=1000) for n in (1, 2)]
    record = CompilerRecord(breaks=(BREAK,))
    analysis = analysed(read, record, *steps, *broken_step(1000), *broken_step(2000))
    rank = explain_analysis(analysis)
    (finding,) = [finding for finding in rank.findings if finding.id == "graph-breaks"]
    assert finding.where == (LINE,)
    assert "train.py:7 in forward" in finding.evidence[0]
    assert "keep it" in finding.remedies[0].summary


def test_many_graphs_are_cut_and_summed(read: Read) -> None:
    calls = [note(call(f"g{n}"), start=10 * n, dur=n) for n in range(1, 6)]
    analysis = analysed(read, None, step(1, start=0, dur=100), *calls)
    rank = truncate_tables(explain_analysis(analysis), 2)
    assert rank.compiled is not None
    assert [region.key for region in rank.compiled.regions] == ["g5", "g4", "(others)"]
    assert sum(region.ms for region in rank.compiled.regions) == pytest.approx(15e-3)


def test_graphs_that_are_not_replayed_are_found_with_the_device_s_waits(read: Read) -> None:
    skipped = CompiledGraph(
        key="a", region="0/0", operators=(PRODUCT,), not_graphed="skipping cudagraphs: mutation"
    )
    events = [
        step(1, start=0, dur=1000),
        note(call("a"), start=10, dur=900),
        kernel("nvjet_tst", start=20, dur=300, launched_at=12),
        kernel("triton_poi", start=720, dur=200, launched_at=700),  # waits 400 us for the host
    ]
    rank = explain_analysis(analysed(read, CompilerRecord(graphs=(skipped,)), *events))
    (finding,) = [finding for finding in rank.findings if finding.id == "graphs-skipped"]
    assert finding.share == pytest.approx(0.4)
    assert finding.where == (LINE,)
    assert finding.evidence == ("region 0/0, forward: skipping cudagraphs: mutation",)
    replayed = CompilerRecord(graphs=(replace(skipped, not_graphed=None),))
    rank = explain_analysis(analysed(read, replayed, *events))
    assert "graphs-skipped" not in {finding.id for finding in rank.findings}


def test_kernels_that_read_again_what_the_one_before_had_are_found_by_the_memory_s_rate(
    read: Read,
) -> None:
    kernels = (
        GraphKernel(name="triton_poi_0"),
        GraphKernel(name="triton_per_1", shared_bytes=480_000_000),
    )
    compiled = CompiledGraph(key="a", operators=(PRODUCT,), kernels=kernels)
    events = [
        step(1, start=0, dur=1000),
        note(call("a"), start=10, dur=900),
        kernel("triton_poi_0", start=20, dur=900, launched_at=12),
    ]
    trace = read(*events, device="NVIDIA H200")
    record = CompilerRecord(graphs=(compiled,))
    rank = explain_analysis(RankAnalysis(RankInputs(trace=trace, compiler=record)))
    (finding,) = [finding for finding in rank.findings if finding.id == "not-fused"]
    h200 = find_device("NVIDIA H200")
    assert h200 is not None
    assert finding.share == pytest.approx(480e6 / h200.bandwidth_bytes_s / 1e-3, rel=0.01)
    assert finding.severity == "low"
    assert "triton_poi_0, then triton_per_1: 480 MB" in finding.evidence[0]


def test_products_of_a_region_that_name_fp32_have_its_flops_in_fp32(read: Read) -> None:
    """One bf16 product of 8 times the FLOPs decides the region's dtype, not every kernel's."""
    half = replace(PRODUCT, node="mm_1", shapes=[[64, 16], [16, 32]], dtypes=["c10::BFloat16"] * 2)
    kernels = [
        kernel("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT", start=20, dur=10),
        kernel("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn>", start=32, dur=30),
    ]
    events: list[Events] = [step(1, start=0, dur=100), note(call("a"), start=1, dur=20)]
    events.append(graph(kernels, launched_at=5))
    record = CompilerRecord(graphs=(CompiledGraph(key="a", operators=(PRODUCT, half)),))
    trace = read(*events, device="NVIDIA H200")
    rank = explain_analysis(RankAnalysis(RankInputs(trace=trace, compiler=record)))
    assert rank.efficiency is not None
    uses = {use.dtype: (use.flops, use.device_ns) for use in rank.efficiency.by_dtype}
    assert uses == {"bf16": (65536, 10_000), "fp32": (8192, 30_000)}
