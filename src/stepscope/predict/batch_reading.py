"""The step's batch as its shapes show it, and why that may not be the number of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.memory.model import find_batch
from stepscope.explain.work import rows_named
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.memory.model import ShapedCall, StepCalls
    from stepscope.records.trace import Trace

_PACKED = lazy_pattern(r"^aten::(_pack_padded_sequence|_nested_\w+)$|varlen")
# Graph nets read rows of a table of nodes by index, and add rows into it.
_BY_ROW = lazy_pattern(
    r"^(aten|torch_scatter|torch_sparse)::(index_select|index_add|scatter|gather|_sparse_mm)"
)
_LOSSES = (
    *("aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::nll_loss", "aten::mse_loss"),
    *("aten::binary_cross_entropy_with_logits", "aten::binary_cross_entropy", "aten::l1_loss"),
)
_SIDES = {"aten::conv1d": 3, "aten::conv2d": 4, "aten::conv3d": 5}  # of an input with a batch


class BatchReading(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    read_from: str
    doubt: str = ""  # why it may not be the number of samples
    one_graph: bool = False  # every step reads the same table of nodes: there may be no batch


def read_batch(trace: Trace, step: StepCalls | None) -> BatchReading | None:
    """None if no operator shows one."""
    batch = find_batch(step) if step else None
    if batch is None or step is None:
        return None
    size, read_from = batch
    doubt = _doubt_first(step, size) or _doubt_others(trace, step, size)
    graph = bool(doubt) and _reads_one_graph(trace, step, size)
    return BatchReading(size=size, read_from=read_from, doubt=doubt, one_graph=graph)


def _reads_one_graph(trace: Trace, step: StepCalls, size: int) -> bool:
    """Whether all tables that rows are picked from are as long as the input, in every step: those
    of batches of graphs differ from step to step."""
    first = _first_fed(step, size)
    if first is None or first.name != "aten::linear" or len(first.dims(0)) != 2:
        return False
    tables = {
        shapes[0][0]
        for _, shapes in _shapes_of(trace, lambda name: bool(_BY_ROW.search(name)))
        if shapes[0] and len(shapes) > 1
    }
    return tables == {size}


def _doubt_first(step: StepCalls, size: int) -> str:
    first = _first_fed(step, size)
    if first is None or first.name not in _SIDES or len(first.dims(0)) == _SIDES[first.name]:
        return ""
    return f"the input of {first.name} has no dimension for a batch"


def _doubt_others(trace: Trace, step: StepCalls, size: int) -> str:
    host = trace.host
    shaped = (host.kind == HostKind.OPERATOR) & (host.shapes >= 0)
    if rows_named(trace, host, shaped, _PACKED.search).any():
        return "its sequences are packed into one, so rows are tokens"
    embeddings = {
        tuple(call.dims(1)[:1])
        for call in step.calls
        if call.name == "aten::embedding" and len(call.dims(1)) > 1 and not _is_table(call.dims(1))
    }
    if len(embeddings) > 1:
        embeddings.discard((1,))  # positions, read once for all samples
    if len(embeddings) > 1:
        sizes = ", ".join(str(dims[0]) for dims in sorted(embeddings))
        return f"its inputs disagree: embeddings read batches of {sizes}"
    first = _first_fed(step, size)
    if first is None or first.name != "aten::linear" or len(first.dims(0)) != 2:
        return ""
    for name, shapes in _shapes_of(trace, lambda name: bool(_BY_ROW.search(name))):
        data, others = shapes[0], shapes[1:]
        if data and data[0] == size and any(dims and dims[0] != size for dims in others):
            return f"{name} picks rows of a table of {size:,}, as graph networks do with nodes"
    for name, shapes in _shapes_of(trace, _LOSSES.__contains__):
        rows = shapes[0][0] if shapes[0] else size
        if rows and rows % size and size % rows:
            return f"its inputs disagree: the loss ({name}) reads {rows:,} rows"
    return ""


def _is_table(dims: list[int]) -> bool:
    """Distances between all pairs of positions, as T5 looks them up."""
    return len(dims) == 2 and dims[0] == dims[1]


def _first_fed(step: StepCalls, size: int) -> ShapedCall | None:
    """The call that the batch was read from."""
    for call in step.calls:
        place = 1 if call.name == "aten::embedding" else 0
        if call.dims(place)[:1] == [size]:
            return call
    return None


def _shapes_of(trace: Trace, matches: Any) -> list[tuple[str, list[list[int]]]]:
    """Distinct calls with a matching name: their name and the shapes of their tensors."""
    host = trace.host
    shaped = (host.kind == HostKind.OPERATOR) & (host.shapes >= 0)
    rows = np.flatnonzero(rows_named(trace, host, shaped, matches))
    keys = dict.fromkeys(zip(host.name[rows].tolist(), host.shapes[rows].tolist(), strict=True))
    calls = []
    for name, shapes in keys:
        dims = [entry for entry in msgspec.json.decode(trace.strings[shapes]) if entry]
        if dims and not any(isinstance(entry[0], list) for entry in dims):
            calls.append((trace.strings[name], dims))
    return calls
