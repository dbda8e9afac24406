"""Gradients become ready in backward, fill DDP's buckets, and are summed while backward runs.

DDP puts gradients into buckets in the order in which they became ready (its buckets are rebuilt
after the first step) and closes a bucket when it holds its limit or more. Buckets are summed one
after the other, each when its last gradient is there; the optimizer waits for the last.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.collectives import DTYPE_BYTES
from stepscope.explain.replay.graph import Phase
from stepscope.explain.steps import step_of
from stepscope.explain.work import rows_named
from stepscope.predict.parameters import ACCUMULATE
from stepscope.records.trace import HostKind
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import Floats, Ints, StepGraph
    from stepscope.predict.step_context import StepContext

    Sizes = NDArray[np.int64]

CAP_BYTES = 25 << 20
FIRST_BYTES = 1 << 20  # DDP's first bucket, unless the script sets a limit
_PASSES = 100


class Gradients(msgspec.Struct, frozen=True, kw_only=True):
    """In the order in which they become ready."""

    ready: Ints  # the next call of the graph
    size_bytes: Sizes
    dtype: Ints  # a code; buckets hold one type

    def __len__(self) -> int:
        return len(self.ready)


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """In the order in which they are summed."""

    ready: Ints  # the next call after the last gradient
    size_bytes: Sizes
    tensors: Ints

    def __len__(self) -> int:
        return len(self.ready)


def step_window(context: StepContext) -> tuple[int, int]:
    """The step of the trace that the graph's calls were taken from."""
    host, rows = context.trace.host, context.graph.calls.row
    rows = rows[rows >= 0]
    start = host.start_ns[rows]
    steps = context.steps.steps
    if not len(rows):
        return 0, 0
    number = int(step_of(steps, start.max(keepdims=True))[0]) if steps else -1
    if number >= 0:
        return steps[number].start_ns, steps[number].start_ns + steps[number].dur_ns
    return int(start.min()), int((start + host.dur_ns[rows]).max())


def rows_in_step(context: StepContext, names: tuple[str, ...]) -> NDArray[np.intp]:
    """Operators of the step with these names, in order of their start."""
    host = context.trace.host
    begin, end = step_window(context)
    among = (host.kind == HostKind.OPERATOR) & (host.start_ns >= begin) & (host.start_ns < end)
    rows = np.flatnonzero(rows_named(context.trace, host, among, lambda name: name in names))
    return rows[np.argsort(host.start_ns[rows], kind="stable")]


def calls_after(context: StepContext, graph: StepGraph, times_ns: NDArray[np.int64]) -> Ints:
    """For each host time in backward: the call of the graph after the last one begun by then.

    If what-ifs have repeated calls, the last pass counts.
    """
    calls = graph.calls
    traced = np.flatnonzero(calls.row >= 0)
    if not len(traced):
        return np.zeros(len(times_ns), np.int32)
    backward = traced[calls.phase[traced] == Phase.BACKWARD]
    known = backward if len(backward) else traced
    start = context.trace.host.start_ns[calls.row[known]]
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(known[order])
    place = np.searchsorted(start[order], times_ns, side="right") - 1
    return np.where(place >= 0, reach[np.maximum(place, 0)] + 1, known.min()).astype(np.int32)


def find_gradients(context: StepContext, graph: StepGraph) -> Gradients | None:
    """Read from backward's accumulation of gradients; None without it or without shapes."""
    host = context.trace.host
    rows = rows_in_step(context, (ACCUMULATE,))
    if not len(rows) or (host.shapes[rows] < 0).any():
        return None
    ready = calls_after(context, graph, host.start_ns[rows] + host.dur_ns[rows])
    last = _last_pass(graph, ready, host.shapes[rows])
    rows, ready = rows[last], ready[last]
    size, dtype = _sizes(context, rows)
    if (size <= 0).all():
        return None
    return Gradients(ready=np.maximum.accumulate(ready), size_bytes=size, dtype=dtype)


def _last_pass(graph: StepGraph, ready: Ints, shapes: Ints) -> slice:
    """Micro-batches bring the same gradients after each forward; only the last ones are summed."""
    forward = np.append(0, np.cumsum(graph.calls.phase == Phase.FORWARD))[ready]
    edges = np.flatnonzero(np.diff(forward)) + 1
    passes = np.split(shapes, edges)
    repeated = all(np.array_equal(one_pass, passes[-1]) for one_pass in passes)
    return slice(int(edges[-1]) if repeated and len(edges) else 0, None)


