"""What the trace says for a peak: when gradients are cleared, which convolutions are dense."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from backward_graphs import FLOAT, graph_of

from benches import analyse
from explain.build import AUTOGRAD, MAIN, kernel, note, op, step, write
from stepscope import read_trace
from stepscope.predict.engine import Bench
from stepscope.predict.peak_memory.backward_graph import ConvolutionLayout
from stepscope.predict.peaks import find_traced_passes, why_unsure
from stepscope.records.memory import (
    BatchLine,
    CapturedMemory,
    CapturedPeak,
    CapturedPhase,
    LargestBatch,
    Memory,
)
from stepscope.records.rank import MemoryInputs

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.predict.peak_memory.passes import TracedPasses

STEP_US = 2000.0
GRAPH = graph_of(
    [
        ["ConvolutionBackward0", 0, [[800, FLOAT]], [[-1, 0]], []],
        ["ReluBackward0", 0, [[800, FLOAT]], [[0, 0]], []],
    ],
    [],
)
SHAPES = [[2, 3, 10, 10], [4, 3, 3, 3]]
STRIDES = [[300, 100, 10, 1], [27, 9, 3, 1]]
CONCRETE = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]


CAPTURED = CapturedMemory(device="cuda", graph=GRAPH)


def passes(folder: Path, **made: Any) -> TracedPasses:
    return find_traced_passes(Bench(analysed(folder, **made)).context)


def analysed(
    folder: Path,
    *,
    tf32: bool | None = False,
    clear_at: float = 0,
    captured: CapturedMemory = CAPTURED,
    **call: Any,
) -> RankAnalysis:
    """Forward from 100 us on, backward from 600 us on; `call` changes the convolution."""
    arguments = {"shapes": SHAPES, "strides": STRIDES, "concrete": CONCRETE, **call}
    events: list[dict[str, Any]] = []
    for number in range(3):
        at = number * STEP_US
        events += step(number, start=at, dur=STEP_US)
        if clear_at:
            events += note("Optimizer.zero_grad#Adam.zero_grad", start=at + clear_at, dur=10)
        for place, name in enumerate(("aten::convolution", "aten::relu")):
            given = arguments if not place else {}
            linked = {"sequence": 10 * number + place, **given}
            events += op(name, start=at + 100 + 200 * place, dur=40, **linked)
            events += kernel("k", start=at + 120 + 200 * place, dur=50,
                             launched_at=at + 105 + 200 * place)  # fmt: skip
        for place in (1, 0):
            linked = {"sequence": 10 * number + place, "forward_thread": MAIN, "thread": AUTOGRAD}
            begin = at + 600 + 200 * (1 - place)
            events += op(GRAPH.nodes[place].name, start=begin, dur=50, **linked)
            events += kernel("b", start=begin + 20, dur=50, launched_at=begin + 5, thread=AUTOGRAD)
    if tf32 is not None:
        facts = {"math": {"cudnn_tf32": tf32, "matmul_tf32": tf32}}
        (folder / "rank.json").write_text(json.dumps(facts))
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    return analyse(trace, memory=MemoryInputs(captured=captured))


@pytest.mark.parametrize(
    ("clear_at", "late"), [(50, False), (500, True), (1500, False), (0, False)]
)
def test_gradients_are_cleared_late_if_that_is_between_forward_and_backward(
    tmp_path: Path, clear_at: float, late: bool
) -> None:
    assert passes(tmp_path, clear_at=clear_at).cleared_late == late


def test_a_dense_convolution_in_fp32(tmp_path: Path) -> None:
    found = passes(tmp_path)
    assert found.convolves_in_fp32
    assert found.fp32_convolutions == (ConvolutionLayout(place=0, inputs=3, outputs=4),)


def test_a_stride_is_read_from_the_call(tmp_path: Path) -> None:
    strided = passes(tmp_path, concrete=["", "", "", "[2, 2]", *CONCRETE[4:]])
    assert [one.strided for one in strided.fp32_convolutions] == [True]


@pytest.mark.parametrize("tf32", [True, None])
def test_tensor_cores_have_their_copies_in_the_captured_peak(
    tmp_path: Path, tf32: bool | None
) -> None:
    """Also if nobody knows: tf32 is what torch allows cuDNN by itself."""
    found = passes(tmp_path, tf32=tf32)
    assert (found.convolves_in_fp32, found.fp32_convolutions) == (False, ())


@pytest.mark.parametrize(
    "call",
    [
        {"strides": [[300, 1, 30, 3], [27, 1, 9, 3]]},  # channels_last
        {"shapes": [[2, 3, 10, 10], [4, 3, 1, 1]]},  # a plain product
        {"shapes": [[2, 8, 10, 10], [8, 1, 3, 3]], "concrete": [*CONCRETE[:8], "8"]},  # depthwise
    ],
)
def test_other_convolutions_need_no_copies(tmp_path: Path, call: dict[str, Any]) -> None:
    assert passes(tmp_path, **call).fp32_convolutions == ()


def test_a_transposed_convolution_has_its_inputs_first(tmp_path: Path) -> None:
    call = {"shapes": [[2, 3, 10, 10], [3, 4, 3, 3]]}
    found = passes(tmp_path, **call, concrete=[*CONCRETE[:6], "True", "[0, 0]", "1"])
    assert found.fp32_convolutions == (ConvolutionLayout(place=0, inputs=3, outputs=4),)


def of_second_backward(input_elements: int) -> CapturedMemory:
    """A graph that the trace's nodes do not match: backward was differentiated."""
    kept = [["input", 0, input_elements, FLOAT], ["weight", 0, 108, FLOAT]]
    nodes = [
        ["ReluBackward0", 0, [[600, FLOAT]], [[-1, 0]], []],
        ["ConvolutionBackwardBackward0", 0, [[600, FLOAT]], [[0, 0]], kept],
    ]
    return CapturedMemory(device="cuda", graph=graph_of(nodes, [[0, "activation"]]))


