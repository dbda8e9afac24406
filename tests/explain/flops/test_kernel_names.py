"""What kernels' names say, on names that real GPUs have written."""

from __future__ import annotations

import pytest

from stepscope.explain.flops.call import read_name

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
