"""Kernels of a replay and operators of its recording, joined by kind and order."""

from __future__ import annotations

from stepscope.explain.flops.call import read_name
from stepscope.explain.flops.kernel_order import CapturedCall, join_by_order

GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>"
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>"
NORM_GRAD = "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<"
NORM_WEIGHT = "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float"
MEMSET = "Memset (Device)"
SPLIT = "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float"
DIV = "void at::native::elementwise_kernel<128, 2, at::native::binary_internal::DivFunctor<float>"
UNKNOWN = "some_library_kernel"


def lists(functor: str) -> str:
    return f"void at::native::multi_tensor_apply_kernel<at::native::{functor}<float>, float>"


def joined(operators: str, *kernels: str) -> list[int]:
    names = [f"aten::{word}" for word in operators.split()]
    calls = [CapturedCall(name, int(name in ("aten::mm", "aten::addmm"))) for name in names]
    return join_by_order(calls, kernels, [name == GEMM for name in kernels])


def test_products_are_anchors_and_the_rest_follows_by_kind() -> None:
    operators = "native_layer_norm t mm add _to_copy mm add"
    assert joined(operators, NORM, GEMM, ADD, COPY, GEMM, ADD) == [0, 2, 3, 4, 5, 6]


def test_another_number_of_products_joins_nothing() -> None:
    assert joined("mm add mm", GEMM, ADD) == [-1, -1]


def test_one_operator_may_launch_several_kernels() -> None:
    operators = "mm native_layer_norm_backward add"
    assert joined(operators, GEMM, NORM_GRAD, NORM_WEIGHT, ADD) == [0, 1, 1, 2]


def test_kernels_between_two_of_one_operator_are_its_own() -> None:
    operators = "mm native_layer_norm_backward"
    assert joined(operators, GEMM, NORM_GRAD, UNKNOWN, NORM_WEIGHT) == [0, 1, 1, 1]


def test_workspaces_and_reductions_belong_to_their_product() -> None:
    assert joined("mm add mm", GEMM, SPLIT, ADD, MEMSET, GEMM) == [0, 0, 1, 2, 2]


def test_what_is_not_sure_stays_unknown() -> None:
    """Three copies of two operators, and a kernel of an unknown kind."""
    found = joined("mm _to_copy _to_copy add", GEMM, COPY, COPY, COPY, ADD, UNKNOWN)
    assert found == [0, -1, -1, -1, 3, -1]


def test_what_is_known_bounds_what_is_not() -> None:
    found = joined("mm _to_copy add _to_copy", GEMM, COPY, COPY, ADD, COPY, UNKNOWN)
    assert found == [0, 1, 1, 2, 3, -1]
    assert joined("mm _to_copy add _to_copy", GEMM, COPY, COPY, COPY, ADD) == [0, 1, 1, 1, 2]


def test_a_fill_may_be_another_operators_first_kernel() -> None:
    nll = "void at::native::nll_loss_backward_reduce_cuda_kernel_2d<float, long>"
    assert joined("mm fill_ nll_loss_backward", GEMM, FILL, FILL, nll) == [0, 1, 2, 2]


def test_lists_of_an_optimizer_are_told_apart_by_their_stretches() -> None:
    """As torch's capturable Adam: the same list operator comes several times, two in a row."""
    operators = (
        "mm _foreach_mul_ _foreach_lerp_ _foreach_mul_ _foreach_pow _foreach_pow _foreach_div_ "
        "_foreach_add_ _foreach_div_ _foreach_addcdiv_"
    )
    mul, lerp = lists("BinaryOpScalarFunctor, std::multiplies"), lists("LerpFunctor")
    power, plus = lists("reverse_power_functor"), lists("BinaryOpScalarFunctor, std::plus")
    addcdiv = lists("PointwiseOpScalarFunctor<3>, std::divides")
    kernels = [GEMM, mul, mul, lerp, lerp, mul, mul, *[power] * 4, *[DIV] * 3, plus, *[DIV] * 3]
    found = joined(operators, *kernels, addcdiv)
    assert found == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 7, 8, 8, 8, 9]


CONVOLUTION = (
    "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_execute_kernel__5x_cudnn"
)
INPUT_GRADIENT = "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>("
WEIGHT_GRADIENT = "void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>("
TO_FREQUENCY = "void fft2d_r2c_32x32<float, false, 0u, false>("
FROM_FREQUENCY = "void fft2d_c2r_32x32<float, false, false, 0u, false, false>("
IN_FREQUENCY = "sm80_xmma_gemm_cf32cf32_f32f32_cf32_nt_n_tilesize64x32x8_execute_kernel__5x_cublas"
SUM = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::sum_functor<"
BATCH_NORM = "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>("
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>("


def joined_calls(calls: list[CapturedCall], *kernels: str) -> list[int]:
    return join_by_order(calls, kernels, [read_name(name).multiplies for name in kernels])


def convolution(bias: str = "") -> CapturedCall:
    return CapturedCall("aten::convolution", 1, bias)


def test_a_product_in_parts_keeps_all_its_kernels() -> None:
    """A convolution in two parts, between transforms; the next one lies after a norm."""
    norm = CapturedCall("aten::cudnn_batch_norm")
    part = (TO_FREQUENCY, IN_FREQUENCY, FROM_FREQUENCY)
    kernels = (*part, *part, BATCH_NORM, CONVOLUTION)
    assert joined_calls([convolution(), norm, convolution()], *kernels) == [*[0] * 6, 1, 2]


def test_gradients_of_a_convolution_are_told_by_their_kernels_names() -> None:
    """Two kernels for the input and one for the weight belong to the first, as many to the next."""
    backward = CapturedCall("aten::convolution_backward", 2)
    kernels = (INPUT_GRADIENT, INPUT_GRADIENT, WEIGHT_GRADIENT) * 2
    assert joined_calls([backward, backward], *kernels) == [0, 0, 0, 1, 1, 1]


def test_a_bias_has_a_kernel_of_its_own() -> None:
    add = CapturedCall("aten::add")
    calls = [convolution("add"), add, CapturedCall("aten::convolution_backward", 1, "sum")]
    kernels = (CONVOLUTION, ADD, ADD, WEIGHT_GRADIENT, SUM)
    assert joined_calls(calls, *kernels) == [0, 0, 1, 2, 2]


def test_a_kernel_of_attention_is_no_convolution() -> None:
    calls = [
        convolution(),
        CapturedCall("aten::_scaled_dot_product_flash_attention", 1),
        CapturedCall("aten::mm", 1),
    ]
    assert joined_calls(calls, CONVOLUTION, CONVOLUTION, FLASH, GEMM) == [0, 0, 1, 2]


def test_a_product_without_a_kernel_joins_nothing() -> None:
    """Its FLOPs would be lost without a word."""
    attention = CapturedCall("aten::_scaled_dot_product_flash_attention", 1)
    calls = [convolution(), attention]
    assert joined_calls(calls, CONVOLUTION, CONVOLUTION, CONVOLUTION) == [-1, -1, -1]
