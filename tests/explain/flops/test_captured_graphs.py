"""Replays of CUDA graphs, joined to the operators that capture noted when they were captured."""

from __future__ import annotations

import pytest

from stepscope.explain.efficiency import measure_efficiency
from stepscope.explain.flops.captured_graphs import price_capture
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.records.compiled import CapturedGraph, CapturedOperator
from stepscope.records.explanation import StepTime
from stepscope.records.hardware import Efficiency
from stepscope.records.rank import RankInputs

from ..build import Events, graph, kernel, op, step
from ..conftest import Read

GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT"
OTHER_GEMM = "nvjet_sm90_tst_96x64_64x8_2x4_h_bz_NTN"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>"
TRITON = "triton_tem_fused_mm_0"
BF16 = "c10::BFloat16"


def product(size: int, name: str = "aten::mm") -> CapturedOperator:
    shapes = [[size, size], [size, size]]
    return CapturedOperator(name=name, shapes=shapes, dtypes=[BF16] * 2, concrete=["", ""])


def capture(*sizes: int) -> CapturedGraph:
    add = CapturedOperator(name="aten::add", shapes=[[8]], dtypes=[BF16], concrete=[""])
    return CapturedGraph(operators=(*(product(size) for size in sizes), add))


def replay(at: float, *names: str) -> Events:
    """Kernels of 10 µs each."""
    kernels = [kernel(name, start=at + 5 + 12 * n, dur=10) for n, name in enumerate(names)]
    return graph(kernels, launched_at=at + 1)


def analysed(read: Read, captures: tuple[CapturedGraph, ...], *events: Events) -> RankAnalysis:
    trace = read(*events, device="NVIDIA H200")
    return RankAnalysis(RankInputs(trace=trace, captures=captures))


def efficiency(analysis: RankAnalysis) -> Efficiency:
    found = measure_efficiency(analysis, StepTime(profiled=0.1))
    assert found is not None
    return found


def whole_steps(*names: str) -> list[Events]:
    """Three steps that each replay one graph."""
    events = [step(n, start=100.0 * n, dur=100) for n in range(3)]
    return [*events, *(replay(100.0 * n, *names) for n in range(3))]


def test_a_whole_step_has_the_flops_of_its_capture(read: Read) -> None:
    analysis = analysed(read, (capture(1024, 512),), *whole_steps(GEMM, ADD, OTHER_GEMM))
    found = efficiency(analysis)
    assert found.model_flops == 2 * 1024**3 + 2 * 512**3
    assert found.unknown_share == 0
    assert found.mfu == pytest.approx(found.model_flops / 989.5e12 / 100e-6)
    assert [use.dtype for use in found.by_dtype] == ["bf16"]
    assert found.by_dtype[0].device_ns == 20_000


def test_kernels_share_the_flops_in_the_order_of_the_capture(read: Read) -> None:
    costs = analysed(read, (capture(1024, 512),), *whole_steps(GEMM, ADD, OTHER_GEMM)).costs
    flops = costs.flops[costs.operator] * costs.call_part
    assert flops[:3] == pytest.approx([2 * 1024**3, 0, 2 * 512**3])


def test_a_product_that_takes_two_kernels_shares_its_flops_among_them(read: Read) -> None:
    captures = (capture(1024, 512),)
    found = analysed(read, captures, *whole_steps(GEMM, GEMM, OTHER_GEMM))
    assert found.costs.call_part[:3] == pytest.approx([0.5, 0.5, 1])
    assert efficiency(found).model_flops == 2 * 1024**3 + 2 * 512**3


FFT, BACK = "void fft2d_r2c_32x32<float, false, 1u, false>(", "void fft2d_c2r_32x32<float, false>("
COMPLEX = (
    "sm80_xmma_gemm_cf32cf32_f32f32_cf32_tn_n_tilesize64x64x8_stage3_ffma_execute_kernel__5x_cublas"
)
NORM = "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>("
DIRECT = (
    "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_ffma_execute_kernel__5x_cudnn"
)


def convolution(channels: int) -> CapturedOperator:
    """One point, so that its FLOPs are twice those of its weight's elements."""
    return CapturedOperator(
        name="aten::convolution",
        shapes=[[1, channels, 1, 1], [channels, channels, 1, 1], []],
        dtypes=["float", "float", ""],
        concrete=["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"],
    )


