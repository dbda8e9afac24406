"""Operators that touch every element once: arithmetic, activations, copies, fills.

An output that was passed in is one more tensor than the operator has inputs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stepscope.explain.flops.call import Call, Tensor, Unknown, total_bytes
from stepscope.explain.flops.cost import Cost, memory_bound
from stepscope.explain.flops.matmul import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable

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
def copied(call: Call) -> Cost:
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
