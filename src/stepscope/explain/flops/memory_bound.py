"""Operators bound by memory: element by element, reductions, norms, lookups, pools, lists of
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stepscope.explain.flops.call import (
    Call,
    Cost,
    Dims,
    Tensor,
    Unknown,
    broadcast,
    memory_bound,
    total_bytes,
)

# Operators that touch every element once: arithmetic, activations, copies, fills.
#
# An output that was passed in is one more tensor than the operator has inputs.

_ONE = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh digamma elu erf erfc erfinv exp exp2 expm1 "
    "floor frac gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu lgamma log log10 log1p "
    "log2 log_sigmoid_forward logit mish nan_to_num neg reciprocal relu relu6 round rsqrt selu "
    "sgn sigmoid sign silu sin sinh softplus softshrink sqrt square tan tanh threshold trunc "
    "clamp clamp_min clamp_max bitwise_not conj_physical positive cumsum cumprod tril triu flip "
    "roll rot90 clone _softmax _log_softmax _safe_softmax celu glu_jvp"
)
_TWO = (
    "add sub rsub mul div true_divide floor_divide remainder fmod pow atan2 maximum minimum fmax "
    "fmin hypot copysign bitwise_and bitwise_or bitwise_xor masked_fill xlogy logaddexp "
    "sigmoid_backward tanh_backward threshold_backward gelu_backward silu_backward elu_backward "
    "hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward "
    "softplus_backward mish_backward native_dropout_backward _softmax_backward_data "
    "_log_softmax_backward_data logit_backward prelu smooth_l1_loss huber_loss mse_loss l1_loss"
)
_THREE = "addcmul addcdiv lerp mse_loss_backward smooth_l1_loss_backward huber_loss_backward"
_COMPARED = (
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite "
    "isneginf isposinf"
)
_FILLED = "fill_ zero_ uniform_ normal_ random_ bernoulli_ exponential_ log_normal_ cauchy_"


def _names(words: str) -> list[str]:
    """The operator and its in-place form."""
    return [f"aten::{word}{end}" for word in words.split() for end in ("", "_")]


def _elementwise(inputs: int, item_bytes: int | None = None) -> Callable[[Call], Cost]:
    def formula(call: Call) -> Cost:
        given = call.tensors()
        read, passed_out = given[:inputs], given[inputs:]
        if not read:
            raise Unknown
        total = total_bytes(read)
        if passed_out:
            return Cost(moved=total + total_bytes(passed_out))
        if call.name.endswith("_"):
            return Cost(moved=total + read[0].size_bytes)
        out = math.prod(broadcast(*(tensor.dims for tensor in read)))
        return Cost(moved=total + out * (item_bytes or promoted(read)))

    return formula


def promoted(tensors: list[Tensor]) -> int:
    """Bytes of an element of the result: tensors with dimensions decide over those without."""
    dimensioned = [tensor.item_bytes for tensor in tensors if tensor.dims]
    return max(dimensioned or [tensor.item_bytes for tensor in tensors])


memory_bound(*_names(_ONE))(_elementwise(1))
memory_bound(*_names(_TWO))(_elementwise(2))
memory_bound(*_names(_THREE), "aten::where")(_elementwise(3))
memory_bound(*_names(_COMPARED))(_elementwise(2, item_bytes=1))


@memory_bound(*(f"aten::{word}" for word in _FILLED.split()))
def filled(call: Call) -> Cost:
    """Written, never read."""
    return Cost(moved=call.tensor(0).size_bytes)


@memory_bound("aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize")
@memory_bound("aten::avg_pool2d_backward", "aten::avg_pool3d_backward")
@memory_bound("aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward")
def copied_tensor(call: Call) -> Cost:
    """Target and source, or gradient and input; dtypes may differ."""
    return Cost(moved=call.tensor(0).size_bytes + call.tensor(1).size_bytes)


@memory_bound("aten::_to_copy")
def converted(call: Call) -> Cost:
    """The new dtype is the second argument; the old one by default."""
    given = call.tensor(0)
    item = call.dtype_bytes(1) if call.has_value(1) else given.item_bytes
    return Cost(moved=given.size_bytes + given.elements * item)


@memory_bound("aten::native_dropout", "aten::_fused_dropout")
def dropped(call: Call) -> Cost:
    """In, out, and one byte per element for the mask."""
    given = call.tensor(0)
    return Cost(moved=2 * given.size_bytes + given.elements)


@memory_bound("aten::glu")
def gated(call: Call) -> Cost:
    """Half of the input goes out."""
    return Cost(moved=call.tensor(0).size_bytes * 3 // 2)


@memory_bound("aten::glu_backward")
def gated_backward(call: Call) -> Cost:
    """Gradient and input in, gradient of the input out."""
    gradient, given = call.tensor(0), call.tensor(1)
    return Cost(moved=gradient.size_bytes + 2 * given.size_bytes)


@memory_bound("aten::_local_scalar_dense", "aten::item")
def one_value(call: Call) -> Cost:
    """One element goes to the host."""
    return Cost(moved=call.tensor(0).item_bytes)


@memory_bound("aten::binary_cross_entropy_with_logits", "aten::binary_cross_entropy")
def cross_entropy(call: Call) -> Cost:
    """Two tensors in; the result is small unless nothing is reduced."""
    given, target = call.tensor(0), call.tensor(1)
    reduced = call.number(4 if call.name.endswith("logits") else 3) != 0
    return Cost(moved=given.size_bytes + target.size_bytes + (0 if reduced else given.size_bytes))


# Operators bound by memory other than element by element: reductions, norms, lookups, pools.

_FLOAT_BYTES = 4
_INDEX_BYTES = 8
_REDUCTIONS = "sum mean amax amin prod nansum logsumexp count_nonzero norm std var any all max min"
_WITH_INDEX = {"aten::max", "aten::min"}
_INDEX_ONLY = {"aten::argmax", "aten::argmin"}
_DIMS_AT = {"aten::norm": 2, "aten::linalg_vector_norm": 2}
# Views and bookkeeping: nothing moves.
_VIEWS = (
    "_conj _reshape_alias _unsafe_view alias as_strided as_strided_ chunk conj detach "
    "detach_ diagonal empty empty_like empty_strided expand expand_as flatten is_nonzero "
    "lift_fresh movedim narrow new_empty new_empty_strided numpy_T permute real record_stream "
    "requires_grad_ resize_ resolve_conj resolve_neg result_type select set_ slice split "
    "split_with_sizes squeeze squeeze_ swapaxes t t_ transpose transpose_ unbind unflatten unfold "
    "unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_ view view_as "
    "view_as_complex view_as_real _has_compatible_shallow_copy_type"
)
VIEWS = frozenset(f"aten::{word}" for word in _VIEWS.split())


@memory_bound(*VIEWS)
def nothing(_: Call) -> Cost:
    return Cost(moved=0)


@memory_bound(*(f"aten::{word}" for word in _REDUCTIONS.split()))
@memory_bound("aten::linalg_vector_norm", "aten::argmax", "aten::argmin")
def reduced(call: Call) -> Cost:
    """All of the input is read; the remaining dimensions are written."""
    given = call.tensor(0)
    extra = call.tensors()[1:]
    if call.name in _WITH_INDEX and extra and len(call) == 2:  # the larger of two tensors
        return Cost(moved=given.size_bytes + 2 * extra[0].size_bytes)
    if extra:
        return Cost(moved=given.size_bytes + total_bytes(extra))
    out = _left(call, given.dims)
    item = _INDEX_BYTES if call.name in _INDEX_ONLY else given.item_bytes
    if call.name in _WITH_INDEX and len(call) > 1:
        item += _INDEX_BYTES
    return Cost(moved=given.size_bytes + out * item)


def _left(call: Call, dims: Dims) -> int:
    """Elements that remain."""
    place = _DIMS_AT.get(call.name, 1)
    if len(call) <= place or not call.has_value(place):
        if len(call) <= place + 1:  # `sum(x, dtype)` has no dimensions
            return 1
        raise Unknown
    gone = {place % len(dims) for place in call.numbers(place)} if dims else set()
    if not gone:
        return 1
    return math.prod(size for place, size in enumerate(dims) if place not in gone)


@memory_bound("aten::native_layer_norm", "aten::_fused_rms_norm")
def layer_norm(call: Call) -> Cost:
    """Mean and deviation of every row are written too; of RMS norm one number."""
    given = call.tensor(0)
    wide = math.prod(call.numbers(1)) if call.has_value(1) else given.dims[-1]
    statistics = given.elements // max(1, wide) * (1 if "rms" in call.name else 2)
    return Cost(moved=total_bytes(call.tensors()) + given.size_bytes + statistics * _FLOAT_BYTES)


@memory_bound("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward")
@memory_bound("aten::native_group_norm_backward")
def norm_backward(call: Call) -> Cost:
    """Gradient, input, statistics and weights in; gradients of input and weights out."""
    given = call.tensors()
    weights = [tensor for tensor in given[2:] if len(tensor.dims) == 1]
    written = given[1].size_bytes + total_bytes(weights[:2])
    return Cost(moved=total_bytes(given) + written)


@memory_bound("aten::native_group_norm")
def group_norm(call: Call) -> Cost:
    """Input, weight, bias; statistics of each group are small."""
    return Cost(moved=total_bytes(call.tensors()) + call.tensor(0).size_bytes)


@memory_bound("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
@memory_bound("aten::_native_batch_norm_legit", "aten::_batch_norm_with_update")
def batch_norm(call: Call) -> Cost:
    """Input in and out, statistics of every channel in and out."""
    given, *channels = call.tensors()
    return Cost(moved=2 * given.size_bytes + 2 * total_bytes(channels))


@memory_bound("aten::native_batch_norm_backward", "aten::cudnn_batch_norm_backward")
@memory_bound("aten::miopen_batch_norm_backward", "aten::batch_norm_backward")
def batch_norm_backward(call: Call) -> Cost:
    """Two large tensors in, one out; the rest is a number for each channel."""
    tensors = call.tensors()
    return Cost(moved=total_bytes(tensors) + tensors[1].size_bytes)


@memory_bound("aten::embedding")
def embedding(call: Call) -> Cost:
    """The selected rows are read and written."""
    table, index = call.tensor(0), call.tensor(1)
    out = index.elements * table.dims[-1] * table.item_bytes
    return Cost(moved=index.size_bytes + 2 * out)


@memory_bound("aten::embedding_dense_backward")
def embedding_backward(call: Call) -> Cost:
    """Gradients and indices in, a table out."""
    gradient, index = call.tensor(0), call.tensor(1)
    table = call.number(2) * gradient.dims[-1] * gradient.item_bytes
    return Cost(moved=gradient.size_bytes + index.size_bytes + table)


@memory_bound("aten::index_select")
def index_select(call: Call) -> Cost:
    """The selected slices are read and written."""
    table, index = call.tensor(0), call.tensor(2)
    wide = table.dims[call.number(1)] if table.dims else 1
    out = table.size_bytes // max(1, wide) * index.elements
    return Cost(moved=index.size_bytes + 2 * out)


@memory_bound("aten::gather", "aten::scatter_", "aten::scatter_add_")
def scattered(call: Call) -> Cost:
    """One element for each index is read and written; adding reads the target too."""
    target, index = call.tensor(0), call.tensor(2)
    times = 3 if "add" in call.name else 2
    return Cost(moved=index.size_bytes + times * index.elements * target.item_bytes)


@memory_bound("aten::nll_loss_forward", "aten::nll_loss2d_forward")
@memory_bound("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss(call: Call) -> Cost:
    """One element for each target; the zeros around its gradient are another operator's."""
    place = 1 if call.name.endswith("_backward") else 0  # after the gradient
    given, target = call.tensor(place), call.tensor(place + 1)
    return Cost(moved=target.size_bytes + target.elements * given.item_bytes)


