"""All steps of one recurrent layer in one direction, for all models.

Rows are in order of time, as in a PackedSequence: [models, rows of all steps, width]. A step is one
batched product and the cell's pointwise part; on the way back the gradients of the weights are one
product over all steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepscope.fix.fuse.rules.recurrent_cells import CELLS

if TYPE_CHECKING:
    from stepscope.fix.fuse.rules.recurrent_cells import Tensors


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
        context.save_for_backward(*tensors, *_flat(records))
        return rows, *last

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        saved = context.saved_tensors
        given, flat = saved[: context.given], saved[context.given :]
        with torch.autocast(given[0].device.type, enabled=False):
            if torch.is_grad_enabled():  # the gradients will be differentiated themselves
                return None, *_differentiable(context, given, gradients)
            return None, *_backward(context, given, _records(flat, context.order), gradients)


def _sorted_out(tensors: Any) -> tuple[torch.Tensor, LayerWeights, Tensors]:
    gates, state, bias, projection, *initial = tensors
    return gates, LayerWeights(state, bias, projection), tuple(initial)


def _flat(records: list[_StepRecord]) -> list[Any]:
    return [one for record in records for one in (*record.before, *record.kept, record.output)]


def _records(flat: Any, order: StepOrder) -> list[_StepRecord]:
    each, states = len(flat) // len(order.sizes), 2 if order.kind == "lstm" else 1
    parts = (flat[begin : begin + each] for begin in range(0, len(flat), each))
    return [_StepRecord(part[:states], part[states:-1], part[-1]) for part in parts]


def _differentiable(context: Any, given: Any, gradients: Any) -> list[Any]:
    """By torch's own gradients of the steps, computed again."""
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
    """Of gates, weights and initial states; from the last step that was computed to the first."""
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
