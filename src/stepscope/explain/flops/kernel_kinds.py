"""Kinds of operators and of kernels: which kernels an operator of PyTorch may launch, by names."""

from __future__ import annotations

import re
from functools import lru_cache

from stepscope.explain.flops.kernel_names import read_name

MEMSET = "memset"
COPY = "copy"
# Kind: operators, and kernels that they launch; the first match counts.
_KINDS = tuple(
    (kind, re.compile(operators), re.compile(kernels))
    for kind, operators, kernels in (
        ("fused update", r"_fused_(?:adam|adamw|sgd|adagrad)", r"multi_tensor_apply.*fused"),
        ("list addcmul", r"_foreach_addcmul", r"multi_tensor_apply.*pointwiseop.*multiplies"),
        ("list addcdiv", r"_foreach_addcdiv", r"multi_tensor_apply.*pointwiseop.*divides"),
        ("list lerp", r"_foreach_lerp", r"multi_tensor_apply.*lerp"),
        ("list add", r"_foreach_add", r"multi_tensor_apply.*plus<"),
        ("list sub", r"_foreach_sub", r"multi_tensor_apply.*minus<"),
        ("list mul", r"_foreach_mul", r"multi_tensor_apply.*multiplies"),
        ("list div", r"_foreach_div", r"multi_tensor_apply.*divides"),
        ("list pow", r"_foreach_pow", r"multi_tensor_apply.*power"),
        ("list neg", r"_foreach_neg", r"multi_tensor_apply.*negate"),
        ("list reciprocal", r"_foreach_reciprocal", r"multi_tensor_apply.*reciprocal"),
        ("list sqrt", r"_foreach_sqrt", r"multi_tensor_apply.*sqrt"),
        ("list norm", r"_foreach_norm", r"lpnorm|multi_tensor_apply.*norm"),
        ("list copy", r"_foreach_copy", r"multi_tensor_apply.*copy"),
        ("list", r"_foreach_", r"multi_tensor_apply"),
        ("layer norm backward", r"layer_norm_backward", r"layer_norm_grad|gammabeta|layernormback"),
        ("layer norm", r"layer_norm", r"layer_?norm|rowwisemoments"),
        ("batch norm", r"batch_norm", r"batch_?norm|::bn_[fb]w|cudnn.*bn_"),
        ("group norm", r"group_norm", r"group_?norm|computefusedparams|internalgradients"),
        ("rms norm", r"rms_norm", r"rms_?norm"),
        ("softmax backward", r"softmax_backward", r"softmax\w*back"),
        ("softmax", r"softmax", r"softmax"),
        ("gelu backward", r"gelu_backward", r"gelubackward"),
        ("gelu", r"gelu", r"gelu"),
        ("silu backward", r"silu_backward", r"silu_backward|silubackward"),
        ("silu", r"silu", r"silu"),
        ("tanh backward", r"tanh_backward", r"tanh_backward|tanhbackward"),
        ("sigmoid backward", r"sigmoid_backward", r"sigmoid_backward|sigmoidbackward"),
        ("relu backward", r"threshold_backward", r"threshold"),
        ("relu", r"relu_?$|clamp", r"clamp|relu"),
        ("dropout backward", r"dropout_backward", r"masked_scale"),
        ("dropout", r"dropout", r"dropout"),
        ("loss", r"nll_loss", r"nll_loss"),
        ("pool", r"pool", r"pool"),
        ("upsample", r"upsample", r"upsample"),
        (
            "embedding backward",
            r"embedding_(?:dense_)?backward",
            r"embedding_back|grad_weight",
        ),
        (
            "lookup",
            r"embedding$|index_select|gather$|index$",
            r"gather_kernel|indexselect|index_elementwise|index_kernel|index_get",
        ),
        ("cat", r"cat$|stack$", r"catarray"),
        (COPY, r"copy_?$|clone$|contiguous$", r"copy_kernel|copy_device|memcpy"),
        ("fill", r"zero|fill_?$|full|ones", r"fillfunctor"),
        ("mean", r"mean$", r"meanops"),
        ("sum", r"sum$", r"sum_functor"),
        ("addcmul", r"::addcmul", r"addcmul"),
        ("addcdiv", r"::addcdiv", r"addcdiv"),
        ("lerp", r"::lerp", r"lerp"),
        ("negate", r"::neg_?$", r"neg_kernel"),
        ("reciprocal", r"::reciprocal_?$", r"reciprocal"),
        ("add", r"::(?:add|sub|rsub)_?$", r"functor(?:onself)?_add|add_?functor"),
        ("multiply", r"::(?:mul|div)_?$", r"mul_?functor|div_?functor|div_true"),
        ("power", r"::pow_?$", r"pow_"),
        ("tanh", r"::tanh_?$", r"tanh"),
        ("sigmoid", r"::sigmoid_?$", r"sigmoid"),
        ("exp", r"::exp_?$", r"exp_kernel"),
        ("log", r"::log_?$", r"log_kernel"),
        ("sqrt", r"::sqrt_?$", r"(?<!r)sqrt"),
        ("rsqrt", r"::rsqrt_?$", r"rsqrt"),
        ("where", r"::where$", r"where"),
        ("infinite", r"::is(?:neg|pos)?inf$", r"is(?:neg|pos)?inf"),
        ("all", r"::all$", r"and_kernel"),
        ("masked fill", r"masked_fill", r"masked_fill"),
        ("arange", r"arange", r"arange"),
        ("triangle", r"::tri[lu]_?$", r"triu_tril|tri[lu]"),
    )
)
# Lists whose tensors cannot share a kernel are computed one by one.
ONE_BY_ONE = {
    "multiply": ("list div", "list mul"),
    "add": ("list add", "list sub"),
    "power": ("list pow",),
    "copy": ("list copy",),
    "sqrt": ("list sqrt",),
}
# Operators with kernels of several kinds; those of a product, without the product itself.
SEVERAL = {
    "aten::nll_loss_backward": ("fill", "loss"),
    "aten::nll_loss2d_backward": ("fill", "loss"),
    "aten::select_backward": ("fill", "copy"),
    "aten::slice_backward": ("fill", "copy"),
    "aten::embedding_dense_backward": ("fill", "embedding backward"),
    "aten::_scaled_dot_product_efficient_attention_backward": ("multiply", "sum"),
    "aten::_efficient_attention_backward": ("multiply", "sum"),
    "aten::_safe_softmax": ("softmax", "infinite", "all", "fill", "where"),
    "aten::_softmax_backward_data": ("multiply", "softmax backward"),
    "aten::native_group_norm": ("layer norm", "group norm"),  # they share kernels
    "aten::native_group_norm_backward": ("group norm", "layer norm backward"),
}
# Kernels that prepare a product, and kernels that finish one.
_PREPARES = re.compile(
    r"dot_do_o|nchwtonhwc|computeoffsets|im2col|convert_?tensor|tensortransform|flip_filter|"
    r"scalepackedtensor"
)
_FINISHES = re.compile(
    r"splitk_?reduce|reducesplitk|convert_dq|postprocess|reduce_1block|reduce_wgrad|col2im|"
    r"nhwctonchw|fmha_reduce"
)
_BETWEEN = re.compile(r"region_transform")  # both


@lru_cache(maxsize=4096)
def operator_kinds(name: str) -> tuple[str, ...]:
    """Operators without an entry are a kind of their own."""
    if name in SEVERAL:
        return SEVERAL[name]
    return (next((kind for kind, pattern, _ in _KINDS if pattern.search(name)), name),)


@lru_cache(maxsize=4096)
def kernel_kind(name: str) -> str | None:
    lower = name.lower()
    if lower.startswith(MEMSET):
        return MEMSET
    return next((kind for kind, _, pattern in _KINDS if pattern.search(lower)), None)


def prepares(kernel: str) -> bool:
    return kernel_kind(kernel) == MEMSET or bool(_PREPARES.search(kernel.lower()))


def finishes(kernel: str) -> bool:
    return bool(_FINISHES.search(kernel.lower()))


@lru_cache(maxsize=4096)
def helps_product(kernel: str) -> bool:
    """It computes a part of a product that is not the product itself."""
    lower = kernel.lower()
    named = any(pattern.search(lower) for pattern in (_PREPARES, _FINISHES, _BETWEEN))
    return named or read_name(kernel).transforms
