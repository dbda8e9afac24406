"""Find which operators of a pass become one fused loop, and the bytes that each call and
each loop reads and writes.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from stepscope.explain.flops.call import MATMUL_LIKE, Call, Tensor, Unknown, total_bytes
from stepscope.explain.flops.memory_bound import VIEWS, promoted
from stepscope.explain.flops.prices import price_call
from stepscope.explain.flops.products import broadcast
from stepscope.predict.fitted import fitted
from stepscope.text.words import lazy_pattern

# Loops over as many elements fuse if one reads what the other made, or both read the same. What is
# computed from sums of a loop belongs to that loop. A library call ends the loops whose results it
# needs, for all that depends on the call. Each loop reads once what it did not make, and writes
# what others need. Values that only backward needs are not written: the compiler computes them
# again from what is there.

_REMEMBERED = 8  # values of a size
_MASK_BYTES = 1
_ITEMS = (4, 2, 8, 1)  # bytes


class FusedLoop(msgspec.Struct, frozen=True, kw_only=True):
    """One loop of the compiled pass."""

    calls: tuple[int, ...]  # places in the pass
    bytes_moved: int
    sums_bytes: int = 0  # of these: read for sums over all rows
    added: int = 0  # elements that are added to memory one by one
    kernels: int  # sums over all rows need more; none for zeros that others compute


class _Made:
    """A value of the pass; `loop` is None if a library or nobody in the pass made it."""

    __slots__ = ("by_library", "is_result", "is_sum", "key", "loop", "reads", "sources", "written")

    def __init__(
        self,
        key: Value,
        loop: _Loop | None,
        sources: Sequence[_Made] = (),
        *,
        is_sum: bool = False,
        is_result: bool = False,
    ) -> None:
        self.key, self.loop, self.is_sum = key, loop, is_sum
        self.is_result = is_result  # of an operator of forward, which kept it
        self.sources = sources  # what the library call read that made it
        self.reads = 0
        self.by_library = False  # read by a library
        self.written = loop is None

    @property
    def size_bytes(self) -> int:
        return self.key[0] * self.key[1]


class _Loop:
    """A loop while the pass is walked."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.calls: list[int] = []
        self.last_call = -1
        self.outside: dict[int, _Made] = {}  # read, by identity
        self.made: list[_Made] = []
        self.again_bytes = self.sums_bytes = self.added = 0
        self.kernels = 1
        self.is_open = True
        self.is_constant = True

    def absorb(self, other: _Loop) -> None:
        self.calls += other.calls
        self.last_call = max(self.last_call, other.last_call)
        self.outside |= other.outside
        self.made += other.made
        self.again_bytes += other.again_bytes
        self.sums_bytes += other.sums_bytes
        self.added += other.added
        self.kernels += other.kernels - 1
        self.is_constant &= other.is_constant
        for value in other.made:
            value.loop = self
        other.is_open = False

    def close(self) -> None:
        """With the loops that it needs: none of them may wait for what comes after."""
        self.is_open = False
        for value in self.outside.values():
            if value.loop and value.loop.is_open:
                value.loop.close()

    def finish(self, *, backward: bool) -> FusedLoop:
        if self.is_constant and not any(value.written for value in self.made):
            return FusedLoop(calls=tuple(sorted(self.calls)), bytes_moved=0, kernels=0)
        inside = {id(value) for value in self.made}
        left = [v for v in self.made if v.written or self._is_result(v, backward)]
        # Nothing may be left beside sums over all rows, whose own kernels compute the rest.
        only_sums = self.kernels > 1 and all(value.is_sum for value in left)
        read = sum(v.size_bytes for key, v in self.outside.items() if key not in inside)
        if only_sums:
            read = 0  # nobody but the sums' own kernels reads it
        written = sum(value.size_bytes for value in left)
        return FusedLoop(
            calls=tuple(sorted(self.calls)),
            bytes_moved=read + written + self.again_bytes,
            sums_bytes=self.sums_bytes,
            added=self.added,
            kernels=self.kernels - only_sums,
        )

    def _is_result(self, value: _Made, backward: bool) -> bool:
        """Never read: a gradient, or a mask that backward needs."""
        return not value.reads and (backward or value.key[1] == _MASK_BYTES)


def fuse_loops(calls: Sequence[CallValues], *, backward: bool) -> list[FusedLoop]:
    """The loops of one pass, in the order of their first call."""
    walk = _PassWalk(backward)
    for place, call in enumerate(calls):
        if call.way == Way.LOOP:
            walk.add_to_loop(place, call)
        else:
            walk.end_loops(call)
    finished = [loop.finish(backward=backward) for loop in walk.loops]
    return sorted(finished, key=lambda loop: loop.calls)


