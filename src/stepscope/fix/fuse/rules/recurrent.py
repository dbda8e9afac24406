"""LSTM, GRU, RNN, their cells and packed sequences: one product for all inputs of a layer,
one for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from stepscope.fix.fuse.kernel_choice import WayToChoose, chooser
from stepscope.fix.fuse.ledger import note
from stepscope.fix.fuse.rules.convolution_products import precision_of_autocast
from stepscope.fix.fuse.rules.registry import count_of, front_of, rule_for
from stepscope.fix.fuse.stacked import NotFusableError, Stacked

if TYPE_CHECKING:
    Tensors = tuple[torch.Tensor, ...]
    WayBack = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]

_STEPS, _ONE_BY_ONE = "all models, step by step", "one by one"
_MEASURED_STEPS = 16


class RecurrentCall(NamedTuple):
    """A call of torch.lstm, gru, rnn_tanh or rnn_relu."""

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
    width = len(weights) // (call.layers * len(directions))  # tensors of a layer and direction
    by_direction = iter([weights[begin : begin + width] for begin in range(0, len(weights), width)])
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


# All steps of one recurrent layer in one direction, for all models.
#
# Rows are in order of time, as in a PackedSequence: [models, rows of all steps, width]. A step is
# one batched product and the cell's pointwise part; on the way back the gradients of the weights
# are one product over all steps.


class StepOrder(NamedTuple):
    """How many sequences take part in each step: never more than in the one before."""

    kind: str  # of cell
    sizes: tuple[int, ...]
    reverse: bool

    @property
    def places(self) -> range:
        count = len(self.sizes)
        return range(count - 1, -1, -1) if self.reverse else range(count)


class LayerWeights(NamedTuple):
    """[models, gates, width], [models, gates] and [models, projected, width]."""

    state: torch.Tensor
    bias: torch.Tensor | None = None  # of the state, where it is not added to the gates
    projection: torch.Tensor | None = None


class _StepRecord(NamedTuple):
    before: Tensors
    kept: Tensors
    output: torch.Tensor | None  # before its projection


def run_steps(
    order: StepOrder, gates: torch.Tensor, weights: LayerWeights, initial: Tensors
) -> tuple[torch.Tensor, Tensors]:
    """The state after every step, in order of time, and each sequence's last states."""
    rows, *last = _Steps.apply(order, gates, *weights, *initial)
    return rows, tuple(last)


def _forward(
    order: StepOrder, gates: torch.Tensor, weights: LayerWeights, initial: Tensors
) -> tuple[torch.Tensor, Tensors, list[_StepRecord]]:
    cell, sizes = CELLS[order.kind], order.sizes
    parts, turned = gates.split(sizes, 1), weights.state.transpose(1, 2)
    states = tuple(one[:, : sizes[order.places[0]]] for one in initial)
    ended: list[Tensors] = []
    rows: list[Any] = [None] * len(sizes)
    records = []
    for place in order.places:
        size, running = sizes[place], states[0].shape[1]
        if size < running:
            ended.insert(0, tuple(one[:, size:] for one in states))
            states = tuple(one[:, :size] for one in states)
        elif size > running:
            begun = [one[:, running:size] for one in initial]
            states = tuple(map(_joined, zip(states, begun, strict=True)))
        new, kept = cell.step(parts[place], states, turned, weights.bias)
        output = None
        if weights.projection is not None:
            output = new[0]
            new = (torch.bmm(output, weights.projection.transpose(1, 2)), *new[1:])
        records.append(_StepRecord(states, kept, output))
        states, rows[place] = new, new[0]
    last = tuple(map(_joined, zip(states, *ended, strict=True)))
    return _joined(rows), last, records


def _joined(parts: Any) -> torch.Tensor:
    return torch.cat(tuple(parts), 1)


class _Steps(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, order: StepOrder, *tensors: Any) -> Any:
        gates, weights, initial = _sorted_out(tensors)
        with torch.autocast(gates.device.type, enabled=False):
            rows, last, records = _forward(order, gates, weights, initial)
        context.order, context.given = order, len(tensors)
        flat = (one for step in records for one in (*step.before, *step.kept, step.output))
        context.save_for_backward(*tensors, *flat)
        return rows, *last

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        saved = context.saved_tensors
        given, flat = saved[: context.given], saved[context.given :]
        with torch.autocast(given[0].device.type, enabled=False):
            if torch.is_grad_enabled():  # the gradients will be differentiated themselves
                return None, *_differentiable(context, given, gradients)
            width = len(flat) // len(context.order.sizes)  # tensors of a record
            states = 2 if context.order.kind == "lstm" else 1
            parts = (flat[begin : begin + width] for begin in range(0, len(flat), width))
            records = [_StepRecord(part[:states], part[states:-1], part[-1]) for part in parts]
            return None, *_backward(context, given, records, gradients)


