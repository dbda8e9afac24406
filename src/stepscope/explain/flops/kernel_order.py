"""Join the kernels of a graph's replay to the operators of its recording, by their order and
their kinds.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepscope.explain.flops.call import read_name
from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.records.trace import ABSENT
from stepscope.step.arrays import Bools, Floats, Indices
from stepscope.text.words import lazy_pattern

# Products are the anchors: where a replay has as many of them as its recording, they are the same,
# one by one; else the last part below finds which are which. Between two products, kernels and
# operators of one kind are joined in order where there are as many of both, or as many stretches of
# both. What is not sure stays unknown.

_ROUNDS = 4


def join_by_order(
    calls: Sequence[CapturedCall], kernels: Sequence[str], multiplies: Sequence[bool]
) -> list[int]:
    """For each kernel of a replay the place of its operator in the recording, or -1.

    `multiplies` says which kernels are products.
    """
    found = _join_products(calls, kernels, multiplies)
    if all(place < 0 for place in found):
        return found
    for _ in range(_ROUNDS):  # what was joined bounds what was not
        before = found.count(ABSENT)
        _join_round(found, calls, kernels)
        if found.count(ABSENT) == before:
            break
    _give_helpers(found, kernels)
    return found


def _join_products(
    calls: Sequence[CapturedCall], kernels: Sequence[str], multiplies: Sequence[bool]
) -> list[int]:
    """One by one where there are as many of both, else as the order of all kernels allows."""
    anchors = [place for place, call in enumerate(calls) for _ in range(call.products)]
    products = [place for place, product in enumerate(multiplies) if product]
    if len(anchors) != len(products):
        # For each kernel that multiplies or helps a product: the place of its operator.
        # All are -1 where a product would have no kernel, or a kernel that multiplies no
        # operator.
        slots = _CallSlots(calls)
        nothing = [ABSENT] * len(kernels)
        if not slots.product.any() or len(slots.place) * len(kernels) > _LARGEST:
            return nothing
        path = _find_path(slots, kernels, multiplies)
        owners = {place for place, call in enumerate(calls) if call.products}
        found = [
            place if main or (place in owners and helps_product(name)) else ABSENT
            for place, name, main in zip(path, kernels, multiplies, strict=True)
        ]
        joined = {place for place, main in zip(found, multiplies, strict=True) if main}
        return found if ABSENT not in joined and owners <= joined else nothing
    found = [ABSENT] * len(kernels)
    for event, place in zip(products, anchors, strict=True):
        found[event] = place
    return found


def _join_round(found: list[int], calls: Sequence[CapturedCall], kernels: Sequence[str]) -> None:
    """Between kernels that are known already; operators run in the order of their recording."""
    known = [(event, place) for event, place in enumerate(found) if place >= 0]
    edges = [(ABSENT, ABSENT), *known, (len(kernels), len(calls))]
    used = set(found)
    for (event, place), (next_event, next_place) in pairwise(edges):
        events = range(event + 1, next_event)
        if not events:
            continue
        inside = range(place + 1, next_place)
        between = [
            one
            for one in inside
            if calls[one].name not in VIEWS and not calls[one].products and one not in used
        ]
        if next_place < len(calls) and calls[next_place].name in SEVERAL:
            between.append(next_place)  # some of its kernels come before the one that is known
        if place >= 0 and calls[place].bias and place != next_place:
            between.insert(0, place)
        _join_between(found, events, between, calls, kernels)
        if not between and next_place < len(calls) and calls[next_place].name not in VIEWS:
            for one in events:  # an operator first copies what is not contiguous
                if kernel_kind(kernels[one]) == COPY:
                    found[one] = next_place


def _kinds(call: CapturedCall) -> tuple[str, ...]:
    return (call.bias,) if call.bias else operator_kinds(call.name)


def _join_between(
    found: list[int],
    events: range,
    places: Sequence[int],
    calls: Sequence[CapturedCall],
    kernels: Sequence[str],
) -> None:
    """Kind by kind: one by one where there are as many of both, else by stretches."""
    kinds = [(place, kind) for place in places for kind in _kinds(calls[place])]
    by_kind = _grouped(*zip(*kinds, strict=True)) if kinds else {}
    for kind, mine in _grouped(events, [kernel_kind(kernels[one]) for one in events]).items():
        others = (by_kind.get(other, []) for other in ONE_BY_ONE.get(str(kind), ()))
        candidates = by_kind.get(kind) or next((some for some in others if some), [])
        if len(candidates) == 1 or len(candidates) == len(mine):
            _spread(found, mine, candidates)
            continue
        order = {place: number for number, place in enumerate(places)}
        runs = _stretches(mine, mine)
        groups = _stretches(candidates, [order[place] for place in candidates])
        if len(runs) == len(groups):
            for run, group in zip(runs, groups, strict=True):
                _spread(found, run, group)


def _spread(found: list[int], events: Sequence[int], places: Sequence[int]) -> None:
    """Each operator gets as many kernels; nothing where they cannot be divided so."""
    each, rest = divmod(len(events), len(places))
    if not rest:
        for number, event in enumerate(events):
            found[event] = places[number // each]


def _stretches(items: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """Items whose numbers follow each other without a gap."""
    keyed = [
        (number - at, item) for at, (number, item) in enumerate(zip(numbers, items, strict=True))
    ]
    return [[item for _, item in run] for _, run in groupby(keyed, key=lambda one: one[0])]


def _grouped(items: Sequence[int], keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def _give_helpers(found: list[int], kernels: Sequence[str]) -> None:
    """An operator clears its workspace right before its kernel, and its other kernels lie between
    those that are known to be its own."""
    for event in range(1, len(found)):
        if found[event] < 0 and finishes(kernels[event]):
            found[event] = found[event - 1]
    for event in range(len(found) - 2, ABSENT, -1):
        if found[event] < 0 and prepares(kernels[event]):
            found[event] = found[event + 1]
    known = [event for event, place in enumerate(found) if place >= 0]
    for event, after in pairwise(known):
        if found[event] == found[after]:
            found[event + 1 : after] = [found[event]] * (after - event - 1)


# Which kernels of a replay compute which products, where one product takes several kernels.
#
# A library may compute a product in parts, or between transforms (FFT, Winograd). Operators and
# kernels have the same order, so the best assignment that keeps it is found by dynamic programming:
# every product should have a kernel, and what lies between products must fit what lies between
# their kernels. A product stands twice in the lattice: before and after its first kernel that
# multiplies.

_LARGEST = 20_000_000  # of operators x kernels; a lattice takes six bytes for each
_NEVER = -1e9
# Floats, in units of a kernel that fits its operator.
_PRODUCT, _HELPER = 3.0, 0.3  # a product's first kernel; one that helps it
_PART, _OTHER_PART = -0.4, -0.5  # a further one; parts of one product are computed alike
_AGAIN, _LIST = 0.2, 0.5  # a further kernel of one operator; one of a list that fits
_OWN = 0.3  # an unknown kernel of an operator with kernels that are not known
_ROLE = 1.0  # the name says which gradient of a convolution it computes
_COPIES = -0.2  # an operator first copies what is not contiguous
_SKIPPED, _SILENT = 0.5, 0.05  # an operator without a kernel; one that may have none
_UNJOINED = 0.6  # a kernel without an operator
_FOREIGN = -0.35  # a kernel that multiplies, for an operator of another package
_CONVOLVES = re.compile(r"cudnn|wgrad|dgrad|fprop|fft2d|winograd|convol|flip_filter")
_ATTENDS = re.compile(r"sdpa|fmha|flash|attn|attention")
_TORCHS = ("aten::", "prims::", "profiler::", "c10d::", "_c10d_functional::")
_INPUT, _WEIGHT = "dgrad", "wgrad"  # gradients of a convolution, as kernels name them


class CapturedCall(NamedTuple):
    """One operator of a recording."""

    name: str
    products: int = 0  # it computes
    bias: str = ""  # the kind of kernel that adds a bias after it, or sums the bias's gradient


class _Gains(NamedTuple):
    """Scores of one kernel, for each slot."""

    enter: Floats  # it is the first of the slot
    before: Floats  # the slot has others, none of which multiplies
    after: Floats  # it does
    multiplies: bool


class _CallSlots:
    """Operators that may launch kernels; the two gradients of a convolution are two."""

    def __init__(self, calls: Sequence[CapturedCall]) -> None:
        places: list[int] = []
        roles: list[str] = []
        for place, call in enumerate(calls):
            if call.name not in VIEWS:
                several = call.products > 1
                roles += [_INPUT, _WEIGHT] if several else [""]
                places += [place] * (2 if several else 1)
        own = [calls[place] for place in places]
        self.place: Indices = np.array(places, np.intp)
        self.roles = np.array(roles, np.str_)
        self.product: Bools = np.array([call.products > 0 for call in own], np.bool_)
        self.convolves: Bools = np.array(["conv" in call.name for call in own], np.bool_)
        self.attends: Bools = np.array(["attention" in call.name for call in own], np.bool_)
        self._foreign: Bools = np.array(
            ["::" in call.name and not call.name.startswith(_TORCHS) for call in own], np.bool_
        )
        self._bias = np.array([call.bias for call in own], np.str_)
        self._kinds = [() if call.products else operator_kinds(call.name) for call in own]
        self._unknown: Bools = np.array(
            [call.name in kinds for call, kinds in zip(own, self._kinds, strict=True)], np.bool_
        )
        self.skipped: Floats = np.where(
            self.product, _PRODUCT, np.where(self._unknown, _SILENT, _SKIPPED)
        )
        self._gains: dict[tuple[str, bool, bool], _Gains] = {}

    def gains(self, kernel: str, *, multiplies: bool, again: bool) -> _Gains:
        """`again`: the product before this one has the same kernel."""
        key = (kernel, multiplies, again)
        if key not in self._gains:
            of_product = multiplies or helps_product(kernel)
            part = _PART if again else _OTHER_PART
            self._gains[key] = (
                self._of_product(kernel, part, multiplies=multiplies)
                if of_product
                else self._of_other(kernel)
            )
        return self._gains[key]

    def _of_product(self, kernel: str, part: float, *, multiplies: bool) -> _Gains:
        name = kernel.lower()
        possible = self.product.copy()
        if _ATTENDS.search(name):
            possible &= self.attends
        elif _CONVOLVES.search(name):
            possible &= self.convolves
        enter = np.where(possible, _PRODUCT if multiplies else _HELPER, _NEVER)
        after = np.where(possible, part if multiplies else _HELPER, _NEVER)
        for role, other in ((_INPUT, _WEIGHT), (_WEIGHT, _INPUT)):
            if multiplies and role in name:
                enter = enter + _ROLE * (self.roles == role) - 2 * _ROLE * (self.roles == other)
                after = after - 2 * _ROLE * (self.roles == other)
        if multiplies:
            foreign = self._foreign & ~self.product
            enter[foreign] = after[foreign] = _FOREIGN
        return _Gains(enter, enter, after, multiplies)

    def _of_other(self, kernel: str) -> _Gains:
        kind = kernel_kind(kernel)
        enter, after = (np.full(len(self.place), _NEVER) for _ in range(2))
        if kind is None:
            enter[self._unknown], after[self._unknown] = _OWN, _OWN / 2
        if kind in (COPY, MEMSET):
            enter[:] = after[:] = _COPIES if kind == COPY else 0.0
        lists = ONE_BY_ONE.get(str(kind), ())
        in_list = np.array([any(one in lists for one in own) for own in self._kinds], np.bool_)
        enter[in_list], after[in_list] = _LIST, _HELPER
        same = np.array([kind in own for own in self._kinds], np.bool_)
        enter[same], after[same] = 1.0, _AGAIN
        of_bias = self._bias == kind if kind else np.zeros(len(self.place), np.bool_)
        after[of_bias] = _HELPER
        before = np.where(self.product, enter, _NEVER)
        return _Gains(enter, before, after, multiplies=False)


_ENTERED, _FROM_BEFORE, _FROM_AFTER, _LEFT_OUT = range(4)


def _find_path(slots: _CallSlots, kernels: Sequence[str], multiplies: Sequence[bool]) -> list[int]:
    """The place of each kernel's operator on the best path, -1 where it is left out."""
    count = len(slots.place)
    costs = np.concatenate(([0.0], np.cumsum(slots.skipped)))
    before, after = (np.full(count, _NEVER) for _ in range(2))
    moves = np.zeros((len(kernels), 2, count), np.int8)
    origins = np.zeros((len(kernels), count), np.int32)
    nothing_yet, product = 0.0, ""
    for number, (name, main) in enumerate(zip(kernels, multiplies, strict=True)):
        # The best score with which each slot is entered, and from where: slot x 2 +
        # layer, or -1.
        without = np.where(slots.product, before - _PRODUCT, _NEVER)
        leave = np.concatenate(([nothing_yet], np.maximum(without, after) + costs[1:]))[:-1]
        layer = np.concatenate(([0], (after >= without).astype(np.int64)))[:-1]
        best = np.maximum.accumulate(leave)
        is_new = np.concatenate(([True], leave[1:] > best[:-1]))
        at = np.maximum.accumulate(np.where(is_new, np.arange(count), 0))
        origin = np.where(at > 0, 2 * (at - 1) + layer[at], ABSENT)
        enter, origins[number] = best - costs[:-1], origin.astype(np.int32)
        gains = slots.gains(name, multiplies=main, again=name == product)
        product = name if main else product
        before, after, moves[number] = _advance(slots, before, after, enter, gains)
        nothing_yet -= _UNJOINED
    ends = np.stack((before - np.where(slots.product, _PRODUCT, -_NEVER), after))
    last = int(np.argmax(ends - (costs[-1] - costs[1:])))
    return _trace_back(slots, moves, origins, (last % count, last // count))


def _advance(
    slots: _CallSlots, before: Floats, after: Floats, enter: Floats, gains: _Gains
) -> tuple[Floats, Floats, NDArray[np.int8]]:
    """Scores with one kernel more, and the move that gave each."""
    never = np.full(len(before), _NEVER)
    entered = enter + gains.enter
    waiting = before + gains.before
    if gains.multiplies:
        to_before = [never, never, never, before - _UNJOINED]
        to_after = [entered, waiting, after + gains.after, after - _UNJOINED]
    else:
        of_product = np.where(slots.product, entered, _NEVER)
        of_other = np.where(slots.product, _NEVER, entered)
        to_before = [of_product, waiting, never, before - _UNJOINED]
        to_after = [of_other, never, after + gains.after, after - _UNJOINED]
    moves = np.stack([np.argmax(np.stack(ways), axis=0) for ways in (to_before, to_after)])
    scores = [np.max(np.stack(ways), axis=0) for ways in (to_before, to_after)]
    return scores[0], scores[1], moves.astype(np.int8)


def _trace_back(
    slots: _CallSlots, moves: NDArray[np.int8], origins: NDArray[np.int32], end: tuple[int, int]
) -> list[int]:
    found = [ABSENT] * len(moves)
    slot, layer = end
    for number in range(len(moves) - 1, ABSENT, -1):
        move = int(moves[number, layer, slot])
        if move != _LEFT_OUT:
            found[number] = int(slots.place[slot])
        if move == _ENTERED:
            origin = int(origins[number, slot])
            if origin < 0:
                break
            slot, layer = divmod(origin, 2)
        elif move != _LEFT_OUT:
            layer = move - _FROM_BEFORE
    return found


# Kinds of operators and of kernels: which kernels an operator of PyTorch may launch, by names.

MEMSET = "memset"
COPY = "copy"
# Kind: operators, and kernels that they launch; the first match counts.
_KINDS = tuple(
    (kind, lazy_pattern(operators), lazy_pattern(kernels))
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