class _PassWalk:
    def __init__(self, backward: bool) -> None:
        self._backward = backward
        self._values: defaultdict[Value, deque[_Made]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )
        self.loops: list[_Loop] = []
        self._gradient: _Made | None = None  # that the call before multiplied,
        self._by_library = False  # as a matrix or by elements

    def end_loops(self, call: CallValues) -> None:
        """All that a library's call reads is written, and the loops that made it are complete."""
        if call.way == Way.ALONE and self.loops and self.loops[-1].is_constant:
            for value in self.loops[-1].made:  # the zeros that a scatter adds to
                value.written = True
        chosen = self._find_reads(call, by_library=True)
        for value in chosen:
            value.reads += 1
            value.written = value.by_library = True
            if value.loop and value.loop.is_open:
                value.loop.close()
        for key in call.writes:
            self._values[key].append(_Made(key, None, chosen))

    def add_to_loop(self, place: int, call: CallValues) -> None:
        chosen = self._find_reads(call)
        loop = self._join(call.elements, chosen)
        loop.calls.append(place)
        loop.last_call = place
        loop.is_constant &= not (call.reads or call.saved or call.saved_results)
        for value in chosen:
            self._read_in(loop, value, call)
        for key in call.saved:
            self._read_in(loop, self._find_saved(loop, key), call)
        for key in call.saved_results:
            self._read_in(loop, _Made(key, None, is_result=True), call)
        if call.again:
            # A second kernel reads all that the first one read; a sum may also read what is written
            # for others. Sums over all rows begin as sums of parts, and end in a kernel each.
            loop.kernels += 1 + call.sums
            again_bytes = sum(value.size_bytes for value in loop.outside.values())
            if not call.saved:
                again_bytes = min(again_bytes, sum(value.size_bytes for value in chosen))
            loop.again_bytes += again_bytes
            loop.sums_bytes += again_bytes if call.sums else 0
        loop.again_bytes += call.added_bytes
        loop.added += call.added
        loop.kernels += call.zeros
        of_sums = any(value.loop is loop and value.is_sum for value in chosen)
        is_sum = call.sums_rows or (of_sums and call.elements < loop.elements)
        if call.in_place and chosen[0] in self._values[chosen[0].key]:
            self._values[chosen[0].key].remove(chosen[0])
        for elements, item in call.writes:
            key = (elements, item or chosen[0].key[1])
            made = _Made(key, loop, is_sum=is_sum)
            loop.made.append(made)
            self._values[made.key].append(made)

    def _find_reads(self, call: CallValues, *, by_library: bool = False) -> list[_Made]:
        """Backward of a product multiplies one gradient twice: by each factor."""
        chosen: list[_Made] = []
        gradient, self._gradient = self._gradient, None
        is_second = call.multiplies and gradient is not None and gradient.key in call.reads
        is_second &= self._by_library == by_library
        for key in call.reads:
            if is_second and gradient and key == gradient.key and gradient not in chosen:
                chosen.append(gradient)
            elif is_second:
                chosen.append(_Made(key, None))  # kept by forward
            else:
                chosen.append(self._find(key, chosen, by_library=by_library))
        if call.multiplies and self._backward and not is_second:
            self._gradient = next((one for one in chosen if one.loop or one.sources), None)
            self._by_library = by_library
        return chosen

    def _read_in(self, loop: _Loop, value: _Made, call: CallValues) -> None:
        value.reads += 1
        if value.loop is loop or call.looks_up:
            return
        loop.outside[id(value)] = value
        if value.loop:
            value.written = True
            if value.loop.is_open and value.loop.elements != loop.elements:
                value.loop.close()

    def _join(self, elements: int, chosen: Sequence[_Made]) -> _Loop:
        """The open loop over as many elements that made or read one of these values, else one that
        a library call has ended for others only."""
        loops: list[_Loop] = []
        for value in chosen:
            readers = (loop for loop in self.loops[-_REMEMBERED:] if id(value) in loop.outside)
            for loop in [value.loop] if value.loop else readers:
                # What a loop sums up, and what is computed from the sums, ends in its own kernels.
                is_sum = value.loop is loop and value.key[0] == elements
                if loop.elements == elements or is_sum:
                    loops.append(loop)
        distinct = list(dict.fromkeys(one for one in loops if one.is_open))
        if distinct:
            first, *others = distinct
            for other in others:
                first.absorb(other)
                self.loops.remove(other)
            return first
        recent = [one for one in loops if one in self.loops[-_REMEMBERED:]]
        for one in recent:
            makes = any(value.loop is one and not value.reads for value in chosen)
            if makes and not any(_needs(value, one) for value in chosen):
                return one
        loop = _Loop(elements)
        self.loops.append(loop)
        return loop

    def _find(self, key: Value, chosen: Sequence[_Made], *, by_library: bool = False) -> _Made:
        """Without tensors: the newest value of this size that nobody read, else a residual.

        A loop's input that only loops read is more likely to be read again than a library's.
        """
        if not key[1]:  # a list's dtype is not recorded: that of the newest unread value
            keys = [(key[0], item) for item in _ITEMS]
            unread = (one for one in keys if any(not value.reads for value in self._values[one]))
            key = next(unread, keys[0])
        values = [value for value in reversed(self._values[key]) if value not in chosen]
        for value in values:
            if not value.reads:
                return value
        if self._backward and chosen:
            return _Made(key, None)  # kept by forward
        for value in values:
            if value.written if by_library else not value.by_library and value.loop:
                return value
        for value in values:
            if value.loop and not by_library:
                return value
        if not values:
            values = [_Made(key, None)]
            self._values[key].append(values[0])
        return values[0]

    def _find_saved(self, loop: _Loop, key: Value) -> _Made:
        """What forward kept; a loop reads one of a size once."""
        for value in loop.outside.values():
            kept = value.loop is None and not value.is_result
            if value.key == key and kept and value not in self._values[value.key]:
                return value
        return _Made(key, None)