def test_convolutions_by_fft_are_one_product_each_with_their_transforms(read: Read) -> None:
    """The second takes two parts: nine kernels with names of products are three products."""
    norm = CapturedOperator(
        name="aten::cudnn_batch_norm", shapes=[[8]], dtypes=["float"], concrete=[""]
    )
    operators = (convolution(64), norm, convolution(32), norm, convolution(16))
    parts = (FFT, COMPLEX, BACK, FFT, COMPLEX, BACK)
    names = (FFT, COMPLEX, BACK, NORM, *parts, NORM, DIRECT)
    events: list[Events] = [step(n, start=200.0 * n, dur=200) for n in range(3)]
    events += [replay(200.0 * n, *names) for n in range(3)]
    analysis = analysed(read, (CapturedGraph(operators=operators),), *events)
    found = efficiency(analysis)
    assert found.model_flops == 2 * (64**2 + 32**2 + 16**2)
    assert found.unknown_share == 0
    assert [use.dtype for use in found.by_dtype] == ["fp32"]
    costs = analysis.costs
    flops = costs.flops[costs.operator] * costs.call_part
    by_kernel = [0, 2 * 64**2, 0, 0, *(0, 32**2, 0) * 2, 0, 2 * 16**2]
    assert flops[: len(names)] == pytest.approx(by_kernel)


def test_a_graph_whose_convolutions_all_take_several_parts_is_its_capture(read: Read) -> None:
    """Six kernels that multiply for two products, nothing between them that tells which."""
    capture = CapturedGraph(operators=(convolution(64), convolution(32)))
    found = efficiency(analysed(read, (capture,), *whole_steps(FFT, *[COMPLEX] * 6, BACK)))
    assert found.model_flops == 2 * (64**2 + 32**2)


def test_what_another_packages_operator_multiplies_stays_unknown(read: Read) -> None:
    """The products around it have their FLOPs; its kernel is not taken for a part of one."""
    other = CapturedOperator(name="mine::mlp", shapes=[[8, 8]], dtypes=[BF16], concrete=[""])
    capture = CapturedGraph(operators=(product(64), product(64), other, product(64)))
    found = efficiency(analysed(read, (capture,), *whole_steps(GEMM, GEMM, OTHER_GEMM, GEMM)))
    assert found.model_flops == 3 * 2 * 64**3
    assert found.unknown_share == pytest.approx(1 / 4)


def test_fewer_kernels_than_products_share_the_flops_by_their_time(read: Read) -> None:
    captures = (capture(1024, 512, 512, 512),)
    found = analysed(read, captures, *whole_steps(GEMM, OTHER_GEMM, OTHER_GEMM))
    assert found.costs.call_part[:3] == pytest.approx([1 / 3] * 3)
    assert efficiency(found).model_flops == 2 * 1024**3 + 6 * 512**3


def test_layers_captured_one_by_one_are_told_apart_by_their_order(read: Read) -> None:
    """Two alike, one other: forward and backward of each, the backward in reverse order."""
    forward = [capture(1024), capture(1024), capture(512)]
    backward = [capture(512, 512), capture(1024, 1024), capture(1024, 1024)]
    events: list[Events] = []
    for n in range(3):
        at = 400.0 * n
        events.append(step(n, start=at, dur=400))
        for number, names in enumerate(
            ((GEMM,), (GEMM,), (OTHER_GEMM,), (OTHER_GEMM,) * 2, (GEMM,) * 2, (GEMM,) * 2)
        ):
            events.append(replay(at + 60 * number, *names))
    found = efficiency(analysed(read, (*forward, *backward), *events))
    assert found.model_flops == 6 * 2 * 1024**3 + 3 * 2 * 512**3


