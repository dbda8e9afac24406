"""Kernels of a graph's replay, joined to the operators of its recording by their order.

Products are the anchors: where a replay has as many of them as its recording, they are the same, one
by one. Between two products, kernels and operators of one kind are joined in order where there are
as many of both, or where one operator launched them all. What is not sure stays unknown.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.records.trace import ABSENT

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_LIST = "list of tensors"
_MEMSET = "memset"
# Kind: operators, and kernels that they launch; the first match counts.
_KINDS = tuple(
    (kind, re.compile(operators), re.compile(kernels))
    for kind, operators, kernels in (
        (_LIST, r"_foreach_|_fused_(?:adam|adamw|sgd|adagrad)_", r"multi_tensor_apply"),
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
        ("copy", r"copy_?$|clone$|contiguous$", r"copy_kernel|copy_device|memcpy"),
        ("fill", r"zero|fill_?$|full|ones", r"fillfunctor"),
        ("mean", r"mean$", r"meanops"),
        ("sum", r"sum$", r"sum_functor"),
        ("add", r"::(?:add|sub|rsub)_?$", r"functor_add|add_?functor"),
        ("multiply", r"::(?:mul|div)_?$", r"mul_?functor|div_?functor|div_true"),
        ("power", r"::pow_?$", r"pow_"),
        ("tanh", r"::tanh_?$", r"tanh"),
        ("sigmoid", r"::sigmoid_?$", r"sigmoid"),
        ("exp", r"::exp_?$", r"exp_kernel"),
        ("log", r"::log_?$", r"log_kernel"),
        ("sqrt", r"::sqrt_?$", r"(?<!r)sqrt"),
        ("rsqrt", r"::rsqrt_?$", r"rsqrt"),
        ("where", r"::where$", r"where"),
        ("masked fill", r"masked_fill", r"masked_fill"),
        ("arange", r"arange", r"arange"),
        ("triangle", r"::tri[lu]_?$", r"triu_tril|tri[lu]"),
    )
)
# Operators with kernels of several kinds.
_SEVERAL = {
    "aten::nll_loss_backward": ("fill", "loss"),
    "aten::nll_loss2d_backward": ("fill", "loss"),
    "aten::select_backward": ("fill", "copy"),
    "aten::slice_backward": ("fill", "copy"),
    "aten::embedding_dense_backward": ("fill", "embedding backward"),
}
# Kernels that prepare a product, and kernels that finish one.
_PREPARES = re.compile(r"dot_do_o|nchwtonhwc|computeoffsets|im2col|convert_?tensor|tensortransform")
_FINISHES = re.compile(r"splitk_?reduce|convert_dq|postprocess|reduce_1block|reduce_wgrad|col2im")


@lru_cache(maxsize=4096)
def operator_kinds(name: str) -> tuple[str, ...]:
    """Operators without an entry are a kind of their own."""
    if name in _SEVERAL:
        return _SEVERAL[name]
    return (next((kind for kind, pattern, _ in _KINDS if pattern.search(name)), name),)


@lru_cache(maxsize=4096)
def kernel_kind(name: str) -> str | None:
    lower = name.lower()
    if lower.startswith(_MEMSET):
        return _MEMSET
    return next((kind for kind, _, pattern in _KINDS if pattern.search(lower)), None)


def join_by_order(
    operators: Sequence[str],
    is_product: Sequence[int],
    kernels: Sequence[str],
    multiplies: Sequence[bool],
) -> list[int]:
    """For each kernel of a replay the place of its operator in the recording, or -1.

    `is_product` says how many kernels of an operator multiply, `multiplies` which kernels do.
    """
    anchors = [place for place, count in enumerate(is_product) for _ in range(count)]
    products = [place for place, product in enumerate(multiplies) if product]
    found = [ABSENT] * len(kernels)
    if len(anchors) != len(products):
        return found
    for event, place in zip(products, anchors, strict=True):
        found[event] = place
    events = (ABSENT, *products, len(kernels))
    places = (ABSENT, *anchors, len(operators))
    for (event, next_event), (place, next_place) in zip(
        pairwise(events), pairwise(places), strict=True
    ):
        between = [
            one
            for one in range(place + 1, next_place)
            if operators[one] not in VIEWS and not is_product[one]
        ]
        _join_between(found, range(event + 1, next_event), between, operators, kernels)
    _give_helpers(found, kernels)
    return found


def _join_between(
    found: list[int],
    events: range,
    places: Sequence[int],
    operators: Sequence[str],
    kernels: Sequence[str],
) -> None:
    """Kind by kind; what one operator launched several of, in runs of the same kernel."""
    kinds = [(place, kind) for place in places for kind in operator_kinds(operators[place])]
    by_kind = _grouped(*zip(*kinds, strict=True)) if kinds else {}
    for kind, mine in _grouped(events, [kernel_kind(kernels[one]) for one in events]).items():
        candidates = by_kind.get(kind, [])
        runs = [[one] for one in mine]
        if kind == _LIST or len(mine) != len(candidates) > 1:
            runs = [list(run) for _, run in groupby(mine, key=lambda one: kernels[one])]
        if len(candidates) == 1:
            runs = [mine]
        if len(runs) == len(candidates):
            for run, place in zip(runs, candidates, strict=True):
                for one in run:
                    found[one] = place


def _grouped(items: Sequence[int], keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def _give_helpers(found: list[int], kernels: Sequence[str]) -> None:
    """An operator clears its workspace right before its kernel, and its other kernels lie between
    those that are known to be its own."""
    for event in range(1, len(found)):
        if found[event] < 0 and _FINISHES.search(kernels[event].lower()):
            found[event] = found[event - 1]
    for event in range(len(found) - 2, ABSENT, -1):
        if found[event] < 0 and _prepares(kernels[event]):
            found[event] = found[event + 1]
    known = [event for event, place in enumerate(found) if place >= 0]
    for event, after in pairwise(known):
        if found[event] == found[after]:
            found[event + 1 : after] = [found[event]] * (after - event - 1)


def _prepares(kernel: str) -> bool:
    return kernel_kind(kernel) == _MEMSET or bool(_PREPARES.search(kernel.lower()))