def _needs(value: _Made, loop: _Loop) -> bool:
    """Whether something outside the loop, which waits for the loop, made this value."""
    if value.loop is loop:
        return False
    first = min(loop.calls)  # what ended before cannot wait for it
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if one.loop is loop:
            return True
        if one.loop is None:
            waiting += [source for source in one.sources if id(source) not in seen]
            seen.update(map(id, one.sources))
        elif id(one.loop) not in seen and one.loop.last_call > first:
            seen.add(id(one.loop))
            waiting += one.loop.outside.values()
    return False


# What one call reads and writes, as a compiler that fuses loops sees it.
#
# A trace has shapes but no tensors. A value is known by its number of elements and their size:
# views change the shape, not these.

Value = tuple[int, int]  # elements, bytes of one: 0 if not known


class Way(IntEnum):
    """How an operator runs in compiled code."""

    LIBRARY = 0  # a kernel of a library, as without the compiler
    LOOP = 1  # a loop that fuses with its neighbours
    ALONE = 2  # a loop of its own: it scatters, pools, or is not known


class CallValues(msgspec.Struct, frozen=True, kw_only=True):
    """Of one call."""

    way: Way
    reads: tuple[Value, ...] = ()
    saved: tuple[Value, ...] = ()  # read in backward, kept by forward
    saved_results: tuple[Value, ...] = ()  # also kept, but what forward wrote, not what it read
    writes: tuple[Value, ...] = ()
    again: bool = False  # statistics over all rows: what it reads is read a second time
    sums: int = 0  # over all rows, so many
    sums_rows: bool = False  # such a sum is all that it writes
    added_bytes: int = 0  # moved besides: rows that are added to memory
    added: int = 0  # elements that are added to memory one by one, each to a place of its own
    zeros: int = 0  # buffers that are filled before something is added to them
    multiplies: bool = False  # backward of a product makes two such calls with one gradient
    converts: bool = False  # copies into another dtype, and nothing else
    in_place: bool = False  # the first value that it reads is no more
    looks_up: bool = False  # a few elements of what it reads: nothing is written out for it
    costly: float = 0.0  # share of its time that arithmetic takes: fusing makes it no shorter
    single_as_eager: bool = True  # unfused, it takes what it took

    @property
    def elements(self) -> int:
        """Of its loop."""
        every = (*self.reads, *self.saved, *self.saved_results, *self.writes)
        return max((elements for elements, _ in every), default=0)


