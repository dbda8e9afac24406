"""Recurrences of a step: layers and loops that go through a sequence one step after the other.

torch's own layers and cells say so by their names. A loop that a script wrote shows as one matrix
product of a state, [batch, size] by [size, size], that is called again and again with the same
weight: backward adds to that weight's gradient once, however often it was used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from stepscope.records.normal import median
from stepscope.records.trace import HostKind, Trace
from stepscope.step.arrays import Bools, Indices, Int32s
from stepscope.step.call_tree import decode_list
from stepscope.step.graph import Phase, call_phases, outermost_operator
from stepscope.step.work import named

LONG = 128  # steps
_GATES = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}
_LAYERS = {
    f"aten::{name}": name.removeprefix("rnn_") for name in ("rnn_tanh", "rnn_relu", "lstm", "gru")
}
_CELLS = {f"{name}_cell": cell for name, cell in _LAYERS.items()}
_PRODUCTS = ("aten::linear", "aten::addmm", "aten::mm", "aten::matmul")
_ACTIVATIONS = {f"aten::{cell}{end}": cell for cell in ("tanh", "relu") for end in ("", "_")}
_GATE = ("aten::sigmoid", "aten::sigmoid_")
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_APART = 3  # times the usual number of operators from one product of a loop to the next


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one shape. `cell` is tanh, relu, lstm, gru, or gated for a loop with sigmoids."""

    form: str  # layer, cells, loop
    cell: str
    steps: int
    batch: int
    size: int
    features: int
    layers: int  # of all calls of a training step; both directions count

    @property
    def is_plain(self) -> bool:
        """Its backward step is one small matrix product: what a scan folds."""
        return self.cell in ("tanh", "relu")


class RecurrentCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A recurrence, and the outermost operators of forward that it is made of."""

    recurrence: Recurrence
    rows: Indices


class StepWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a trace, and how many training steps it holds."""

    start_ns: int
    end_ns: int
    steps: int = 1


def find_recurrences(trace: Trace, window: StepWindow) -> tuple[RecurrentCalls, ...]:
    """Those of at least LONG steps, where shapes were recorded and there is a backward pass."""
    calls = _ForwardCalls(trace, window)
    found = (*_find_layers(calls), *_find_cells(calls), *_find_loops(calls))
    return tuple(one for one in found if one.recurrence.steps >= LONG)


def owners(trace: Trace, found: Sequence[RecurrentCalls], top: Int32s) -> tuple[Int32s, Bools]:
    """For outermost host rows, or -1: the place of their recurrence in `found`, or -1, and whether
    they belong to its backward pass."""
    number = np.full(len(trace.host) + 1, -1, np.int32)  # row -1 reads the last place
    for place, one in enumerate(found):
        number[one.rows] = place
    forward = number[top]
    created = number[forward_creators(trace, top)]
    return np.where(forward >= 0, forward, created).astype(np.int32), forward < 0


def forward_creators(trace: Trace, top: Int32s) -> Int32s:
    """The outermost forward operator that created each backward node, or -1."""
    creators = np.full(len(top), -1, np.int32)
    if not len(trace.host):
        return creators
    created = np.where(top >= 0, trace.host.forward_of[np.maximum(top, 0)], -1)
    known = np.flatnonzero(created >= 0)
    creators[known] = outermost_operator(trace, created[known])
    return creators


class _CallKey(msgspec.Struct, frozen=True):
    """Calls of one operator with the same shapes; places are in order of their start."""

    name: str
    shapes: list[Any]
    places: Indices


class _ForwardCalls:
    """Outermost operators of the forward passes of a window, in order of their start."""

    def __init__(self, trace: Trace, window: StepWindow) -> None:
        self.trace, self.steps = trace, max(1, window.steps)
        host = trace.host
        self._inside = (
            (host.kind == HostKind.OPERATOR)
            & (host.shapes >= 0)
            & (host.start_ns >= window.start_ns)
            & (host.start_ns < window.end_ns)
        )
        candidates = np.flatnonzero(self._inside)
        outer = candidates[outermost_operator(trace, candidates) == candidates]
        outer = outer[call_phases(trace, outer) == Phase.FORWARD]
        self.rows: Indices = outer[np.argsort(host.start_ns[outer], kind="stable")]

    def called(self, names: Iterable[str]) -> Iterator[_CallKey]:
        host, strings = self.trace.host, self.trace.strings
        every = np.ones(len(self.rows), np.bool_)
        wanted = named(self.trace, host.name[self.rows], every, frozenset(names).__contains__)
        places = np.flatnonzero(wanted)
        keys = host.name[self.rows[places]].astype(np.int64) * len(strings)
        keys += host.shapes[self.rows[places]]
        for key in dict.fromkeys(keys.tolist()):
            name, shapes = divmod(key, len(strings))
            yield _CallKey(strings[name], decode_list(self.trace, shapes), places[keys == key])

    def concrete(self, place: int) -> list[Any]:
        return decode_list(self.trace, int(self.trace.host.concrete[self.rows[place]]))

    def count_weights(self, dims: Sequence[int]) -> int:
        """Weights of this shape that one training step gives a gradient."""
        host = self.trace.host
        nodes = named(self.trace, host.name, self._inside, _ACCUMULATE.__eq__)
        counts = np.bincount(host.shapes[nodes], minlength=1)
        codes = np.flatnonzero(counts).tolist()
        total = sum(
            int(counts[code]) for code in codes if decode_list(self.trace, code)[:1] == [[*dims]]
        )
        return round(total / self.steps)


