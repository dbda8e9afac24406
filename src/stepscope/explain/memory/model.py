"""What a step's operator shapes say about the model: its batch, its casts, a transformer."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.memory.lifetimes import BACKWARD
from stepscope.explain.memory.theory import Transformer
from stepscope.records.dtypes import PROFILER_BYTES
from stepscope.records.explanation import Steps
from stepscope.records.trace import HostKind, Trace
from stepscope.step.call_tree import enclosing, outermost
from stepscope.step.work import rows_named
from stepscope.trace.links import nearest, nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.step.arrays import Indices


ATTENTION = "aten::scaled_dot_product_attention"
_SOFTMAX = ("aten::softmax", "aten::_softmax")
_LINEAR = "aten::linear"
_CONVOLUTIONS = tuple(
    f"aten::{kind}{dims}d" for kind in ("conv", "conv_transpose") for dims in (1, 2, 3)
)
FED = ("aten::embedding", _LINEAR, *_CONVOLUTIONS)  # one of them meets the batch first
_NARROW = ("c10::Half", "c10::BFloat16")
_BYTES = {name: PROFILER_BYTES[name] for name in ("float", "double", *_NARROW)}
_FETCH = "enumerate(DataLoader)"  # torch marks every fetch


class ShapedCall(msgspec.Struct, frozen=True):
    """One operator's name, input shapes and input types."""

    name: str
    shapes: tuple[Any, ...]
    dtypes: tuple[str, ...]

    def dims(self, place: int) -> list[int]:
        """The shape of one input; empty if it is no tensor."""
        dims = self.shapes[place] if place < len(self.shapes) else []
        whole = isinstance(dims, list) and all(isinstance(size, int) for size in dims)
        return dims if whole else []

    def width(self, place: int) -> int | None:
        """Bytes of an element of one input."""
        return _BYTES.get(self.dtypes[place]) if place < len(self.dtypes) else None


class StepCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The shaped operators of one forward pass, outermost of each name, in order.

    A step that accumulates gradients runs one pass per micro-batch, and each pass frees what it
    kept before the next begins.
    """

    calls: tuple[ShapedCall, ...]
    cast_bytes: int
    micro_batches: int = 1  # passes of this kind in the step
    fetches: float = 0.0  # batches that a DataLoader gave, in a mean step of the trace

    @property
    def batches_per_step(self) -> int | None:
        """None if passes share a batch: it may be split, or read again (adversarial training)."""
        is_shared = 0 < round(self.fetches) < self.micro_batches
        return None if is_shared else self.micro_batches


def read_calls(trace: Trace, steps: Steps) -> StepCalls | None:
    """The longest forward pass of the last marked step that trains or, without steps, of the
    trace. A program that ends inside a step leaves a last one without operators."""
    host = trace.host
    wanted = (*FED, ATTENTION, *_SOFTMAX, "aten::layer_norm", "aten::native_dropout")
    operator = host.kind == HostKind.OPERATOR
    named = rows_named(trace, host, operator & (host.shapes >= 0), lambda name: name in wanted)
    backward = rows_named(trace, host, operator, lambda name: name.startswith(BACKWARD))
    here = _in_last_step(trace, steps, (backward, named))
    rows = np.flatnonzero(named & here)
    rows = rows[nearest_of(host, backward, rows) < 0]
    if not len(rows):
        return None
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    passes = _split_passes(host.start_ns[rows], np.sort(host.start_ns[backward & here]))
    names = [tuple(host.name[rows[one_pass]].tolist()) for one_pass in passes]
    # The first of equals: autocast may keep its casts of weights for the passes after it.
    longest = max(range(len(passes)), key=lambda place: len(names[place]))
    rows = rows[passes[longest]]
    cast = _cast_bytes(trace, rows)
    rows = rows[outermost(enclosing(host, rows), host.name[rows])]
    alike = names.count(names[longest])
    return StepCalls(
        calls=_decode(trace, rows),
        cast_bytes=cast,
        micro_batches=alike,
        fetches=_mean_fetches(trace, steps),
    )


def _mean_fetches(trace: Trace, steps: Steps) -> float:
    if not steps.steps:
        return 0.0
    host = trace.host
    annotation = host.kind == HostKind.ANNOTATION
    fetch = rows_named(trace, host, annotation, lambda name: name.startswith(_FETCH))
    first, last = steps.steps[0], steps.steps[-1]
    inside = (host.start_ns >= first.start_ns) & (host.start_ns < last.start_ns + last.dur_ns)
    return float((fetch & inside).sum()) / len(steps.steps)


def _in_last_step(
    trace: Trace, steps: Steps, wanted: tuple[NDArray[np.bool_], ...]
) -> NDArray[np.bool_]:
    """Rows of the last step that has some of the first `wanted` rows, else of the next ones."""
    start = trace.host.start_ns
    for rows in wanted:
        for step in reversed(steps.steps):
            inside = (start >= step.start_ns) & (start < step.start_ns + step.dur_ns)
            if (inside & rows).any():
                return inside
    return np.full(len(start), not steps.steps)


def _split_passes(
    forward_ns: NDArray[np.int64], backward_ns: NDArray[np.int64]
) -> list[slice[int, int]]:
    """Slices of `forward_ns` (sorted) between backward passes. A forward that no backward follows,
    such as an evaluation at the end of a step, counts only if there is nothing else."""
    before = np.searchsorted(backward_ns, forward_ns)
    edges = [0, *(np.flatnonzero(np.diff(before)) + 1).tolist(), len(forward_ns)]
    passes = [slice(start, end) for start, end in pairwise(edges)]
    trained = [one_pass for one_pass in passes if before[one_pass.start] < len(backward_ns)]
    return trained or passes


def _decode(trace: Trace, rows: Indices) -> tuple[ShapedCall, ...]:
    """Each distinct name with its shapes and types is read once."""
    host = trace.host
    columns = (column[rows].tolist() for column in (host.name, host.shapes, host.dtypes))
    keys = list(zip(*columns, strict=True))
    known = {key: _call(trace.strings, *key) for key in dict.fromkeys(keys)}
    return tuple(call for key in keys if (call := known[key]) is not None)


def _call(strings: tuple[str, ...], name: int, shapes: int, dtypes: int) -> ShapedCall | None:
    try:
        dims = msgspec.json.decode(strings[shapes], type=list[Any])
        types = msgspec.json.decode(strings[dtypes], type=list[Any]) if dtypes >= 0 else []
    except msgspec.DecodeError:
        return None
    return ShapedCall(strings[name], tuple(dims), tuple(str(dtype) for dtype in types))


def _cast_bytes(trace: Trace, rows: Indices) -> int:
    """Weights that autocast copies to a narrower type for linear layers and convolutions.

    The copy is made inside the layer and has the shape of its weight or bias. Autograd keeps it,
    and its size does not depend on the batch.
    """
    host = trace.host
    layers = np.zeros(len(host), np.bool_)
    layers[rows] = True
    layers &= rows_named(trace, host, layers, lambda name: name in (_LINEAR, *_CONVOLUTIONS))
    shaped = (host.kind == HostKind.OPERATOR) & (host.shapes >= 0)
    copies = rows_named(trace, host, shaped, lambda name: name == "aten::copy_")
    inside = np.flatnonzero(copies & (nearest(host, layers) >= 0))
    around = nearest_of(host, layers, inside)
    columns = (host.shapes[inside], host.dtypes[inside], host.shapes[around])
    pairs = Counter(zip(*(column.tolist() for column in columns), strict=True))
    return sum(count * _cast(trace.strings, *pair) for pair, count in pairs.items())


def _cast(strings: tuple[str, ...], shapes: int, dtypes: int, layer: int) -> int:
    copy = _call(strings, shapes, shapes, dtypes)
    around = _call(strings, layer, layer, -1)
    if copy is None or around is None or len(copy.dtypes) < 2:
        return 0
    to, source = copy.dtypes[:2]
    of_weight = copy.dims(0) and copy.dims(0) in (around.dims(1), around.dims(2))
    narrows = to in _NARROW and source == "float"
    return int(np.prod(copy.dims(0))) * _BYTES[to] if of_weight and narrows else 0


def find_batch(step: StepCalls) -> tuple[int, str] | None:
    """The batch, and the operator it was read from: the first that the inputs reach."""
    for call in step.calls:
        embeds = call.name == "aten::embedding"
        dims = call.dims(1 if embeds else 0) if call.name in FED else []
        if embeds and (len(dims) < 2 or (dims[0] == 1 and _is_fed_more(step))):
            continue  # positions, most likely: read once for all samples
        if dims and dims[0] > 0:
            return dims[0], f"the first {call.name}, whose input is {dims}"
    return None


def _is_fed_more(step: StepCalls) -> bool:
    """Whether another embedding reads several samples."""
    others = (call.dims(1) for call in step.calls if call.name == "aten::embedding")
    return any(len(dims) > 1 and dims[0] > 1 for dims in others)


def find_transformer(step: StepCalls) -> Transformer | None:
    """None unless the step consists of equal attention blocks with two norms each."""
    attention = [call for call in step.calls if call.name == ATTENTION]
    fused = bool(attention)
    scores = attention or [
        call
        for call in step.calls
        if call.name in _SOFTMAX and len(dims := call.dims(0)) == 4 and dims[-1] == dims[-2]
    ]
    norms = [call for call in step.calls if call.name == "aten::layer_norm"]
    alike = all(call == scores[0] for call in scores)
    if not scores or not alike or len(norms) < 2 * len(scores):
        return None
    dims, width = scores[0].dims(0), (norms[0].dims(0) or [0])[-1]
    if len(dims) != 4 or not width or dims[1] == 0:
        return None
    batch, heads, length, last = dims
    head_width = last if fused else width // heads
    middle = _feedforward(step, width, len(scores))
    compute = scores[0].width(0)
    residual = norms[0].width(0)
    if middle is None or compute is None or residual is None:
        return None
    keys = scores[0].dims(1) if fused else dims
    return Transformer(
        layers=len(scores),
        width=width,
        heads=heads,
        key_heads=keys[1] if len(keys) == 4 else heads,
        head_width=head_width,
        length=length,
        batch=batch,
        feedforward=middle[0],
        gated=middle[1],
        vocabulary=_vocabulary(step, width),
        compute_bytes=compute,
        residual_bytes=residual,
        fused_attention=fused,
        dropout_bytes=sum(
            int(np.prod(call.dims(0))) for call in step.calls if call.name == "aten::native_dropout"
        ),
        cast_bytes=step.cast_bytes,
    )


def linear_elements(step: StepCalls) -> int:
    """Elements of the weights of linear layers, which autocast would cast."""
    return sum(int(np.prod(call.dims(1))) for call in step.calls if call.name == _LINEAR)


def _feedforward(step: StepCalls, width: int, layers: int) -> tuple[int, bool] | None:
    """The inner width, and whether two projections lead up to it."""
    weights = Counter(tuple(c.dims(1)) for c in step.calls if c.name == _LINEAR)
    for (out, into), count in ((k, v) for k, v in weights.items() if len(k) == 2):
        if into == width and out != width and weights.get((into, out), 0) >= layers:
            return out, count >= 2 * layers
    return None


def _vocabulary(step: StepCalls, width: int) -> int | None:
    """The last linear layer's outputs, if an embedding has as many rows."""
    rows = {c.dims(0)[0] for c in step.calls if c.name == "aten::embedding" and c.dims(0)}
    linear = [c for c in step.calls if c.name == _LINEAR]
    last = linear[-1].dims(1) if linear else []
    return last[0] if len(last) == 2 and last[1] == width and last[0] in rows else None
