"""Compiled graphs on the roofline by kernel, on a replayed graph worked out by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stepscope.explain.rank import explain_analysis
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.records.compiled import CompiledGraph, CompilerRecord, GraphKernel
from stepscope.records.hardware import Spot
from stepscope.records.rank import RankInputs
from stepscope.records.rank_facts import OptimizerLine

from .build import graph, kernel, note, op, step
from .conftest import Read
from .test_kernel_pieces import CALL, CODE, NORM, OPERATORS, PRODUCT, RECORD, SCALE

FLOPS = 2 * 8 * 16 * 32  # of the product
RESULT, OPERANDS = 4 * 8 * 32, 4 * (8 * 16 + 16 * 32)  # bytes


def spots(read: Read, *code: GraphKernel, product: str = "nvjet_gemm") -> dict[str, Spot]:
    """Of two steps with one replay of the graph in each."""
    record = CompilerRecord(
        graphs=(CompiledGraph(key="a", region="0/0", operators=OPERATORS, kernels=code),)
    )
    events = []
    for begin in (0, 200):
        replayed = [
            kernel("triton_poi_fused_tanh_0", start=begin + 20, dur=8),
            kernel("triton_poi_fused_mul_1", start=begin + 30, dur=4),
            kernel(product, start=begin + 40, dur=16),
            kernel("splitk_reduce", start=begin + 56, dur=2),
            kernel("triton_poi_fused_div_2", start=begin + 60, dur=10),
        ]
        events += [
            step(begin // 200 + 1, start=begin, dur=200),
            note(CALL, start=begin + 10, dur=20),
            graph(replayed, launched_at=begin + 12),
        ]
    analysis = RankAnalysis(RankInputs(trace=read(*events), compiler=record))
    efficiency = explain_analysis(analysis).efficiency
    assert efficiency is not None
    assert sum(one.flops or 0.0 for one in efficiency.spots) == efficiency.hardware_flops == FLOPS
    return {one.operator: one for one in efficiency.spots}


def test_each_kernel_of_a_replayed_graph_stands_at_its_line(read: Read) -> None:
    found = spots(read, *CODE)
    times = {name: one.device_ns for name, one in found.items()}
    assert times == {
        "aten::tanh": 8_000,
        "aten::mul": 4_000,
        "aten::mm": 18_000,
        "aten::div + aten::mul": 10_000,
    }
    product = found["aten::mm"]
    assert (product.flops, product.calls, product.dtype) == (FLOPS, 1.0, "fp32")
    assert product.bytes_moved == max(5_000, RESULT + OPERANDS)
    assert product.place == PRODUCT
    assert (found["aten::tanh"].place, found["aten::tanh"].bytes_moved) == (NORM, 30_000)
    assert found["aten::div + aten::mul"].place in (NORM, SCALE)
    assert found["aten::tanh"].flops == 0


def test_a_loop_does_not_compute_the_product_whose_result_it_reads(read: Read) -> None:
    """Inductor lists the product among the nodes of the loop after it."""
    last = GraphKernel(name="triton_poi_fused_div_2", nodes=("mm", "div"), size_bytes=10_000)
    found = spots(read, *CODE[:3], last)
    assert found["aten::div"].flops == 0
    assert found["aten::mm"].flops == FLOPS


def test_the_optimizer_s_operators_have_the_line_that_calls_it(read: Read) -> None:
    events = [
        step(1, start=0, dur=200),
        note(CALL, start=10, dur=20),
        graph([kernel("triton_poi_fused_tanh_0", start=20, dur=30)], launched_at=12),
        note("Optimizer.step#AdamW.step", start=100, dur=50),
        op("aten::_fused_adamw_", start=110, dur=20),
        kernel("adam", start=120, dur=10, launched_at=112),
    ]
    trace, line = read(*events), OptimizerLine(optimizer="AdamW", file="/home/me/train.py", line=8)
    shares, places = [], []
    for lines in ((line,), (line, replace(line, line=9)), ()):
        inputs = RankInputs(trace=trace, compiler=RECORD, optimizer_lines=lines)
        rank = explain_analysis(RankAnalysis(inputs))
        assert rank.compiled is not None
        assert rank.efficiency is not None
        shares.append(rank.compiled.line_share)
        places.append({one.operator: one.place for one in rank.efficiency.spots})
    assert shares == pytest.approx([1.0, 0.75, 0.75])  # two lines: which of them is not known
    assert places[0]["aten::_fused_adamw_"] == line.place
    assert places[1]["aten::_fused_adamw_"] is places[2]["aten::_fused_adamw_"] is None


def test_fp32_that_is_computed_as_tf32_stands_under_that_roof(read: Read) -> None:
    found = spots(read, *CODE, product="sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128")
    assert found["aten::mm"].dtype == "tf32"


def test_what_the_code_does_not_name_stays_with_the_graph(read: Read) -> None:
    found = spots(read, *CODE[:2])  # the code of the rest was not captured
    assert found["aten::tanh"].device_ns == 8_000
    left = found["compiled graph 0/0"]
    assert left.device_ns == pytest.approx(28_000)
    assert left.flops == FLOPS
    assert left.place is None
