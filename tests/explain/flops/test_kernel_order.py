"""Kernels joined to operators by their order, and what their names say."""

from __future__ import annotations

import pytest

from stepscope.explain.flops.call import read_name
from stepscope.explain.flops.kernel_order import CapturedCall, join_by_order

# Kernels of a replay and operators of its recording, joined by kind and order.

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


# What kernels' names say, on names that real GPUs have written.

PRODUCTS = [
    ("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT", "bf16", "tensor"),
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_TNT", "fp16", "tensor"),
    ("sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize256x128x32_warpgroup", "tf32", "tensor"),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x64x8_stage3_ffma", "fp32", "plain"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "bf16", "tensor"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>", "fp32", "plain"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn>", "tf32", "tensor"),
    ("cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2", "bf16", "tensor"),
    ("cutlass_tensorop_s1688dgrad_optimized_tf32_64x128_32x3_nhwc_align4", "tf32", "tensor"),
    ("ampere_sgemm_128x64_nn", "fp32", "plain"),
    ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", "fp16", "tensor"),
    ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "fp16", "tensor"),
    ("volta_sgemm_128x64_nn", "fp32", "plain"),
    ("volta_dgemm_64x64_nn", "fp64", "plain"),
    ("void gemv2T_kernel_val<int, int, float, float, float, float, 128>", "fp32", "plain"),
    ("cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1", "fp32", "plain"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "fp16", "tensor"),
    ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Att", "fp32", "tensor"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128", None, "tensor"),
    ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT16x16x256_MI16x16x1", "bf16", "tensor"),
    ("Cijk_Ailk_Bljk_HHS_BH_MT64x64x64_MI16x16x16x1_SN", "fp16", "tensor"),
    ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8", "bf16", "tensor"),
    ("_ZN2ck16tensor_operation6device39kernel_grouped_conv_fwd_xdl_cshuffle", None, "tensor"),
    ("attn_fwd", None, "tensor"),
    ("triton_tem_fused_addmm_3", None, "unknown"),
    ("void cutlass::device_kernel<enable_sm90_gemm_e4m3_e4m3_f32_tensorop>", "fp8", "tensor"),
]
HARMLESS = [
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float>>",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<3>>",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float>",
    "void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<xmma__5x_cudnn::"
    "implicit_gemm::wgrad_indexed::Warp_specialized_params<xmma__5x_cudnn::Grid_constant_params> >",
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>",
    "batched_transpose_32x32_half",
    "triton_poi_fused_gelu_3",
    "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>",
    "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel",
]
SILENT = ["my_kernel", "_fwd_kernel_0d1d2d", "void fbgemm_gpu::_compute_FP8_quantize_cuda_kernel"]


@pytest.mark.parametrize(("name", "dtype", "cores"), PRODUCTS)
def test_products_say_their_dtype_and_cores(name: str, dtype: str | None, cores: str) -> None:
    told = read_name(name)
    assert told.product
    assert not told.harmless
    assert (told.dtype, told.cores) == (dtype, cores)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_surely_multiplies_nothing_is_harmless(name: str) -> None:
    told = read_name(name)
    assert told.harmless
    assert not told.product


@pytest.mark.parametrize("name", SILENT)
def test_a_name_that_says_nothing_is_neither(name: str) -> None:
    told = read_name(name)
    assert not told.harmless
    assert not told.product
