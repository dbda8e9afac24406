"""One distinct call of an operator, or one kernel, as the trace describes it: shapes,
dtypes, values, what its name says, and what it costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, Literal

import msgspec

from stepscope.records.dtypes import BY_NUMBER, BY_PROFILER_NAME, PEAKS, PROFILER_BYTES
from stepscope.step.work import one_of
from stepscope.text.words import lazy_pattern

_NOT_TENSORS = frozenset({"", "Scalar", "ScalarList", "TensorList", "GenericList", "Device"})
_WHOLE = frozenset({int})
_INTEGER = re.compile(r"-?\d+")
_MOST_DIGITS = 18

Dims = tuple[int, ...]


class Tensor(msgspec.Struct, frozen=True):
    dims: Dims
    dtype: str  # as the profiler writes it

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def item_bytes(self) -> int:
        """Raises KeyError for an unknown dtype: its bytes are unknown then."""
        return PROFILER_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.elements * self.item_bytes


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size_bytes for tensor in tensors)


class Unknown(Exception):  # noqa: N818 - an answer, not a failure
    """The trace does not say what a formula needs."""


class Call:
    """Arguments by place. A missing one raises Unknown."""

    __slots__ = ("_concrete", "_dtypes", "_shapes", "name")

    def __init__(self, name: str, shapes: Any, dtypes: Any, concrete: Any) -> None:
        self.name = name
        self._shapes = shapes if isinstance(shapes, list) else []
        self._dtypes = dtypes if isinstance(dtypes, list) else []
        self._concrete = concrete if isinstance(concrete, list) else []

    def __len__(self) -> int:
        return len(self._shapes)

    def has_tensor(self, place: int) -> bool:
        return place < len(self._dtypes) and self._dtypes[place] not in _NOT_TENSORS

    def tensor(self, place: int) -> Tensor:
        """The tensor at a place; a file without dtypes still has its shape."""
        if place >= len(self._shapes):
            raise Unknown
        dims = self._shapes[place]
        if not _WHOLE.issuperset(map(type, dims)):
            raise Unknown
        if self.has_tensor(place):
            return Tensor(tuple(dims), self._dtypes[place])
        if self._dtypes or not dims:
            raise Unknown
        return Tensor(tuple(dims), "")

    def tensors(self) -> list[Tensor]:
        """All single tensors, in order."""
        return [self.tensor(place) for place in range(len(self)) if self.has_tensor(place)]

    def lists(self) -> list[list[Dims] | None]:
        """Every list of tensors as their shapes; None if it was too long to be recorded."""
        return [
            self.tensor_list(place)
            for place in range(len(self))
            if place < len(self._dtypes) and self._dtypes[place] == "TensorList"
        ]

    def tensor_list(self, place: int) -> list[Dims] | None:
        shapes = self._shapes[place] if place < len(self._shapes) else None
        if not shapes or not all(isinstance(dims, list) for dims in shapes):
            return None
        return [tuple(dims) for dims in shapes]

    def has_value(self, place: int) -> bool:
        """Whether a plain value was recorded at this place."""
        return place < len(self._concrete) and self._concrete[place] not in ("", None)

    def text(self, place: int) -> str:
        if not self.has_value(place):
            raise Unknown
        return str(self._concrete[place])

    def number(self, place: int) -> int:
        match = _INTEGER.fullmatch(self.text(place))
        if not match:
            raise Unknown
        return _whole(match[0])

    def numbers(self, place: int) -> list[int]:
        """A list of whole numbers; one number is a list of one."""
        return [_whole(digits) for digits in _INTEGER.findall(self.text(place))]

    def flag(self, place: int) -> bool:
        return self.text(place) == "True"

    def flags(self, place: int) -> list[bool]:
        return [word == "True" for word in re.findall(r"True|False", self.text(place))]

    def dtype_bytes(self, place: int) -> int:
        """Bytes of an element of the dtype that a plain value names."""
        if (code := self.number(place)) not in BY_NUMBER:
            raise Unknown
        return BY_NUMBER[code].item_bytes


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise Unknown
    return int(digits)


# What one call costs, and the table of formulas by operator.

UNKNOWN = -1


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one call. -1 is unknown."""

    flops: int = 0  # everything the device does, as torch's own counter counts
    again: int = 0  # the part that recomputes results of the forward pass
    moved: int = UNKNOWN  # bytes: every input read once, every output written once
    list_elements: int = 0  # read and written in lists of tensors, of unrecorded dtype
    list_passes: int = 0  # whole lists read or written that were too long to be recorded