def _sizes(context: StepContext, rows: NDArray[np.intp]) -> tuple[Sizes, Ints]:
    """Bytes and type of each gradient; each distinct pair of shapes and types is read once."""
    host, strings = context.trace.host, context.trace.strings
    pairs = np.stack((host.shapes[rows], host.dtypes[rows]), axis=1)
    distinct_pairs, place = np.unique(pairs, axis=0, return_inverse=True)
    tensors = [_tensor_bytes(strings, *pair) for pair in distinct_pairs.tolist()]
    place = place.reshape(-1)
    names = sorted({name for _, name in tensors})
    sizes = np.array([size for size, _ in tensors], np.int64)[place]
    codes = np.array([names.index(name) for _, name in tensors], np.int32)[place]
    return sizes, codes


def _tensor_bytes(strings: tuple[str, ...], shapes: int, dtypes: int) -> tuple[int, str]:
    """Bytes and type of the first input; four bytes per element if its type was not recorded."""
    dims = msgspec.json.decode(strings[shapes])
    names = msgspec.json.decode(strings[dtypes]) if dtypes >= 0 else []
    name = names[0] if names else ""
    if not dims or (dims[0] and isinstance(dims[0][0], list)):  # nothing, or a list of tensors
        return 0, name
    return math.prod(dims[0]) * DTYPE_BYTES.get(name.lower(), 4), name


def fill_buckets(
    gradients: Gradients, cap_bytes: int = CAP_BYTES, first_bytes: int | None = None
) -> Buckets:
    """Fill buckets as torch's Reducer does: a bucket of one type closes once it holds its limit."""
    first = min(FIRST_BYTES, cap_bytes) if first_bytes is None else first_bytes
    limit = dict.fromkeys(distinct(gradients.dtype).tolist(), first)
    held: dict[int, list[int]] = {code: [] for code in limit}
    filled = dict.fromkeys(limit, 0)
    closed: list[list[int]] = []
    pairs = zip(gradients.size_bytes.tolist(), gradients.dtype.tolist(), strict=True)
    for number, (size, code) in enumerate(pairs):
        held[code].append(number)
        filled[code] += size
        if filled[code] >= limit[code]:
            closed.append(held[code])
            held[code], filled[code], limit[code] = [], 0, cap_bytes
    closed += [rest for rest in held.values() if rest]
    ready = np.array([gradients.ready[members].max() for members in closed], np.int32)
    return Buckets(
        ready=np.maximum.accumulate(ready),
        size_bytes=np.array([gradients.size_bytes[members].sum() for members in closed], np.int64),
        tensors=np.array([len(members) for members in closed], np.int32),
    )


def chain_buckets(
    ready_ns: Floats, compute_end_ns: float, alone_ns: Floats, contended_ns: Floats, lost: float
) -> tuple[Floats, Floats]:
    """Run buckets one after the other: how long each takes, and what compute loses to it.

    Each waits for its gradients. While compute runs, a collective takes `contended_ns` and compute
    loses `lost` of `alone_ns`. After compute has ended, the rest of the collective runs at its own
    speed. What compute loses delays everything that follows, so this repeats until it settles.
    """
    guess = lost_ns = np.zeros(len(ready_ns))
    dur_ns = alone_ns.copy()
    for _ in range(_PASSES):
        end, spent = 0.0, 0.0
        compute_end = compute_end_ns + float(guess.sum())
        lost_ns = np.zeros(len(ready_ns))
        for number in range(len(ready_ns)):
            start = max(float(ready_ns[number]) + spent, end)
            room = max(0.0, compute_end - start)
            share = min(1.0, room / contended_ns[number]) if contended_ns[number] > 0 else 1.0
            dur_ns[number] = share * contended_ns[number] + (1 - share) * alone_ns[number]
            lost_ns[number] = lost * alone_ns[number] * share
            end = start + dur_ns[number]
            spent += lost_ns[number]
        if np.abs(lost_ns - guess).max(initial=0.0) < 1.0:
            break
        guess = (guess + lost_ns) / 2
    return dur_ns, lost_ns