_BATCH_NORM = lazy_pattern(r"^aten::(?:\w*batch_norm\w*)$")
_NORM = lazy_pattern(r"^aten::(?:native_layer_norm|_fused_rms_norm|native_group_norm)(_backward)?$")
_REDUCTION = lazy_pattern(
    r"^aten::(?:sum|mean|amax|amin|prod|nansum|logsumexp|norm|std|var|any|all|max|min|argmax|"
    r"argmin|count_nonzero|linalg_vector_norm)$"
)
_LOOKUP = lazy_pattern(r"^aten::(?:gather|index_select|embedding|nll_loss\w*)$")
_ALONE = lazy_pattern(
    r"scatter|index_(?:put|add|copy|fill|reduce)|embedding_dense_backward|pool|upsample|sort|topk|unique|nonzero|cumsum|"
    r"cumprod|_foreach|_fused_|_local_scalar|item|_amp_|^(?!aten::)"
)
# Backward of these reads what forward wrote, which the next product needs as well.
_KEEPS_RESULT = lazy_pattern(r"^aten::(?:threshold|_softmax)_backward")
_COSTLY = lazy_pattern(r"gelu|erf")
_SOFTMAX_COST = fitted("kernels.fused_softmax")
_FILL = lazy_pattern(r"^aten::(?:fill_|zero_)$")
_SCATTER_ADD = ("aten::scatter_add_", "aten::scatter_add")
# Those that the compiler writes as loops, and how many elements make one.
_UPSAMPLE = lazy_pattern(r"^aten::upsample_(nearest2d|bilinear2d|bicubic2d)(_backward)?$")
_NEIGHBOURS = {"nearest2d": 1, "bilinear2d": 4, "bicubic2d": 16}
_OF_SCATTER = 3  # target, index and source
_COPY = ("aten::copy_", "aten::_copy_from")
_JOIN = ("aten::cat", "aten::_cat", "aten::concat", "aten::stack")
_PRODUCTS = ("aten::mm", "aten::bmm")
_PAIR = 2
_FEW_ROWS = 1024  # that one kernel sums up; more are summed in parts first
_LONG_ROW = 8192  # elements: a longer one does not stay in registers, so it is read twice
_NOT_KNOWN = 0  # bytes of an element


def describe_call(call: Call) -> CallValues | None:
    """None for a call without work of its own, such as a view."""
    if call.name in VIEWS:
        return None
    try:
        return _describe(call)
    except (Unknown, KeyError, IndexError, ValueError, TypeError):
        return CallValues(way=Way.LIBRARY if call.name in MATMUL_LIKE else Way.ALONE)


def is_alone(name: str) -> bool:
    """Whether an operator of this name fuses with nothing, whatever its shapes."""
    return _ALONE.search(name) is not None and name not in _SCATTER_ADD


def _describe(call: Call) -> CallValues:
    name = call.name
    if name in MATMUL_LIKE:
        return _library(call)
    if _NORM.search(name) or _BATCH_NORM.search(name):
        return _norm(call)
    if name in _JOIN:  # of a list of tensors, no dtype is recorded
        (parts,) = (shapes for shapes in call.lists() if shapes)
        sizes = [math.prod(dims) for dims in parts]
        parts_read = tuple((size, _NOT_KNOWN) for size in sizes)
        return _rewritten(reads=parts_read, writes=((sum(sizes), _NOT_KNOWN),))
    tensors = call.tensors()
    if name.startswith("aten::nll_loss") and name.endswith("backward"):
        # Zeros except at the targets: computed where it is used.
        reads, writes = _value(tensors[2]), _value(tensors[1])
        return CallValues(way=Way.LOOP, reads=(reads,), writes=(writes,))
    if name in _SCATTER_ADD and len(tensors) == _OF_SCATTER:
        return _scattered(call, tensors)
    if resized := _UPSAMPLE.search(name):
        return _upsampled(call, tensors, _NEIGHBOURS[resized[1]])
    if is_alone(name) or not tensors:
        return CallValues(way=Way.ALONE, reads=tuple(map(_value, tensors)))
    if _FILL.search(name):
        return CallValues(way=Way.LOOP, writes=(_value(tensors[0]),))
    if name in _COPY:
        target, source = map(_value, tensors[:2])
        converts = target[1] != source[1]
        return CallValues(way=Way.LOOP, reads=(source,), writes=(target,), converts=converts)
    if _LOOKUP.search(name):
        return _looked_up(call, tensors)
    if _REDUCTION.search(name):
        return _reduced(call, tensors)
    return _pointwise(call, tensors)


def _value(tensor: Tensor) -> Value:
    return tensor.elements, tensor.item_bytes


def _rewritten(**values: Any) -> CallValues:
    """Describe a loop whose kernel is another one than eager code's, also if nothing fuses."""
    return CallValues(way=Way.LOOP, single_as_eager=False, **values)


def _library(call: Call) -> CallValues:
    """The result's size is what the formula moves besides the arguments."""
    tensors = call.tensors()
    if "backward" in call.name:
        gradients = tensors[1:4] if "attention" in call.name else tensors[1:2]
        return CallValues(
            way=Way.LIBRARY,
            reads=(_value(tensors[0]),),
            writes=tuple(map(_value, gradients)),
        )
    moved = price_call(call).moved
    item = tensors[-1].item_bytes
    out = max(0, moved - total_bytes(tensors)) // item if moved >= 0 else 0
    return CallValues(
        way=Way.LIBRARY,
        reads=tuple(map(_value, tensors)),
        writes=((out, item),),
        multiplies=call.name in _PRODUCTS,
    )


