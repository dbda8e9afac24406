"""What one call reads and writes, as a compiler that fuses loops sees it.

A trace has shapes but no tensors. A value is known by its number of elements and their size: views
change the shape, not these.
"""

from __future__ import annotations

import math
from enum import IntEnum

import msgspec

from stepscope.explain.flops.call import Call, Tensor, Unknown, total_bytes
from stepscope.explain.flops.cost import MATMUL_LIKE
from stepscope.explain.flops.elementwise import promoted
from stepscope.explain.flops.matmul import broadcast
from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.explain.flops.signatures import price_call
from stepscope.records.lazy_pattern import lazy_pattern

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
_SOFTMAX_COST = 0.5  # log_softmax over 30,000 to 50,000 words on an H200: 0.35 to 0.6
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
_MASK_BYTES = 1
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
    if name in _JOIN:
        return _joined(call)
    tensors = call.tensors()
    if name.startswith("aten::nll_loss") and name.endswith("backward"):
        # Zeros except at the targets: computed where it is used.
        return CallValues(
            way=Way.LOOP, reads=(_value(tensors[2]),), writes=(_value(tensors[1]),), again=False
        )
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
    backward = call.name.endswith("_backward")
    batch = _BATCH_NORM.search(call.name) is not None
    if not backward:
        return CallValues(
            way=Way.LOOP,
            reads=(_value(tensors[0]),),
            writes=(_value(tensors[0]),),
            again=batch or "group_norm" in call.name,
            sums=1 if batch else 0,
            single_as_eager=False,
        )
    gradient, given = sorted(tensors[:2], key=lambda tensor: -tensor.elements)
    return CallValues(
        way=Way.LOOP,
        reads=(_value(gradient),),
        saved=(_value(given),),
        writes=(_value(given),),
        again=True,
        sums=2 if batch or "group_norm" in call.name else 1,
        single_as_eager=False,
    )


def _joined(call: Call) -> CallValues:
    """Of a list of tensors, no dtype is recorded."""
    (parts,) = (shapes for shapes in call.lists() if shapes)
    sizes = [math.prod(dims) for dims in parts]
    return CallValues(
        way=Way.LOOP,
        reads=tuple((size, _NOT_KNOWN) for size in sizes),
        writes=((sum(sizes), _NOT_KNOWN),),
        single_as_eager=False,
    )


def _looked_up(call: Call, tensors: list[Tensor]) -> CallValues:
    """One element, or one row, for each index."""
    source, index = tensors[0], tensors[1]
    found = index.elements
    if call.name == "aten::index_select":
        found *= source.elements // source.dims[call.number(1)]
    elif call.name == "aten::embedding":
        found *= source.dims[-1]
    return CallValues(
        way=Way.LOOP,
        reads=(_value(source),),
        writes=((found, source.item_bytes),),
        looks_up=True,
        single_as_eager=False,
    )


def _scattered(call: Call, tensors: list[Tensor]) -> CallValues:
    """Each element of the source is read, and added to one of the target's in memory: whole rows
    side by side, or within a row each wherever its index says."""
    target, source = tensors[0], tensors[-1]
    last = len(target.dims) - 1
    one_by_one = last > 0 and call.number(1) % (last + 1) == last
    return CallValues(
        way=Way.LOOP,
        reads=(_value(source),),
        writes=(_value(target),),
        added_bytes=0 if one_by_one else 2 * source.size_bytes,
        added=source.elements if one_by_one else 0,
        single_as_eager=False,
    )


def _upsampled(call: Call, tensors: list[Tensor], neighbours: int) -> CallValues:
    """Forward reads each output's neighbours. Backward adds each gradient to its neighbours, the
    first ones in a buffer, the second ones in the next, and then sums up the buffers."""
    given = tensors[0]
    if "backward" not in call.name:
        places = math.prod(given.dims[:2]) * math.prod(call.numbers(1))
        return CallValues(
            way=Way.LOOP,
            reads=(_value(given),),
            writes=((places, given.item_bytes),),
            looks_up=True,
            single_as_eager=False,
        )
    return CallValues(
        way=Way.LOOP,
        reads=(_value(given),),
        writes=((math.prod(call.numbers(2)), given.item_bytes),),
        added=neighbours * given.elements,
        zeros=neighbours,
        single_as_eager=False,
    )


def _reduced(call: Call, tensors: list[Tensor]) -> CallValues:
    given = tensors[0]
    moved = price_call(call).moved
    left = max(1, (moved - given.size_bytes) // given.item_bytes) if moved > 0 else 1
    gone = call.numbers(1) if len(call) > 1 and call.has_value(1) else []
    last = len(given.dims) - 1
    over_rows = bool(gone) and last not in {place % max(1, last + 1) for place in gone}
    return CallValues(
        way=Way.LOOP,
        reads=(_value(given),),
        writes=((left, given.item_bytes),),
        again=over_rows,
        sums=int(over_rows and given.elements > _FEW_ROWS * left),
        sums_rows=over_rows,
        single_as_eager=False,
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
        costly=_costly_share(name),
    )


def _costly_share(name: str) -> float:
    if _COSTLY.search(name):
        return 1.0
    return _SOFTMAX_COST if "softmax" in name else 0.0
