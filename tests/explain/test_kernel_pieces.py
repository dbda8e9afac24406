"""Time of compiled graphs by kernel and by line, on traces worked out by hand."""

from __future__ import annotations

import pytest

from stepscope.explain.compiled.graph_calls import align_kernels, align_operators
from stepscope.explain.compiled.graph_kernels import open_regions, split_fused_name
from stepscope.explain.compiled.summary import explain_compiled
from stepscope.explain.rank import explain_analysis
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.records.compiled import CompiledGraph, CompilerRecord, GraphKernel, GraphOperator
from stepscope.records.rank import RankInputs
from stepscope.records.source_lines import Place
from stepscope.ui.html.flame import Flame
from stepscope.ui.html.picture import draw_rank

from .build import Events, frame, graph, kernel, note, op, step
from .conftest import Read

PRODUCT, NORM, SCALE = (
    Place(file="/home/me/model.py", line=line, function="forward") for line in (3, 7, 9)
)


def node(name: str, operator: str, place: Place, size: int) -> GraphOperator:
    return GraphOperator(
        node=name,
        name=operator,
        shapes=[[size // 4], [size // 4]],
        dtypes=["float", "float"],
        concrete=["", ""],
        size_bytes=size,
        place=place,
    )


MM = GraphOperator(
    node="mm",
    name="aten::mm",
    shapes=[[8, 16], [16, 32]],
    dtypes=["float", "float"],
    concrete=["", ""],
    size_bytes=1024,
    place=PRODUCT,
)
OPERATORS = (
    MM,
    node("tanh", "aten::tanh", NORM, 40_000),
    node("mul", "aten::mul", NORM, 40_000),
    node("div", "aten::div", SCALE, 40_000),
)
CODE = (
    GraphKernel(name="triton_poi_fused_tanh_0", nodes=("tanh",), size_bytes=30_000),
    GraphKernel(name="triton_poi_fused_mul_1", nodes=("mul",), size_bytes=10_000),
    GraphKernel(name="extern_kernels.mm", operator="aten::mm", nodes=("mm",), size_bytes=5_000),
    GraphKernel(name="triton_poi_fused_div_2", nodes=("div", "mul"), size_bytes=10_000),
)
RECORD = CompilerRecord(
    graphs=(CompiledGraph(key="a", region="0/0", operators=OPERATORS, kernels=CODE),)
)
CALL = "## Call CompiledFxGraph a ##"


def analysed(read: Read, *events: Events) -> RankAnalysis:
    return RankAnalysis(RankInputs(trace=read(*events), compiler=RECORD))


def kernel_ms(analysis: RankAnalysis) -> dict[str, float]:
    work = explain_compiled(analysis)
    assert work is not None
    return {one.name: one.ms for one in work.regions[0].kernel_times}


ON_CPU = (
    step(1, start=0, dur=200),
    note(CALL, start=10, dur=100),
    op("aten::mm", start=50, dur=20),
)


def test_on_a_cpu_loops_share_the_time_around_the_library_s_operators(read: Read) -> None:
    analysis = analysed(read, *ON_CPU)
    # 40 us before the product for the first two, by their bytes, and 40 us after it.
    assert kernel_ms(analysis) == pytest.approx(
        {
            "triton_poi_fused_tanh_0": 0.030,
            "triton_poi_fused_mul_1": 0.010,
            "extern_kernels.mm": 0.020,
            "triton_poi_fused_div_2": 0.040,
        }
    )
    work = explain_compiled(analysis)
    assert work is not None
    shares = {line.place.line: line.share for line in work.regions[0].lines}
    # div and mul are one kernel, and move the same: half of it is for line 7, half for line 9.
    assert shares == pytest.approx({3: 0.2, 7: 0.4 + 0.2, 9: 0.2})
    assert (work.operator_share, work.line_share) == (1.0, 1.0)
    assert work.regions[0].kernel_times[0].places in ((NORM, SCALE), (SCALE, NORM))


FLAME_LINES = {
    "cpu": ((3, 20_000), (7, 60_000), (9, 20_000)),
    "device": ((3, 18_000), (7, 17_000), (9, 5_000)),
}


def device_step() -> list[Events]:
    return [
        step(1, start=0, dur=200),
        note(CALL, start=10, dur=100),
        kernel("triton_poi_fused_tanh_0", start=20, dur=8, launched_at=12),
        kernel("triton_poi_fused_mul_1", start=30, dur=4, launched_at=14),
        op("aten::mm", start=18, dur=10),
        kernel("nvjet_gemm", start=40, dur=16, launched_at=20),
        kernel("splitk_reduce", start=56, dur=2, launched_at=24),
        kernel("triton_poi_fused_div_2", start=60, dur=10, launched_at=30),
    ]


def test_on_a_device_kernels_belong_to_the_calls_that_launched_them(read: Read) -> None:
    eager = [
        op("aten::add_", start=120, dur=10),
        kernel("adam", start=130, dur=10, launched_at=122),
    ]
    analysis = analysed(read, *device_step(), *eager)
    assert kernel_ms(analysis) == pytest.approx(
        {
            "triton_poi_fused_tanh_0": 0.008,
            "triton_poi_fused_mul_1": 0.004,
            "extern_kernels.mm": 0.018,
            "triton_poi_fused_div_2": 0.010,
        }
    )
    work = explain_compiled(analysis)
    assert work is not None
    # The eager kernel has an operator and, without stacks, no line.
    assert work.operator_share == pytest.approx(1.0)
    assert work.line_share == pytest.approx(0.8)


def test_a_replayed_graph_is_joined_by_names_and_order(read: Read) -> None:
    replayed = [
        kernel("triton_poi_fused_tanh_0", start=20, dur=8),
        kernel("triton_poi_fused_mul_1", start=30, dur=4),
        kernel("nvjet_gemm", start=40, dur=16),
        kernel("splitk_reduce", start=56, dur=2),
        kernel("triton_poi_fused_div_2", start=60, dur=10),
    ]
    events = [step(1, start=0, dur=200), note(CALL, start=10, dur=20)]
    analysis = analysed(read, *events, graph(replayed, launched_at=12))
    assert kernel_ms(analysis)["extern_kernels.mm"] == pytest.approx(0.018)


def test_a_bare_trace_has_kernels_by_their_names(read: Read) -> None:
    analysis = RankAnalysis(RankInputs(trace=read(*device_step())))
    work = explain_compiled(analysis)
    assert work is not None
    times = {one.name: (one.operators, one.ms) for one in work.regions[0].kernel_times}
    assert times["aten::mm"] == (("aten::mm",), pytest.approx(0.018))
    assert times["triton_poi_fused_div_2"] == (("aten::div",), pytest.approx(0.010))
    assert (work.operator_share, work.line_share) == (1.0, 0.0)


def test_the_name_of_a_kernel_names_its_operators() -> None:
    name = "triton_red_fused__log_softmax__log_softmax_backward_data__to_copy_add_12"
    assert split_fused_name(name) == (
        "aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::_to_copy", "aten::add",
    )  # fmt: skip
    assert split_fused_name("nvjet_gemm") == ()


def test_operators_that_the_code_does_not_name_are_left_out() -> None:
    assert align_operators(["aten::empty", "aten::mm"], CODE) == [-1, 2]
    assert align_operators(["aten::mm", "aten::mm"], CODE) == [2, -1]
    assert align_operators([], CODE) == []


def test_kernels_of_two_library_calls_are_divided_in_their_order() -> None:
    code = (CODE[0], CODE[2], CODE[2], CODE[3])
    names = ["triton_poi_fused_tanh_0", "a", "b", "c", "d", "triton_poi_fused_div_2"]
    assert align_kernels(names, [-1] * 6, code) == [0, 1, 1, 2, 2, 3]
    assert align_kernels(["copy"], [-1], (CODE[0],)) == [-1]


def test_frames_of_generated_code_are_left_out_of_the_flame_graph(read: Read) -> None:
    frames = [frame("generated.py(9): call", start=11, dur=98), frame("mm", start=49, dur=22)]
    analysis = analysed(read, *ON_CPU, *frames)
    rank = explain_analysis(analysis)
    picture = draw_rank(analysis.trace, rank, analysis.compute_once(open_regions))
    lines = below(picture.host_flame, picture.strings, CALL)
    shown = {name: ns for name, ns in lines.items() if ns}
    assert shown == {f"model.py:{line} forward": ns for line, ns in FLAME_LINES["cpu"]}


def below(flame: Flame, strings: tuple[str, ...], name: str) -> dict[str, int]:
    """Names and nanoseconds right under the nodes of this name."""
    texts = [strings[code] for code in flame.name.tolist()]
    parents = flame.parent.tolist()
    children = {}
    for place, parent in enumerate(parents):
        if parent >= 0 and texts[parent] == name:
            children[texts[place]] = int(flame.total_ns[place])
    return children


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_flame_graphs_show_lines_operators_and_kernels_of_a_graph(read: Read, where: str) -> None:
    analysis = analysed(read, *(ON_CPU if where == "cpu" else device_step()))
    rank = explain_analysis(analysis)
    picture = draw_rank(analysis.trace, rank, analysis.compute_once(open_regions))
    flame = picture.host_flame if where == "cpu" else picture.device_flame
    lines = below(flame, picture.strings, CALL)
    assert lines == {f"model.py:{line} forward": ns for line, ns in FLAME_LINES[where]}
    operators = below(flame, picture.strings, "model.py:7 forward")
    assert set(operators) == {"aten::tanh", "aten::mul", "div, mul"}
    assert set(below(flame, picture.strings, "aten::tanh")) == {"triton_poi_fused_tanh_0"}
    assert "aten::mm" in below(flame, picture.strings, "model.py:3 forward")