def _find_layers(calls: _ForwardCalls) -> Iterator[RecurrentCalls]:
    for call in calls.called(_LAYERS):
        cell = _LAYERS[call.name]
        shape = _layer_shape(call.shapes, calls.concrete(int(call.places[0])), _GATES[cell])
        if shape is None:
            continue
        steps, batch, size, features, layers = shape
        count = max(1, round(len(call.places) / calls.steps))
        made = Recurrence(
            form="layer", cell=cell, steps=steps, batch=batch, size=size, features=features,
            layers=layers * count,
        )  # fmt: skip
        yield RecurrentCalls(recurrence=made, rows=calls.rows[call.places])


def _layer_shape(
    shapes: list[Any], concrete: list[Any], gates: int
) -> tuple[int, int, int, int, int] | None:
    """Steps, batch, size, features and layers, of a padded or a packed batch."""
    weights = next((each for each in shapes[2:4] if _are_weights(each)), None)
    if weights is None or not _is_shape(shapes[0]):
        return None
    size, features = weights[0][0] // gates, weights[0][1]
    layers = sum(1 for each in weights if len(each) == 2) // 2
    if len(shapes[0]) == 3:
        first, second = shapes[0][:2]
        batch_first = str(concrete[-1] if concrete else "") == "True"
        steps, batch = (second, first) if batch_first else (first, second)
    elif len(shapes[0]) == 2 and _is_shape(shapes[1]) and len(shapes[1]) == 1:
        steps = shapes[1][0]  # of the longest sequence: the sizes of each step's batch
        batch = -(-shapes[0][0] // max(1, steps))
    else:
        return None
    return (steps, batch, size, features, layers) if min(steps, batch, size) > 0 else None


def _find_cells(calls: _ForwardCalls) -> Iterator[RecurrentCalls]:
    for call in calls.called(_CELLS):
        cell = _CELLS[call.name]
        dims = call.shapes[:4]
        if len(dims) < 4 or not all(_is_shape(dims[place], 2) for place in (0, 2, 3)):
            continue
        yield from _repeated(calls, call, form="cells", cell=cell, weight=dims[3], given=dims[0])


def _find_loops(calls: _ForwardCalls) -> Iterator[RecurrentCalls]:
    for call in calls.called(_PRODUCTS):
        state, weight = _factors(call)
        if state is None or weight is None or weight[0] != weight[1] or state[1] != weight[0]:
            continue
        # What is called on such a state about as often as the product.
        least = len(call.places)
        counts = {
            call.name: len(call.places)
            for call in calls.called((*_ACTIVATIONS, *_GATE))
            if call.shapes[:1] == [state]
        }
        often = [name for name, count in counts.items() if 2 * count >= least]
        if any(name in _GATE for name in often):
            cell: str | None = "gated"
        else:
            cell = next((_ACTIVATIONS[name] for name in often), None)
        if cell is not None:
            yield from _repeated(calls, call, form="loop", cell=cell, weight=weight, given=state)


def _factors(call: _CallKey) -> tuple[list[int] | None, list[int] | None]:
    """The state and the weight of a product; addmm has its bias first."""
    factors = call.shapes[1:3] if call.name == "aten::addmm" else call.shapes[:2]
    if len(factors) < 2 or not all(_is_shape(each, 2) for each in factors):
        return None, None
    return factors[0], factors[1]


def _repeated(
    calls: _ForwardCalls,
    call: _CallKey,
    *,
    form: str,
    cell: str,
    weight: list[int],
    given: list[int],
) -> Iterator[RecurrentCalls]:
    """One recurrence for each weight that the calls share. Other layers of a net have weights of
    their own, so they are called once each."""
    weights = calls.count_weights(weight) or calls.count_weights(weight[::-1])
    if not weights:
        return
    made = Recurrence(
        form=form,
        cell=cell,
        steps=round(len(call.places) / calls.steps / weights),
        batch=given[0],
        size=weight[1],
        features=given[1],
        layers=weights,
    )
    # These places, and all between two neighbours that are not far apart.
    apart = np.diff(call.places)
    far = np.flatnonzero(apart > _APART * median(apart)) if len(apart) else apart
    first = call.places[np.concatenate(([0], far + 1))]
    last = call.places[np.concatenate((far, [len(call.places) - 1]))]
    stretches = [np.arange(begin, end + 1) for begin, end in zip(first, last, strict=True)]
    joined: Indices = np.concatenate(stretches).astype(np.intp)
    yield RecurrentCalls(recurrence=made, rows=calls.rows[joined])


def _is_shape(value: Any, dims: int | None = None) -> bool:
    is_list = isinstance(value, list) and bool(value) and all(type(size) is int for size in value)
    return is_list and (dims is None or len(value) == dims)


def _are_weights(value: Any) -> bool:
    """A list of tensors that begins with two matrices, as recurrent layers are given it."""
    is_list = isinstance(value, list) and len(value) > 1
    return is_list and all(map(_is_shape, value)) and len(value[0]) == len(value[1]) == 2
