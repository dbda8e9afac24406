"""What a capture recorded, in the tables of the trace that replays it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stepscope.explain.rank import explain_analysis
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.records.compiled import CapturedGraph, CapturedOperator
from stepscope.records.explanation import RankExplanation
from stepscope.records.rank import RankInputs
from stepscope.records.source_lines import Place
from stepscope.step.cuda_graphs import add_recordings, find_recorded

from .build import Events, graph, kernel, step
from .conftest import Read

GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT"
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar("
THRESHOLD = "void at::native::vectorized_elementwise_kernel<4, at::native::threshold_kernel_impl<"
FUSED = "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float>"
BF16 = "c10::BFloat16"
LINE = Place(file="/home/me/model.py", line=12, function="forward")


def operator(name: str, *shapes: list[int]) -> CapturedOperator:
    return CapturedOperator(
        name=f"aten::{name}",
        shapes=list(shapes),
        dtypes=[BF16] * len(shapes),
        concrete=[""] * len(shapes),
    )


SQUARE = [1024, 1024]
CAPTURE = CapturedGraph(
    operators=(
        replace(operator("mm", SQUARE, SQUARE), place=LINE),
        replace(operator("relu", SQUARE), place=LINE),
        replace(operator("threshold_backward", SQUARE, SQUARE), backward=True, place=LINE),
        replace(operator("mm", SQUARE, SQUARE), backward=True, place=LINE),
        replace(operator("_fused_adam_", SQUARE), optimizer=True),
    )
)
KERNELS = (GEMM, RELU, THRESHOLD, GEMM, FUSED)


def whole_steps() -> list[Events]:
    """Three steps that each replay the graph: kernels of 10 µs."""
    events = [step(n, start=100.0 * n, dur=100) for n in range(3)]
    for n in range(3):
        at = 100.0 * n
        kernels = [kernel(one, start=at + 5 + 12 * k, dur=10) for k, one in enumerate(KERNELS)]
        events.append(graph(kernels, launched_at=at + 1))
    return events


@pytest.fixture
def explained(read: Read) -> RankExplanation:
    trace = read(*whole_steps(), device="NVIDIA H200")
    return explain_analysis(RankAnalysis(RankInputs(trace=trace, captures=(CAPTURE,))))


def test_operators_have_the_time_and_the_calls_of_their_replays(
    explained: RankExplanation,
) -> None:
    rows = {one.name: (one.calls, one.device_self_ns) for one in explained.operators}
    assert rows == {
        "aten::mm": (6, 60_000),
        "aten::relu": (3, 30_000),
        "aten::threshold_backward": (3, 30_000),
        "aten::_fused_adam_": (3, 30_000),
    }


def test_the_roofline_knows_phases_and_amounts(explained: RankExplanation) -> None:
    assert explained.efficiency is not None
    spots = {(one.operator, one.phase): one for one in explained.efficiency.spots}
    assert {phase for _, phase in spots} == {"forward", "backward", "optimizer"}
    assert spots["aten::mm", "backward"].flops == 2 * 1024**3
    assert spots["aten::relu", "forward"].bytes_moved == 2 * 2 * 1024**2
    assert explained.efficiency.model_flops == 2 * 2 * 1024**3
    assert explained.efficiency.unknown_share == 0


def test_lines_have_the_device_time_of_both_passes(explained: RankExplanation) -> None:
    (line,) = explained.lines
    assert (line.file, line.line, line.function) == (LINE.file, LINE.line, LINE.function)
    assert line.device_ns == 120_000


def test_the_step_is_what_it_is_without_a_recording(read: Read, explained: RankExplanation) -> None:
    trace = read(*whole_steps(), device="NVIDIA H200")
    bare = explain_analysis(RankAnalysis(RankInputs(trace=trace)))
    assert bare.timeline == explained.timeline
    assert bare.budget == explained.budget
    assert bare.step_ms == explained.step_ms


def test_rows_of_a_recording_lie_before_the_trace(read: Read) -> None:
    trace = read(*whole_steps(), device="NVIDIA H200")
    extended, (recording,) = add_recordings(trace, (CAPTURE, CAPTURE))
    recorded = find_recorded(extended)
    assert not find_recorded(trace).any()
    assert recorded.sum() == len(CAPTURE.operators) + 1 + 1  # the line and the optimizer's mark
    assert extended.host.start_ns[recorded].max() < trace.host.start_ns.min()
    assert not extended.host.dur_ns[recorded].any()
    names = [extended.strings[code] for code in extended.host.name[recording.rows]]
    assert names == [one.name for one in CAPTURE.operators]