def _sorted_out(tensors: Any) -> tuple[torch.Tensor, LayerWeights, Tensors]:
    gates, state, bias, projection, *initial = tensors
    return gates, LayerWeights(state, bias, projection), tuple(initial)


def _differentiable(context: Any, given: Any, gradients: Any) -> list[Any]:
    """Return torch's own gradients of the steps, computed again."""
    own = [None if one is None else one.view_as(one) for one in given]
    wanted = [one for one, asked in zip(own, context.needs_input_grad[1:], strict=True) if asked]
    rows, last, _ = _forward(context.order, *_sorted_out(own))
    made = iter(
        torch.autograd.grad(
            (rows, *last), wanted, gradients, create_graph=True, materialize_grads=True
        )
    )
    return [next(made) if asked else None for asked in context.needs_input_grad[1:]]


def _backward(context: Any, given: Any, records: list[_StepRecord], gradients: Any) -> list[Any]:
    """Return gradients of gates, weights and initial states, from the last step to the first."""
    order: StepOrder = context.order
    cell, sizes = CELLS[order.kind], order.sizes
    _, weights, _ = _sorted_out(given)
    of_rows, *of_last = gradients
    of_parts = of_rows.split(sizes, 1)
    of_states = tuple(one[:, : sizes[order.places[-1]]] for one in of_last)
    of_begun: list[Tensors] = []  # initial states of sequences that began later
    of_gates: list[Any] = [None] * len(sizes)
    of_products, of_projected = [], []
    back = records[::-1]
    for place, record in zip(reversed(order.places), back, strict=True):
        size, running = sizes[place], of_states[0].shape[1]
        if size > running:
            ended = [one[:, running:size] for one in of_last]
            of_states = tuple(map(_joined, zip(of_states, ended, strict=True)))
        elif size < running:
            of_begun.insert(0, tuple(one[:, size:] for one in of_states))
            of_states = tuple(one[:, :size] for one in of_states)
        of_h = of_parts[place] + of_states[0]
        if weights.projection is not None:
            of_projected.append(of_h)
            of_h = torch.bmm(of_h, weights.projection)
        of_new = (of_h, *of_states[1:])
        of_gates[place], of_product, before = cell.backward(of_new, record.before, record.kept)
        of_products.append(of_product)
        of_states = (_through(of_product, weights.state, before[0]), *before[1:])
    of_initial = map(_joined, zip(of_states, *of_begun, strict=True))
    of_weights = _of_weights(weights, back, of_products, of_projected)
    return [_joined(of_gates), *of_weights, *of_initial]


def _through(
    of_product: torch.Tensor, weight: torch.Tensor, past: torch.Tensor | None
) -> torch.Tensor:
    if past is None:
        return torch.bmm(of_product, weight)
    return torch.baddbmm(past, of_product, weight)


def _of_weights(
    weights: LayerWeights,
    records: list[_StepRecord],
    of_products: list[torch.Tensor],
    of_projected: list[torch.Tensor],
) -> tuple[Any, Any, Any]:
    """One product over all steps for each."""
    turned = _joined(of_products).transpose(1, 2)
    of_state = torch.bmm(turned, _joined(record.before[0] for record in records))
    of_bias = turned.sum(2) if weights.bias is not None else None
    if weights.projection is None:
        return of_state, of_bias, None
    outputs = _joined(record.output for record in records)
    return of_state, of_bias, torch.bmm(_joined(of_projected).transpose(1, 2), outputs)


# One step of LSTM, GRU and RNN for all models, and its way back.
#
# Tensors are [models, rows, width]. `gates` is the product of the step's input, its bias added.
# `state` is the product of the state before; cells that only add the two get their sum as `gates`.

_sigmoid_back = torch.ops.aten.sigmoid_backward
_tanh_back = torch.ops.aten.tanh_backward
_relu_back = torch.ops.aten.threshold_backward