def test_without_matching_nodes_sizes_tell_which_call_a_convolution_is(tmp_path: Path) -> None:
    """600 elements of input and 108 of the weight are those of the traced call."""
    found = passes(tmp_path, captured=of_second_backward(600)).fp32_convolutions
    assert found == (ConvolutionLayout(place=1, inputs=3, outputs=4),)
    assert passes(tmp_path, captured=of_second_backward(601)).fp32_convolutions == ()


def said(folder: Path, *, prepared_bytes: int = 0, tf32: bool = False) -> str:
    """What is assumed about twice the batch, whose peak of 10 kB is in the convolution."""
    held = {"activations": 0, "gradients": 0, "other": 2_000}
    captured = CapturedMemory(
        device="cuda",
        graph=GRAPH,
        prepared_bytes=prepared_bytes,
        peak=CapturedPeak(categories=held, phase="backward", allocated_bytes=10_000),
        phases=[CapturedPhase(phase="forward", categories=held, allocated_bytes=10_000)],
    )
    analysis = analysed(folder, captured=captured, tf32=tf32)
    line = BatchLine(moment="peak", fixed_bytes=8_000, scaling_bytes=2_000)
    unknown = dict.fromkeys(
        ("batch", "batch_from", "per_sample_bytes", "limit_bytes", "limit_from", "factor",
         "factor_low", "factor_high", "largest", "low", "high")
    )  # fmt: skip
    memory = Memory(
        source="capture",
        device="cuda",
        peak_bytes=10_000,
        reserved_bytes=None,
        phase="backward",
        measured="",
        categories={},
        largest_batch=LargestBatch(lines=(line,), reserve_bytes=0, **unknown),
    )
    return " ".join(why_unsure(Bench(analysis, memory=memory).context, 2.0))


def test_a_wide_interval_of_the_peak_has_its_reason(tmp_path: Path) -> None:
    assert "2.00 kB of other batches" in said(tmp_path, prepared_bytes=2_000)
    assert "cuDNN" in said(tmp_path)  # with another batch it may transform the tensors
    assert said(tmp_path, tf32=True) == ""
