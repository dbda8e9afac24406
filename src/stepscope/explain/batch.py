"""How many samples a step trains on, and how sure that is.

The script may say it: its DataLoader's batch size. Else the operators that inputs reach first, the
tensors that the model was called with, the loss and the recurrent or attention layers are
witnesses. Where they contradict each other the size is in doubt, and who asks is told why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.memory.model import ATTENTION, EMBEDDING, FED, ShapedCall, StepCalls
from stepscope.records.explanation import BatchReading
from stepscope.records.memory import CapturedInputs
from stepscope.records.rank_facts import LoaderUse
from stepscope.records.trace import HostKind, Trace
from stepscope.step.work import rows_named
from stepscope.text.words import lazy_pattern

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis

_LINEAR = "aten::linear"
_PACKED = lazy_pattern(r"^aten::(_pack_padded_sequence|_nested_\w+)$|varlen")
# Graph nets read rows of a table of nodes by index, and add rows into it.
_BY_ROW = lazy_pattern(
    r"^(aten|torch_scatter|torch_sparse)::(index_select|index_add|scatter|gather|_sparse_mm)"
)
_LOSSES = (
    *("aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::nll_loss", "aten::mse_loss"),
    *("aten::binary_cross_entropy_with_logits", "aten::binary_cross_entropy", "aten::l1_loss"),
    *("aten::smooth_l1_loss", "aten::huber_loss", "aten::kl_div"),
)
_SCORES = ("aten::softmax", "aten::_softmax", "aten::_safe_softmax")
_RECURRENT = lazy_pattern(r"^aten::(lstm|gru|rnn_tanh|rnn_relu)$")
_SIDES = {"aten::conv1d": 3, "aten::conv2d": 4, "aten::conv3d": 5}  # of an input with a batch


def read_batch(analysis: RankAnalysis) -> BatchReading | None:
    """None if nothing shows one."""
    return analysis.compute_once(_read_batch)


def _read_batch(analysis: RankAnalysis) -> BatchReading | None:
    inputs = analysis.inputs
    captured = inputs.memory.captured
    return find_batch(
        analysis.trace,
        analysis.forward_calls,
        loaders=inputs.loaders,
        inputs=captured.inputs if captured else (),
    )


def find_batch(
    trace: Trace,
    step: StepCalls | None,
    *,
    loaders: Iterable[LoaderUse] = (),
    inputs: Iterable[CapturedInputs] = (),
) -> BatchReading | None:
    """`loaders` feed the training; `inputs`: what outermost modules were called with."""
    calls = tuple(inputs)
    reading = _find_size(trace, step, loaders, calls)
    if reading is None:
        return None
    with_batch = (call.calls for call in calls if _has_side(call, reading.size))
    return replace(reading, calls=max(with_batch, default=None))


def _has_side(call: CapturedInputs, size: int) -> bool:
    return any(shape[:1] == [size] for shape in call.shapes)


def _find_size(
    trace: Trace,
    step: StepCalls | None,
    loaders: Iterable[LoaderUse],
    inputs: Iterable[CapturedInputs],
) -> BatchReading | None:
    first = _first_fed(step) if step else None
    per_step = step.batches_per_step if step else 1
    given = [loader.batch_size for loader in loaders if loader.batch_size]
    if given:
        return _by_loader(given, first, step)
    sides = _first_sides(inputs)
    if first is None or step is None:
        # A compiled step shows no operators; what its model was called with has to agree.
        return _single(sides, per_step) if len(sides) == 1 else None
    size, read_from = _rows(first)[0], _words(first)
    time_first = _find_time_first(trace, first, per_step)
    if time_first is not None:
        return time_first
    if len(sides) == 1 and size % min(sides) == 0 and 1 < min(sides) < size:
        return _single(sides, per_step)  # pictures, views or frames that the model has joined
    doubt = _doubt_trace(trace, step, first)
    if not doubt and sides and size not in sides:
        others = ", ".join(map(str, sorted(sides)))
        doubt = f"its inputs disagree: the model is called with {others}"
    graph = bool(doubt) and _reads_one_graph(trace, first)
    return BatchReading(
        size=size, read_from=read_from, doubt=doubt, one_graph=graph, per_step=per_step
    )


def _by_loader(sizes: list[int], first: ShapedCall | None, step: StepCalls | None) -> BatchReading:
    """A DataLoader that yields single items may give batches that its dataset has joined."""
    size = sizes[0]
    rows = _rows(first)[0] if first else size
    doubt = ""
    if len(set(sizes)) > 1:
        doubt = f"its DataLoaders give batches of {', '.join(map(str, sorted(set(sizes))))}"
    elif size == 1 < rows:
        doubt = f"its items may hold several: the model reads {rows:,}"
    # Several passes may share a batch; evaluation fetches others.
    passes = step.micro_batches if step else 1
    fetches = round(step.fetches) if step else 0
    return BatchReading(
        size=size,
        read_from="the DataLoader's batch_size",
        doubt=doubt,
        per_step=min(fetches or passes, passes),
    )


def _single(sides: dict[int, str], per_step: int | None) -> BatchReading:
    ((size, words),) = sides.items()
    return BatchReading(size=size, read_from=words, per_step=per_step)


def _first_sides(inputs: Iterable[CapturedInputs]) -> dict[int, str]:
    """The first sides of what the model was called with, and words for each. A side of 1 is the
    same for all samples, unless there is no other."""
    sides: dict[int, str] = {}
    for call in inputs:
        for shape in call.shapes:
            if shape and shape[0] > 0:
                sides.setdefault(shape[0], f"what {call.module} is called with: {shape}")
    return (
        sides if set(sides) == {1} else {side: words for side, words in sides.items() if side > 1}
    )


# The operator that inputs reach first.


def _first_fed(step: StepCalls) -> ShapedCall | None:
    for call in step.calls:
        rows = _rows(call)
        if call.name == EMBEDDING and (len(rows) < 2 or (rows[0] == 1 and _is_fed_more(step))):
            continue  # positions, most likely: read once for all samples
        if rows and rows[0] > 0:
            return call
    return None


def _rows(call: ShapedCall) -> list[int]:
    """The shape of what the layer reads; empty if it is no layer."""
    if call.name not in FED:
        return []
    return call.dims(1 if call.name == EMBEDDING else 0)


def _words(call: ShapedCall) -> str:
    return f"the first {call.name}, whose input is {_rows(call)}"


def _is_fed_more(step: StepCalls) -> bool:
    """Whether another embedding reads several samples."""
    others = (call.dims(1) for call in step.calls if call.name == EMBEDDING)
    return any(len(dims) > 1 and dims[0] > 1 for dims in others)


# Witnesses against it.


def _find_time_first(trace: Trace, first: ShapedCall, per_step: int | None) -> BatchReading | None:
    """The batch of sequences that are laid out time first, as recurrent layers and attention over
    them show it; None if the batch comes first."""
    rows = _rows(first)
    sides = {EMBEDDING: 2, _LINEAR: 3}.get(first.name)
    if len(rows) != sides or rows[0] == rows[1]:
        return None
    length, batch = rows[0], rows[1]
    for name, shapes in _shapes_of(trace, _RECURRENT.search):
        given, states = shapes[0], [dims for dims in shapes[1:] if len(dims) == 3]
        if given[:2] == [length, batch] and states and states[0][1] == batch:
            read_from = f"the state of {name}: {states[0]}"
            return BatchReading(size=batch, read_from=read_from, per_step=per_step)
    scores = [
        (name, shapes[0][:-2], shapes[0][-2], shapes[0][-1])
        for name, shapes in _shapes_of(trace, _SCORES.__contains__)
        if len(shapes[0]) > 2
    ]
    # Of fused attention: queries by keys.
    scores += [
        (name, shapes[0][:1], shapes[0][-2], shapes[1][-2])
        for name, shapes in _shapes_of(trace, lambda name: name == ATTENTION)
        if len(shapes) > 1 and len(shapes[0]) == len(shapes[1]) == 4
    ]
    over = {queries for _, _, queries, keys in scores if queries == keys}
    if length not in over or batch in over:
        return None
    for name, outer, queries, keys in scores:
        if queries == keys == length and outer[0] % batch == 0:
            where = f"{name}, which reads {outer[0]} times {length} positions"
            return BatchReading(
                size=batch if outer[0] % length else length,
                read_from=where if outer[0] % length else _words(first),
                doubt="" if outer[0] % length else f"it may be the length of sequences ({where})",
                per_step=per_step,
            )
    return None


def _doubt_trace(trace: Trace, step: StepCalls, first: ShapedCall) -> str:
    """Say why what the first layer reads may not be the samples; empty if nothing speaks against
    it."""
    rows = _rows(first)
    size = rows[0]
    if first.name in _SIDES and len(rows) != _SIDES[first.name]:
        return f"the input of {first.name} has no dimension for a batch"
    host = trace.host
    shaped = (host.kind == HostKind.OPERATOR) & (host.shapes >= 0)
    if rows_named(trace, host, shaped, _PACKED.search).any():
        return "its sequences are packed into one, so rows are tokens"
    read = (call.dims(1) for call in step.calls if call.name == EMBEDDING)
    # A square is a table of distances between all pairs of positions, as T5 looks them up.
    embeddings = {
        dims[0] for dims in read if len(dims) > 1 and not (len(dims) == 2 and dims[0] == dims[1])
    }
    if len(embeddings) > 1:
        embeddings.discard(1)  # positions, read once for all samples
    if len(embeddings) > 1:
        sizes = ", ".join(map(str, sorted(embeddings)))
        return f"its inputs disagree: embeddings read batches of {sizes}"
    flat = first.name == _LINEAR and len(rows) == 2
    for name, shapes in _shapes_of(trace, _BY_ROW.search) if flat else ():
        data, others = shapes[0], shapes[1:]
        if data and data[0] == size and any(dims and dims[0] != size for dims in others):
            return f"{name} picks rows of a table of {size:,}, as graph networks do with nodes"
    losses = [(name, shapes[0][0]) for name, shapes in _shapes_of(trace, _LOSSES.__contains__)]
    losses = [(name, count) for name, count in losses if count > 0]
    for name, count in losses if flat else ():
        if count % size and size % count:
            return f"its inputs disagree: the loss ({name}) reads {count:,} rows"
    # Pictures, views or points that are joined before the first layer.
    fewer = {count for _, count in losses}
    if len(fewer) == 1 and 1 < min(fewer) < size and size % min(fewer) == 0:
        return f"its inputs disagree: the loss ({losses[0][0]}) reads {min(fewer):,} rows"
    last = [rows[0] for call in step.calls if (rows := _rows(call))][-1]
    if 1 < last < size and size % last == 0:
        return f"its inputs disagree: the last layer reads {last:,} rows"
    return ""


def _reads_one_graph(trace: Trace, first: ShapedCall) -> bool:
    """Whether all tables that rows are picked from are as long as the input, in every step: those
    of batches of graphs differ from step to step."""
    rows = _rows(first)
    if first.name != _LINEAR or len(rows) != 2:
        return False
    tables = {
        shapes[0][0]
        for _, shapes in _shapes_of(trace, _BY_ROW.search)
        if shapes[0] and len(shapes) > 1
    }
    return tables == {rows[0]}


def _shapes_of(trace: Trace, matches: Callable[[str], object]) -> list[tuple[str, list[list[int]]]]:
    """Distinct calls with a matching name: their name and the shapes of their tensors, those in
    lists among them."""
    host = trace.host
    shaped = (host.kind == HostKind.OPERATOR) & (host.shapes >= 0)
    rows = np.flatnonzero(rows_named(trace, host, shaped, matches))
    keys = dict.fromkeys(zip(host.name[rows].tolist(), host.shapes[rows].tolist(), strict=True))
    calls = []
    for name, shapes in keys:
        given = [entry for entry in msgspec.json.decode(trace.strings[shapes]) if entry]
        lists = (entry if isinstance(entry[0], list) else [entry] for entry in given)
        dims = [entry for entry in chain.from_iterable(lists) if entry]
        if dims and all(isinstance(side, int) for entry in dims for side in entry):
            calls.append((trace.strings[name], dims))
    return calls
