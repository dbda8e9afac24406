"""What the name of a kernel says: whether it multiplies matrices, in what dtype, on which cores.

Names come from cuBLAS (nvjet, xmma, cutlass, ampere_sgemm), cuDNN, PyTorch's attention, Triton, and
on AMD from hipBLASLt (Cijk), Composable Kernel (xdl) and MIOpen (igemm). Nothing is guessed from
other names.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import msgspec

from stepscope.explain.flops.compiled import PREFIX, may_multiply
from stepscope.explain.work import one_of

Cores = Literal["tensor", "plain", "unknown"]

_LONGEST = 400  # the beginning says it all; template arguments take thousands of characters

_GEMM_LIBRARY = "fbgemm"  # it has kernels that multiply nothing
_PRODUCT = one_of(
    "gemm gemv nvjet cutlass xmma wgrad dgrad fprop bprop sdpa fmha flash attn attention conv "
    "cijk_ xdl winograd matmul _mm_ dot_kernel fft2d scudnn grouped_mm mult_and_sum_complex"
)
# Convolutions by FFT or Winograd's algorithm: what comes before and after their product.
_TRANSFORM = re.compile(
    r"fft[12]d_[rc]2[rc]|[wW]inograd(?:Forward|Wgrad|Dgrad|Bprop)?(?:Data|Delta|Filter|Output)|"
    r"generateWinogradTiles"
)
# Parts of a product that are not the product itself.
_HELPER = re.compile(
    r"splitK_?reduce|nchwToNhwc|nhwcToNchw|computeOffsets|transpose|SubTensorOp|epilogue::|"
    r"convert_dq|dot_do_o|postprocess|im2col|col2im|cudnn::ops|convertTensor|tensorTransform|"
    r"CastTensor|reduce_1Block|combine_kernel|reduce_wgrad|scal_kernel|init_device_workspace"
)
# PyTorch's and its libraries' kernels that surely multiply no matrices.
_HARMLESS = one_of(
    "at::native:: at::cuda:: at_cuda_detail:: cub:: thrust:: elementwise multi_tensor_apply "
    "reduce_kernel softmax layernorm layer_norm batchnorm batch_norm rmsnorm rms_norm embedding "
    "permute_ rotary radixsort radix_sort ::bn_bw ::bn_fw __amd_rocclr_copy __amd_rocclr_fill"
)
_COPY = ("memcpy", "memset")  # beginnings of names
_NATIVE_PRODUCT = one_of("conv_depthwise gemm flash attention fmha")

# The first match counts. hipBLASLt's letters: input, output and accumulator type.
_DTYPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("fp8", re.compile(r"e4m3|e5m2|fp8|_F8|_f8|nvjet_(?:sm\d+_)?[qr]{2}")),
    ("int8", re.compile(r"imma_|i16832|i8816|int8|_s8_|i8i8|Bljk_I8|_I8")),
    ("bf16", re.compile(r"bf16|BFloat16|bfloat16|Cijk_\w+?_B_?B?S_|nvjet_(?:sm\d+_)?t")),
    ("tf32", re.compile(r"tf32|tensorop_s1688(?:gemm|fprop|dgrad|wgrad)|_XF32|_x1_.*xf32")),
    (
        "fp16",
        re.compile(r"fp16|f16|half|[hs]884|h1688|h16816|Cijk_\w+?_H_?H?S_|nvjet_(?:sm\d+_)?h"),
    ),
    ("fp64", re.compile(r"dgemm|d884|f64|double|Cijk_\w+?_D_?B")),
    ("fp32", re.compile(r"sgemm|f32|float|scudnn|Cijk_\w+?_S_?B|gcgemm|nvjet_(?:sm\d+_)?s")),
)
_TENSOR = re.compile(
    r"tensorop|TensorOp|nvjet|hmma|imma|wgmma|gmma|tf32|[sh]1688|[sh]16816|s161616|[sh]884|d884|i16832|i8816|"
    r"tensor\d+x\d+x\d+|sm\d+_xmma|flash|mfma|xdl|_MI\d+x\d+|gtcx|attn_fwd|attn_bwd|"
    r"fmha_cutlass[FB]_\w+?_sm(?:[789]\d|1\d\d)|sdpa_sm"
)
_PLAIN = one_of(
    "simt ffma sgemm dgemm hgemm scudnn gemv gemmsn gemmk1 dot_kernel gcgemm fft2d winograd "
    "naive_conv conv_depthwise sp3asmconv mult_and_sum_complex"
)


class KernelName(msgspec.Struct, frozen=True):
    product: bool  # it multiplies matrices or convolves
    harmless: bool  # it surely does not
    dtype: str | None
    cores: Cores
    transforms: bool = False  # of a product: it only transforms what is multiplied, or the result

    @property
    def multiplies(self) -> bool:
        """Where one product takes several kernels: the one that is the product."""
        return self.product and not self.transforms


@lru_cache(maxsize=4096)
def read_name(name: str) -> KernelName:
    name = name[:_LONGEST].replace(_GEMM_LIBRARY, "")
    if name.startswith(PREFIX):
        product = may_multiply(name)
        return KernelName(product=product, harmless=not product, dtype=None, cores="unknown")
    harmless = _is_harmless(name)
    product = not harmless and _PRODUCT(name)
    return KernelName(
        product=product,
        harmless=harmless,
        dtype=_dtype(name) if product else None,
        cores=_cores(name) if product else "unknown",
        transforms=product and bool(_TRANSFORM.search(name)),
    )


def is_plain_fp32(name: KernelName) -> bool:
    """No product in half precision runs in such a kernel."""
    return name.product and name.cores == "plain" and name.dtype == "fp32"


def _is_harmless(name: str) -> bool:
    if _NATIVE_PRODUCT(name.partition("at::native::")[2]):
        return False
    return _HARMLESS(name) or name.lower().startswith(_COPY) or bool(_HELPER.search(name))


def _dtype(name: str) -> str | None:
    for dtype, pattern in _DTYPES:
        if pattern.search(name):
            return dtype
    return None


def _cores(name: str) -> Cores:
    if _PLAIN(name):
        return "plain"
    return "tensor" if _TENSOR.search(name) else "unknown"
