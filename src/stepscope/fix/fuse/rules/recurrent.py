"""LSTM, GRU, RNN and their cells: one product for all inputs of a layer, one for each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from stepscope.fix.fuse.choose import WayToChoose, chooser
from stepscope.fix.fuse.rules.filters import precision_of_autocast
from stepscope.fix.fuse.rules.packed import agreed_sizes
from stepscope.fix.fuse.rules.recurrent_cells import CELLS
from stepscope.fix.fuse.rules.recurrent_steps import LayerWeights, StepOrder, run_steps
from stepscope.fix.fuse.rules.registry import count_of, front_of, rule_for
from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_STEPS, _ONE_BY_ONE = "all models, step by step", "one by one"
_MEASURED_STEPS = 16


class RecurrentCall(NamedTuple):
    """What torch.lstm, gru, rnn_tanh or rnn_relu was asked to compute."""

    kind: str
    sizes: Any  # how many sequences take part in each step; None: all in all
    has_biases: bool
    layers: int
    dropout: Any  # a share, or a PerModel
    training: bool
    bidirectional: bool
    batch_first: bool

    @property
    def drops(self) -> bool:
        return self.training and self.layers > 1 and self.dropout > 0


@rule_for("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(func: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 9:
        return NotImplemented
    kind = func.__name__
    if isinstance(args[3], list | tuple):  # the weights follow the steps' sizes and the states
        x, sizes, initial, weights, *settings = args
        call = RecurrentCall._make((kind, agreed_sizes(sizes), *settings, False))
    else:
        x, initial, weights, *settings = args
        call = RecurrentCall._make((kind, None, *settings))
    states = tuple(initial) if kind == "lstm" else (initial,)
    tensors = _in_one_precision((x, *states, *weights))
    if tensors is None:
        return NotImplemented
    if call.sizes is None and not call.drops:
        way = chooser().pick(_ways(func, call, tensors, len(states)))
        if way == _ONE_BY_ONE:
            return NotImplemented
    return _run(call, tensors[0], tensors[1 : 1 + len(states)], tensors[1 + len(states) :])


@rule_for("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent_cell(
    func: Any, x: Any, initial: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    kind = func.__name__.removesuffix("_cell")
    states = tuple(initial) if kind == "lstm" else (initial,)
    tensors = _in_one_precision((x, *states, w_ih, w_hh, b_ih, b_hh))
    if tensors is None or x.dim() != 2:
        return NotImplemented
    x, *before, w_ih, w_hh, b_ih, b_hh = tensors
    count = count_of(*tensors)
    gates, weights = _gates(kind, x, (w_ih, w_hh, b_ih, b_hh), count)
    turned = weights.state.transpose(1, 2)
    fronts = tuple(front_of(one, count) for one in before)
    new, _ = CELLS[kind].step(gates, fronts, turned, weights.bias)
    together = tuple(Stacked(one, count) for one in new)
    return together if kind == "lstm" else together[0]


def _in_one_precision(tensors: Sequence[Any]) -> list[Any] | None:
    """On a GPU autocast brings all of them to its own precision. On a CPU it is not so simple, and
    what differs is for torch to refuse: None."""
    given = [one for one in tensors if one is not None]
    kind = given[0].device.type
    if torch.is_autocast_enabled(kind):
        if kind != "cuda":
            return None
        return [None if one is None else one.to(precision_of_autocast(one)) for one in tensors]
    if any(one.dtype != given[0].dtype or one.device != given[0].device for one in given):
        return None
    return list(tensors)


def _run(
    call: RecurrentCall, x: Any, states: Sequence[Any], weights: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """The outputs of the last layer, and the last states of all layers."""
    count = count_of(x, *states, *weights)
    if call.batch_first:
        x = x.transpose(0, 1)
    sizes = call.sizes or (x.shape[1],) * x.shape[0]
    fronts = [front_of(one, count) for one in states]
    directions = (False, True) if call.bidirectional else (False,)
    by_direction = _by_direction(weights, call.layers * len(directions))
    last: list[Sequence[torch.Tensor]] = []
    for layer in range(call.layers):
        outputs = []
        for reverse in directions:
            initial = tuple(one[:, len(last)] for one in fronts)
            gates, own = _gates(call.kind, x, next(by_direction), count, call.has_biases)
            order = StepOrder(call.kind, sizes, reverse)
            rows, ends = run_steps(order, gates, own, initial)
            outputs.append(rows)
            last.append(ends)
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        x = Stacked(together.reshape(count, *x.shape[:-1], together.shape[-1]), count)
        if call.drops and layer < call.layers - 1:
            x = functional.dropout(x, call.dropout, True)
    at_end = [Stacked(torch.stack(one, 1), count) for one in zip(*last, strict=True)]
    return (x.transpose(0, 1) if call.batch_first else x), *at_end


def _by_direction(weights: Sequence[Any], directions: int) -> Iterator[Sequence[Any]]:
    each = len(weights) // directions
    return iter([weights[begin : begin + each] for begin in range(0, len(weights), each)])


def _gates(
    kind: str, x: Any, weights: Sequence[Any], count: int, has_biases: bool = True
) -> tuple[torch.Tensor, LayerWeights]:
    """The products of all inputs, [models, rows, gates], and what every step computes with."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh, *projection = rest if has_biases else (None, None, *rest)
    if CELLS[kind].adds_products and b_ih is not None:
        b_ih, b_hh = b_ih + b_hh, None
    products = front_of(functional.linear(x, w_ih, b_ih), count)
    own = [None if one is None else front_of(one, count) for one in (b_hh, *projection)]
    gates = products.reshape(count, -1, products.shape[-1])
    return gates, LayerWeights(front_of(w_hh, count), *own)


def _ways(func: Any, call: RecurrentCall, tensors: Sequence[Any], states: int) -> WayToChoose:
    """Measured over a few steps: both ways take time in proportion."""
    count, first = count_of(*tensors), tensors[0]
    shared = not isinstance(first, Stacked) or first.common is not None
    x = front_of(first, count)[0] if shared else first.front()
    time = (1 if call.batch_first else 0) + (0 if shared else 1)
    x = x.narrow(time, 0, min(_MEASURED_STEPS, x.shape[time]))
    plain = [x, *(front_of(one, count) for one in tensors[1:])]
    settings = (call.has_biases, call.layers, 0.0, call.training, *call[-2:])

    def step_by_step(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        given = [Stacked(one, count) for one in rest]
        batch = Stacked.share(x, count) if shared else Stacked(x, count)
        return front_of(_run(call, batch, given[:states], given[states:])[0], count)

    def one_by_one(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        results = []
        for model in range(count):
            own = [one[model] for one in rest]
            initial = own[:states] if func.__name__ == "lstm" else own[0]
            batch = x if shared else x[model]
            results.append(func(batch, initial, own[states:], *settings)[0])
        return torch.stack(results)

    def work() -> int:
        return int(x.numel() * tensors[1 + states].shape[0] * (count if shared else 1))

    ways: dict[str, Any] = {_STEPS: step_by_step, _ONE_BY_ONE: one_by_one}
    return WayToChoose(func.__name__, plain, (shared, *settings), _STEPS, lambda: ways, work)