@memory_bound("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices")
def max_pool(call: Call) -> Cost:
    """The largest of each window and where it was."""
    given = call.tensor(0)
    out = _pooled(given.dims, call, ceil_at=5, dilation_at=4)
    return Cost(moved=given.size_bytes + out * (given.item_bytes + _INDEX_BYTES))


@memory_bound("aten::avg_pool2d", "aten::avg_pool3d")
def avg_pool(call: Call) -> Cost:
    given = call.tensor(0)
    out = _pooled(given.dims, call, ceil_at=4, dilation_at=None)
    return Cost(moved=given.size_bytes + out * given.item_bytes)


def _pooled(dims: Dims, call: Call, *, ceil_at: int, dilation_at: int | None) -> int:
    """Elements of the output; a stride is the window's size by default."""
    window = call.numbers(1)
    space = len(window)
    stride = (call.numbers(2) if call.has_value(2) else []) or window
    padding = call.numbers(3)
    dilation = [1] * space if dilation_at is None else call.numbers(dilation_at)
    up = call.has_value(ceil_at) and call.flag(ceil_at)
    out = math.prod(dims[:-space])
    for size, wide, step, pad, apart in zip(
        dims[-space:], window, stride, padding, dilation, strict=True
    ):
        room = size + 2 * pad - apart * (wide - 1) - 1
        out *= (-(-room // step) if up else room // step) + 1
    return out


@memory_bound("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward")
def max_pool_backward(call: Call) -> Cost:
    """Gradient and places in, gradient of the input out."""
    tensors = call.tensors()
    gradient, given, index = tensors[0], tensors[1], tensors[-1]
    return Cost(moved=total_bytes((gradient, given, index)))


@memory_bound("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d")
@memory_bound("aten::upsample_nearest2d", "aten::upsample_bilinear2d", "aten::upsample_bicubic2d")
def resized(call: Call) -> Cost:
    """The size of the output is an argument."""
    given, size = call.tensor(0), call.numbers(1)
    out = math.prod(given.dims[: -len(size)]) * math.prod(size)
    return Cost(moved=given.size_bytes + out * given.item_bytes)


@memory_bound(
    "aten::upsample_nearest2d_backward",
    "aten::upsample_bilinear2d_backward",
    "aten::upsample_bicubic2d_backward",
)
def resized_backward(call: Call) -> Cost:
    """The size of the input is an argument."""
    gradient = call.tensor(0)
    return Cost(moved=gradient.size_bytes + math.prod(call.numbers(2)) * gradient.item_bytes)


# Operators on lists of tensors: foreach, fused optimizers, cat and stack.
#
# The profiler writes the shapes of lists of up to 30 tensors, and never their dtype. costs.py fills
# in the rest from what surrounds the call.

_READ_AND_WRITTEN = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp "
    "expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal "
    "round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc"
)
_OPTIMIZERS = {  # lists read and lists written, without the small ones that count steps
    "aten::_fused_adam_": (4, 3),
    "aten::_fused_adamw_": (4, 3),
    "aten::_fused_adagrad_": (3, 2),
}
_AMSGRAD = 11  # place of the flag
_MOMENTUM = 4


def _cost(lists: Sequence[list[Dims] | None], passes: Sequence[int]) -> Cost:
    """`passes` of each list; elements of those recorded, counts of those that were not."""
    elements = longer = 0
    for shapes, times in zip(lists, passes, strict=True):
        if shapes is None:
            longer += times
        else:
            elements += times * sum(map(math.prod, shapes))
    return Cost(moved=0, list_elements=elements, list_passes=longer)


def _lists(call: Call, least: int = 1) -> list[list[Dims] | None]:
    lists = call.lists()
    if len(lists) < least:
        raise Unknown
    return lists


@memory_bound(*(f"aten::_foreach_{w}{end}" for w in _READ_AND_WRITTEN.split() for end in ("", "_")))
def read_and_written(call: Call) -> Cost:
    """Every list is read, and one as large as the first is written."""
    lists = _lists(call)
    return _cost(lists, [2, *([1] * (len(lists) - 1))])


@memory_bound("aten::_foreach_copy_")
def copied_list(call: Call) -> Cost:
    """The first list is written only."""
    lists = _lists(call, 2)
    return _cost(lists, [1] * len(lists))


@memory_bound("aten::_foreach_zero_", "aten::_foreach_norm", "aten::_foreach_max")
def touched(call: Call) -> Cost:
    """Written only, or read only with a number for each tensor."""
    return _cost(_lists(call)[:1], [1])


@memory_bound(*_OPTIMIZERS)
def optimizer(call: Call) -> Cost:
    """Parameters, gradients and state are read; all but the gradients are written."""
    read, written = _OPTIMIZERS[call.name]
    lists = _lists(call, read)[:read]
    passes = [2, 1, *([2] * (written - 1))]
    if read == 4 and call.has_value(_AMSGRAD) and call.flag(_AMSGRAD):
        return _cost([*lists, lists[0]], [*passes, 2])
    return _cost(lists, passes)


@memory_bound("aten::_fused_sgd_")
def sgd(call: Call) -> Cost:
    """As others; without momentum there is no state."""
    lists = _lists(call, 2)
    if call.text(_MOMENTUM).strip("0.") and len(lists) > 2:
        return _cost(lists[:3], [2, 1, 2])
    return _cost(lists[:2], [2, 1])


@memory_bound("aten::cat", "aten::stack", "aten::_cat", "aten::concat")
@memory_bound("aten::_amp_foreach_non_finite_check_and_unscale_")
def read_then_written(call: Call) -> Cost:
    """Every tensor once."""
    return _cost(_lists(call)[:1], [2])
