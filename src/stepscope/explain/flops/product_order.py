"""Which kernels of a replay compute which products, where one product takes several kernels.

A library may compute a product in parts, or between transforms (FFT, Winograd). Operators and
kernels have the same order, so the best assignment that keeps it is found by dynamic programming:
every product should have a kernel, and what lies between products must fit what lies between their
kernels. A product stands twice in the lattice: before and after its first kernel that multiplies.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.explain.flops.kernel_kinds import (
    COPY,
    MEMSET,
    ONE_BY_ONE,
    helps_product,
    kernel_kind,
    operator_kinds,
)
from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.records.trace import ABSENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.explain.arrays import Bools, Indices

    Scores = NDArray[np.float64]

_LARGEST = 20_000_000  # of operators x kernels; a lattice takes six bytes for each
_NEVER = -1e9
# Scores, in units of a kernel that fits its operator.
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


def assign_products(
    calls: Sequence[CapturedCall], kernels: Sequence[str], multiplies: Sequence[bool]
) -> list[int]:
    """For each kernel that multiplies or helps a product: the place of its operator. All are -1
    where a product would have no kernel, or a kernel that multiplies no operator."""
    slots = _CallSlots(calls)
    nothing = [ABSENT] * len(kernels)
    if not slots.product.any() or len(slots.place) * len(kernels) > _LARGEST:
        return nothing
    path = _find_path(slots, kernels, multiplies)
    products = {place for place, call in enumerate(calls) if call.products}
    found = [
        place if main or (place in products and helps_product(name)) else ABSENT
        for place, name, main in zip(path, kernels, multiplies, strict=True)
    ]
    joined = {place for place, main in zip(found, multiplies, strict=True) if main}
    return found if ABSENT not in joined and products <= joined else nothing


class _Gains(NamedTuple):
    """Scores of one kernel, for each slot."""

    enter: Scores  # it is the first of the slot
    before: Scores  # the slot has others, none of which multiplies
    after: Scores  # it does
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
        self._foreign: Bools = np.array([_is_foreign(call.name) for call in own], np.bool_)
        self._bias = np.array([call.bias for call in own], np.str_)
        self._kinds = [() if call.products else operator_kinds(call.name) for call in own]
        self._unknown: Bools = np.array(
            [call.name in kinds for call, kinds in zip(own, self._kinds, strict=True)], np.bool_
        )
        self.skipped: Scores = np.where(
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


def _is_foreign(name: str) -> bool:
    """An operator of another package, which may multiply: nobody knows its FLOPs."""
    return "::" in name and not name.startswith(_TORCHS)


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
        enter, origins[number] = _enter(slots, before, after, costs, nothing_yet)
        gains = slots.gains(name, multiplies=main, again=name == product)
        product = name if main else product
        before, after, moves[number] = _advance(slots, before, after, enter, gains)
        nothing_yet -= _UNJOINED
    ends = np.stack((before - np.where(slots.product, _PRODUCT, -_NEVER), after))
    last = int(np.argmax(ends - (costs[-1] - costs[1:])))
    return _trace_back(slots, moves, origins, (last % count, last // count))


def _enter(
    slots: _CallSlots, before: Scores, after: Scores, costs: Scores, nothing_yet: float
) -> tuple[Scores, NDArray[np.int32]]:
    """The best score with which each slot is entered, and from where: slot x 2 + layer, or -1."""
    count = len(slots.place)
    without = np.where(slots.product, before - _PRODUCT, _NEVER)
    leave = np.concatenate(([nothing_yet], np.maximum(without, after) + costs[1:]))[:-1]
    layer = np.concatenate(([0], (after >= without).astype(np.int64)))[:-1]
    best = np.maximum.accumulate(leave)
    is_new = np.concatenate(([True], leave[1:] > best[:-1]))
    at = np.maximum.accumulate(np.where(is_new, np.arange(count), 0))
    origin = np.where(at > 0, 2 * (at - 1) + layer[at], ABSENT)
    return best - costs[:-1], origin.astype(np.int32)


def _advance(
    slots: _CallSlots, before: Scores, after: Scores, enter: Scores, gains: _Gains
) -> tuple[Scores, Scores, NDArray[np.int8]]:
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