def test_a_backward_with_more_kernels_is_told_by_the_forward_before_it(read: Read) -> None:
    """The forward is joined kernel by kernel; alone, six kernels would not be five products."""
    forward, backward = capture(1024), capture(*[512] * 5)
    events: list[Events] = [step(n, start=200.0 * n, dur=200) for n in range(3)]
    for n in range(3):
        events += [replay(200.0 * n, GEMM), replay(200.0 * n + 50, *[OTHER_GEMM] * 6)]
    found = efficiency(analysed(read, (forward, backward), *events))
    assert found.model_flops == 2 * 1024**3 + 5 * 2 * 512**3
    assert found.unknown_share == 0


def test_a_window_may_begin_with_the_backward(read: Read) -> None:
    """Six kernels for five products are too many for the number alone to tell, the order is not."""
    forward, backward = capture(1024), capture(*[512] * 5)
    events: list[Events] = [step(n, start=200.0 * n, dur=200) for n in range(3)]
    for n in range(3):
        events += [replay(200.0 * n, *[OTHER_GEMM] * 6), replay(200.0 * n + 100, GEMM)]
    found = efficiency(analysed(read, (forward, backward), *events))
    assert found.model_flops == 2 * 1024**3 + 5 * 2 * 512**3
    assert found.unknown_share == 0


def test_a_kernel_that_names_fp32_is_no_product_in_half_precision(read: Read) -> None:
    """The capture's operators cannot be joined one by one: its launch stands for all of them."""
    plain = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>"
    in_fp32 = CapturedOperator(
        name="aten::mm", shapes=[[64, 64]] * 2, dtypes=["float"] * 2, concrete=["", ""]
    )
    both = CapturedGraph(operators=(product(1024), in_fp32))
    found = efficiency(analysed(read, (both,), *whole_steps(GEMM, GEMM, plain)))
    uses = {use.dtype: use for use in found.by_dtype}
    assert uses["bf16"].device_ns == uses["bf16"].tensor_core_ns == 20_000
    assert (uses["fp32"].device_ns, uses["fp32"].tensor_core_ns) == (10_000, 0)
    assert (uses["bf16"].flops, uses["fp32"].flops) == (2 * 1024**3, 2 * 64**3)


def test_a_capture_that_is_not_replayed_leaves_the_others_joined(read: Read) -> None:
    captures = (capture(1024, 1024, 1024), capture(512))
    assert efficiency(analysed(read, captures, *whole_steps(GEMM))).model_flops == 2 * 512**3


def test_replays_that_could_be_several_captures_stay_unknown(read: Read) -> None:
    found = efficiency(analysed(read, (capture(1024), capture(512)), *whole_steps(GEMM)))
    assert found.unknown_share == 1
    assert not found.model_flops


def test_what_the_compiler_multiplies_itself_stays_unknown(read: Read) -> None:
    found = efficiency(analysed(read, (capture(1024),), *whole_steps(GEMM, TRITON)))
    assert found.model_flops == 2 * 1024**3
    assert found.unknown_share == pytest.approx(0.5)


def test_products_joined_to_a_capture_are_not_joined_to_likes_too(read: Read) -> None:
    eager = op("aten::add", start=-50, dur=10, shapes=[[8]], dtypes=[BF16])
    eager += kernel(ADD, start=-40, dur=5, launched_at=-45)
    found = efficiency(analysed(read, (capture(1024),), eager, *whole_steps(GEMM, ADD)))
    assert found.model_flops == 2 * 1024**3


def test_a_capture_with_unknown_shapes_is_not_priced() -> None:
    lost = CapturedOperator(name="aten::mm", shapes=[[], []], dtypes=["", ""], concrete=["", ""])
    assert price_capture((product(8), lost)) is None


def test_gradients_of_a_convolution_are_two_kernels() -> None:
    image, weight = [2, 8, 16, 16], [8, 8, 3, 3]
    backward = CapturedOperator(
        name="aten::convolution_backward",
        shapes=[image, image, weight, [], [], [], [], [], [], [], []],
        dtypes=["float"] * 3 + ["ScalarList"] * 8,
        concrete=[
            "",
            "",
            "",
            "[8]",
            *["[1, 1]"] * 3,
            "False",
            "[0, 0]",
            "1",
            "[True, True, False]",
        ],
    )
    cost = price_capture((backward,))
    assert cost is not None
    assert len(cost.products) == 2
    assert cost.flops == 2 * 2 * 2 * 16 * 16 * 8 * 8 * 9