class RecurrentCell(NamedTuple):
    """`states` are (h,), or (h, c) of an LSTM."""

    adds_products: bool
    # gates, state, states before -> the new states, and what the way back needs
    forward: Callable[[torch.Tensor, torch.Tensor, Tensors], tuple[Tensors, Tensors]]
    # gradients of the new states, states before, what was kept
    backward: Callable[[Tensors, Tensors, Tensors], WayBack]

    def step(
        self,
        gates: torch.Tensor,
        states: Tensors,
        turned: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:
        """`turned` is the state's weight, [models, width, gates]."""
        if self.adds_products:
            sums = torch.baddbmm(gates, states[0], turned)
            return self.forward(sums, sums, states)
        if bias is None:
            return self.forward(gates, torch.bmm(states[0], turned), states)
        return self.forward(gates, torch.baddbmm(bias.unsqueeze(1), states[0], turned), states)


def _lstm(gates: torch.Tensor, _: torch.Tensor, states: Tensors) -> tuple[Tensors, Tensors]:
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = torch.addcmul(i * g, f, states[1])
    bent = c.tanh()
    return (o * bent, c), (i, f, g, o, bent)


def _lstm_back(gradients: Tensors, states: Tensors, kept: Tensors) -> WayBack:
    (of_h, of_c), (i, f, g, o, bent) = gradients, kept
    of_c = of_c + _tanh_back(of_h * o, bent)
    of_i, of_f = _sigmoid_back(of_c * g, i), _sigmoid_back(of_c * states[1], f)
    of_g, of_o = _tanh_back(of_c * i, g), _sigmoid_back(of_h * bent, o)
    of_gates = torch.cat([of_i, of_f, of_g, of_o], -1)
    return of_gates, of_gates, (None, of_c * f)


def _gru(gates: torch.Tensor, state: torch.Tensor, states: Tensors) -> tuple[Tensors, Tensors]:
    width = 2 * states[0].shape[-1]
    r, z = (gates[..., :width] + state[..., :width]).sigmoid().chunk(2, -1)
    recalled = state[..., width:]
    n = torch.addcmul(gates[..., width:], r, recalled).tanh()
    return (torch.addcmul(n, z, states[0] - n),), (r, z, n, recalled)


def _gru_back(gradients: Tensors, states: Tensors, kept: Tensors) -> WayBack:
    (of_h,), (r, z, n, recalled) = gradients, kept
    past = of_h * z
    of_n = _tanh_back(of_h - past, n)
    of_r = _sigmoid_back(of_n * recalled, r)
    of_z = _sigmoid_back(of_h * (states[0] - n), z)
    of_gates = torch.cat([of_r, of_z, of_n], -1)
    of_state = torch.cat([of_r, of_z, of_n * r], -1)
    return of_gates, of_state, (past,)


def _tanh(gates: torch.Tensor, _: torch.Tensor, __: Tensors) -> tuple[Tensors, Tensors]:
    h = gates.tanh()
    return (h,), (h,)


def _tanh_cell_back(gradients: Tensors, _: Tensors, kept: Tensors) -> WayBack:
    of_gates = _tanh_back(gradients[0], kept[0])
    return of_gates, of_gates, (None,)


def _relu(gates: torch.Tensor, _: torch.Tensor, __: Tensors) -> tuple[Tensors, Tensors]:
    h = gates.relu()
    return (h,), (h,)


def _relu_cell_back(gradients: Tensors, _: Tensors, kept: Tensors) -> WayBack:
    of_gates = _relu_back(gradients[0], kept[0], 0)
    return of_gates, of_gates, (None,)


CELLS = {
    "lstm": RecurrentCell(adds_products=True, forward=_lstm, backward=_lstm_back),
    "gru": RecurrentCell(adds_products=False, forward=_gru, backward=_gru_back),
    "rnn_tanh": RecurrentCell(adds_products=True, forward=_tanh, backward=_tanh_cell_back),
    "rnn_relu": RecurrentCell(adds_products=True, forward=_relu, backward=_relu_cell_back),
}


# Packed sequences: the models' own dimension goes along as one more width of each row.


def agreed_sizes(sizes: Any) -> tuple[int, ...]:
    """Lengths, or how many sequences take part in each step, where all models have the same."""
    if not isinstance(sizes, Stacked):
        return tuple(sizes.tolist())
    if sizes.common is None:
        every = sizes.front()
        if not torch.equal(every, every[:1].expand_as(every)):
            raise NotFusableError("lengths of packed sequences differ from model to model")
        note("lengths", "agreed")
    return tuple(sizes.of(0).tolist())


@rule_for("_pack_padded_sequence")
def pack(func: Any, x: Any, lengths: Any, batch_first: bool) -> Any:
    common = torch.tensor(agreed_sizes(lengths))
    if not isinstance(x, Stacked):
        return func(x, common, batch_first)
    data, sizes = func(x.front().movedim(0, 2), common, batch_first)
    return Stacked(data.transpose(0, 1), x.count), Stacked.share(sizes, x.count)


@rule_for("_pad_packed_sequence")
def pad(
    func: Any, data: Any, sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    common = torch.tensor(agreed_sizes(sizes))
    if not isinstance(data, Stacked):
        return func(data, common, batch_first, padding_value, total_length)
    rows = data.front().transpose(0, 1)
    padded, lengths = func(rows, common, batch_first, padding_value, total_length)
    return Stacked(padded.movedim(2, 0), data.count), Stacked.share(lengths, data.count)


if PackedSequence not in _pytree.SUPPORTED_NODES:  # else it would be one value without tensors
    _pytree.register_pytree_node(
        PackedSequence, lambda packed: (list(packed), None), lambda parts, _: PackedSequence(*parts)
    )