def _norm(call: Call) -> CallValues:
    """Batch norm has statistics over all samples; backward of any norm sums the weights'
    gradients over all rows."""
    tensors = call.tensors()
    is_batch = _BATCH_NORM.search(call.name) is not None
    is_whole = is_batch or "group_norm" in call.name
    if not call.name.endswith("_backward"):
        value = _value(tensors[0])
        return _rewritten(reads=(value,), writes=(value,), again=is_whole, sums=int(is_batch))
    gradient, given = sorted(tensors[:2], key=lambda tensor: -tensor.elements)
    return _rewritten(
        reads=(_value(gradient),),
        saved=(_value(given),),
        writes=(_value(given),),
        again=True,
        sums=1 + is_whole,
    )


def _looked_up(call: Call, tensors: list[Tensor]) -> CallValues:
    """One element, or one row, for each index."""
    source, index = tensors[0], tensors[1]
    found = index.elements
    if call.name == "aten::index_select":
        found *= source.elements // source.dims[call.number(1)]
    elif call.name == "aten::embedding":
        found *= source.dims[-1]
    writes = ((found, source.item_bytes),)
    return _rewritten(reads=(_value(source),), writes=writes, looks_up=True)


def _scattered(call: Call, tensors: list[Tensor]) -> CallValues:
    """Each element of the source is read, and added to one of the target's in memory: whole rows
    side by side, or within a row each wherever its index says."""
    target, source = tensors[0], tensors[-1]
    last = len(target.dims) - 1
    one_by_one = last > 0 and call.number(1) % (last + 1) == last
    return _rewritten(
        reads=(_value(source),),
        writes=(_value(target),),
        added_bytes=0 if one_by_one else 2 * source.size_bytes,
        added=source.elements if one_by_one else 0,
    )


def _upsampled(call: Call, tensors: list[Tensor], neighbours: int) -> CallValues:
    """Forward reads each output's neighbours. Backward adds each gradient to its neighbours, the
    first ones in a buffer, the second ones in the next, and then sums up the buffers."""
    given = tensors[0]
    if "backward" not in call.name:
        places = math.prod(given.dims[:2]) * math.prod(call.numbers(1))
        writes = ((places, given.item_bytes),)
        return _rewritten(reads=(_value(given),), writes=writes, looks_up=True)
    return _rewritten(
        reads=(_value(given),),
        writes=((math.prod(call.numbers(2)), given.item_bytes),),
        added=neighbours * given.elements,
        zeros=neighbours,
    )


def _reduced(call: Call, tensors: list[Tensor]) -> CallValues:
    given = tensors[0]
    moved = price_call(call).moved
    left = max(1, (moved - given.size_bytes) // given.item_bytes) if moved > 0 else 1
    gone = call.numbers(1) if len(call) > 1 and call.has_value(1) else []
    last = len(given.dims) - 1
    over_rows = bool(gone) and last not in {place % max(1, last + 1) for place in gone}
    return _rewritten(
        reads=(_value(given),),
        writes=((left, given.item_bytes),),
        again=over_rows,
        sums=int(over_rows and given.elements > _FEW_ROWS * left),
        sums_rows=over_rows,
    )


def _pointwise(call: Call, tensors: list[Tensor]) -> CallValues:
    name = call.name
    out = math.prod(broadcast(*(tensor.dims for tensor in tensors)))
    item = promoted(tensors)
    values = tuple(map(_value, tensors))
    saved: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    if name.endswith(("_backward", "_backward_data")):
        values, saved = values[:1], values[1:]
        if _KEEPS_RESULT.search(name):
            saved, results = (), saved
    costly = _SOFTMAX_COST if "softmax" in name else 0.0
    if _COSTLY.search(name):
        costly = 1.0
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place:
        out, item = values[0]
    writes: tuple[Value, ...] = ((out, item),)
    if "dropout" in name and not (saved or results):
        writes = (*writes, (out, _MASK_BYTES))
    return CallValues(
        way=Way.LOOP,
        reads=values,
        saved=saved,
        saved_results=results,
        writes=writes,
        multiplies=name == "aten::mul" and len(values) == _PAIR and values[0][0] == values[1][0],
        in_place=in_place,
        again="softmax" in name and bool(tensors[0].dims) and tensors[0].dims[-1] > _LONG_ROW,
        costly=costly,
    )