Formula = Callable[[Call], Cost]

# Operators that multiply matrices in some way. Of nested ones, the innermost counts.
MATMUL_LIKE: dict[str, Formula] = {}
# All others with known bytes; their FLOPs are not counted, as in every other counter.
OTHER: dict[str, Formula] = {}


def _register_in(table: dict[str, Formula], *names: str) -> Callable[[Formula], Formula]:
    def register(formula: Formula) -> Formula:
        table.update(dict.fromkeys(names, formula))
        return formula

    return register


matmul_like = partial(_register_in, MATMUL_LIKE)
memory_bound = partial(_register_in, OTHER)


FP32, TF32, _INT64 = map(PEAKS.index, ("fp32", "tf32", "int64"))
_CODES_BY_PROFILER_NAME = {
    name: PEAKS.index(dtype.peak) for name, dtype in BY_PROFILER_NAME.items() if dtype.peak
}


def dtype_code(dtypes: Any) -> int:
    """The dtype of a call's first tensor, from the names the profiler writes; -1 if unknown.

    Indices come before data in some operators, so a floating-point tensor is preferred.
    """
    if not isinstance(dtypes, list):
        return -1
    known = [
        _CODES_BY_PROFILER_NAME[dtype]
        for dtype in dtypes
        if isinstance(dtype, str) and dtype in _CODES_BY_PROFILER_NAME
    ]
    floating = [code for code in known if code < _INT64]
    return (floating or known or [-1])[0]


# Kernels that torch.compile writes. Their names say what was fused, their calls what they touch.
#
# `triton_poi`, `triton_red` and `triton_per` are loops over elements and reductions. They multiply
# no matrices, except when a product small enough to become a sum was fused in; the name then says
# so. `triton_tem` is a template for products or attention: no trace records how much it computes.

PREFIX = "triton_"
_LOOP = lazy_pattern(r"triton_(?:poi|red|per|for|mix|split_scan)_")
_PRODUCT_IN_LOOP = lazy_pattern(
    r"_(?:mm|bmm|addmm|baddbmm|mv|addmv|dot|vdot|matmul|linear|einsum|convolution|attention|"
    r"scaled_dot_product\w*|flex_attention\w*)(?=_)"
)
# They read a few rows of a table whose whole shape is recorded.
_LOOKUP = lazy_pattern(r"_(?:embedding|index|index_select|gather|scatter|index_put)(?=_)")


def compiled(call: Call) -> Cost:
    """Every tensor is read or written once; no trace records which."""
    if not _LOOP.match(call.name) or _PRODUCT_IN_LOOP.search(call.name):
        return Cost(flops=UNKNOWN)
    if _LOOKUP.search(call.name):
        return Cost()
    tensors = call.tensors()
    if not tensors:
        raise Unknown
    return Cost(moved=total_bytes(tensors))


# What the name of a kernel says: whether it multiplies matrices, in what dtype, on which cores.
#
# Names come from cuBLAS (nvjet, xmma, cutlass, ampere_sgemm), cuDNN, PyTorch's attention, Triton,
# and on AMD from hipBLASLt (Cijk), Composable Kernel (xdl) and MIOpen (igemm). Nothing is guessed
# from other names.

Cores = Literal["tensor", "plain", "unknown"]

_LONGEST = 400  # the beginning says it all; template arguments take thousands of characters

_GEMM_LIBRARY = "fbgemm"  # it has kernels that multiply nothing
_MULTIPLIES = one_of(
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
        product = not _LOOP.match(name) or _PRODUCT_IN_LOOP.search(name) is not None
        return KernelName(product=product, harmless=not product, dtype=None, cores="unknown")
    harmless = _is_harmless(name)
    product = not harmless and _MULTIPLIES(name)
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
