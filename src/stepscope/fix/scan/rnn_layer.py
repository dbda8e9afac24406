"""One layer of a plain RNN whose backward pass is a scan: a torch operator of its own,
without second derivatives.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stepscope.fix.scan import affine_maps
from stepscope.fix.scan.affine_maps import kernels_fit, refuse_second_derivative, wide
from stepscope.records.scan_costs import LARGEST_SIZE, fused_chunk, is_fused

# `rnn_layer` computes the states as torch does (cuDNN on a GPU) and keeps them alone. Its gradient
# is `rnn_layer_backward`: Triton kernels on a GPU, batched matrix products elsewhere. Both are
# custom operators with shapes for torch.compile; a second derivative is refused.

PRECISIONS = ("fp32", "tf32x3", "tf32", "bf16")
_DOT = {"fp32": "ieee", "tf32x3": "tf32x3", "tf32": "tf32", "bf16": "bf16"}  # as kernels call them
_FOLD = _DOT | {"tf32x3": "fp16x3"}  # of fused kernels: the same bits, faster
_LARGEST_PLAIN = 64  # beyond, products without tensor cores take minutes to compile
MOST_STEPS = 65535  # that cuDNN takes at once


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # inputs, initial state, weights, bias
_LAYER = "Tensor inputs, Tensor initial, Tensor weight_input, Tensor weight"


@torch.library.custom_op(
    "stepscope::rnn_layer",
    mutates_args=(),
    schema=f"({_LAYER}, Tensor? bias_input, Tensor? bias, bool tanh, str precision) -> Tensor",
)
def rnn_layer(*given: Any) -> Tensor:
    """Return all states, [steps, batch, size], of [steps, batch, features] and [batch, size]."""
    return _states(*given)


def _states(inputs: Tensor, initial: Tensor, *given: Any) -> Tensor:
    *layer, tanh, _precision = given
    weights = [one for one in layer if one is not None]
    compute = torch.rnn_tanh if tanh else torch.rnn_relu
    options = (weights, len(weights) > 2, 1, 0.0, False, False, False)
    pieces, state = [], initial.unsqueeze(0)
    with torch.no_grad(), no_warning(weights):
        for piece in inputs.split(MOST_STEPS):
            states, state = compute(piece, state, *options)
            pieces.append(states)
    return (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).contiguous()


def no_warning(weights: list[Tensor]) -> AbstractContextManager[Any]:
    """cuDNN wants weights in one piece and says so; only the first layer's are."""
    pieces = {one.untyped_storage().data_ptr() for one in weights}
    if not weights[0].is_cuda or (len(pieces) == 1 and weights[0].storage_offset() == 0):
        return nullcontext()  # looking away costs as much as a short layer
    return warnings.catch_warnings(action="ignore", category=UserWarning)


@rnn_layer.register_fake
def _(inputs: Tensor, initial: Tensor, *_: Any) -> Tensor:
    return inputs.new_empty(inputs.shape[0], *initial.shape)


@torch.library.custom_op(
    "stepscope::rnn_layer_backward",
    mutates_args=(),
    schema=(
        f"(Tensor gradient, Tensor states, {_LAYER}, bool tanh, str precision, bool wants_inputs) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def rnn_layer_backward(*given: Any) -> Gradients:
    """Gradients of inputs (empty if not wanted), initial state, both weights and a bias."""
    *tensors, tanh, precision, wants_inputs = given
    found = _gradients(*tensors, tanh=tanh, precision=precision, wants_inputs=wants_inputs)
    of_inputs, of_initial, *of_weights = found
    of_weight_input, of_weight, of_bias = (one.clone() for one in of_weights)
    return of_inputs, of_initial, of_weight_input, of_weight, of_bias


@rnn_layer_backward.register_fake
def _(*given: Any) -> Gradients:
    inputs, initial, weight_input, weight = given[2:6]
    return (
        torch.empty_like(inputs) if given[-1] else inputs.new_empty(0),
        torch.empty_like(initial),
        torch.empty_like(weight_input),
        torch.empty_like(weight),
        weight.new_empty(weight.shape[0]),
    )


def _gradients(*tensors: Tensor, tanh: bool, precision: str, wants_inputs: bool) -> Gradients:
    """Compute the operator's gradients; those of weights may be parts of one tensor."""
    gradient, states, inputs, initial, weight_input, weight = tensors
    steps, batch, size = map(int, gradient.shape)
    if kernels_fit(gradient, LARGEST_SIZE) and is_fused(size, inputs.shape[-1]):
        from stepscope.fix.scan.rnn_gradient_kernels import layer_gradients
        from stepscope.fix.scan.rnn_kernels import multiprocessors

        contiguous = (one.contiguous() for one in (weight_input, weight))
        return layer_gradients(
            gradient.contiguous(), states, inputs, initial, *contiguous,
            tanh=tanh, precision=_FOLD[precision],
            chunk=fused_chunk(steps, batch, multiprocessors(gradient.device)),
            wants_inputs=wants_inputs,
        )  # fmt: skip
    return gradients_by_parts(*tensors, tanh=tanh, precision=precision, wants_inputs=wants_inputs)


def gradients_by_parts(
    *tensors: Tensor, tanh: bool, precision: str, wants_inputs: bool
) -> Gradients:
    """First what reaches every state, then the gradients that follow from it."""
    gradient, states, inputs, initial, weight_input, weight = tensors
    reached, left = backward_states(gradient, states, weight, tanh=tanh, precision=precision)
    of_inputs = reached @ weight_input if wants_inputs else inputs.new_empty(0)
    if kernels_fit(reached, LARGEST_SIZE):
        from stepscope.fix.scan.rnn_gradient_kernels import weight_gradients

        # A sum over all steps is no place for 16 bits. Three products of tensor cores are as exact
        # as fp32 to a few 10^-7.
        exact = "tf32" if precision == "bf16" else precision
        if exact == "fp32" and reached.shape[-1] > _LARGEST_PLAIN:
            exact = "tf32x3"
        sums = weight_gradients(reached, states, initial, inputs, precision=_DOT[exact])
        return of_inputs, left, *sums
    rows = reached.flatten(0, 1)
    before = torch.cat([initial.unsqueeze(0), states[:-1]]).flatten(0, 1)
    return of_inputs, left, rows.t() @ inputs.flatten(0, 1), rows.t() @ before, rows.sum(0)


def backward_states(
    gradient: Tensor, states: Tensor, weight: Tensor, *, tanh: bool, precision: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Go back by kernels where they can run, else by batched products."""
    gradient = gradient.contiguous()
    if kernels_fit(gradient, LARGEST_SIZE):
        from stepscope.fix.scan.rnn_kernels import backward_states as by_kernels
        from stepscope.fix.scan.rnn_kernels import launch_for

        dot, weight = _DOT[precision], weight.contiguous()
        launch = launch_for(gradient.shape, gradient.device, dot)
        return by_kernels(gradient, states, weight, tanh=tanh, launch=launch, precision=dot)
    states_wide = wide(states)
    slope = 1 - states_wide * states_wide if tanh else (states_wide > 0).to(states_wide.dtype)
    reached, left = affine_maps.backward_states(wide(gradient), slope, wide(weight))
    return reached.to(states.dtype), left.to(states.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, initial, weight_input, weight, bias_input, _, tanh, precision = inputs
    ctx.save_for_backward(output, given, initial, weight_input, weight)
    ctx.tanh, ctx.precision, ctx.has_bias = tanh, precision, bias_input is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    states, *layer = ctx.saved_tensors
    # The operator only where its own gradient may be asked for (and refused), or it is compiled.
    as_operator = torch.is_grad_enabled() or torch.compiler.is_compiling()
    of_inputs, *others, of_bias = (rnn_layer_backward if as_operator else _gradients)(
        gradient, states, *layer,
        tanh=ctx.tanh, precision=ctx.precision, wants_inputs=ctx.needs_input_grad[0],
    )  # fmt: skip
    bias = of_bias if ctx.has_bias else None
    return (of_inputs if ctx.needs_input_grad[0] else None, *others, bias, bias, None, None)


rnn_layer.register_autograd(_backward, setup_context=_keep)
rnn_layer_backward.register_autograd(refuse_second_derivative)


class _EagerLayer(torch.autograd.Function):
    """The operator without torch.library around it, which costs a tenth of a millisecond a call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        states = _states(*inputs)
        _keep(ctx, inputs, states)
        return states

    backward = staticmethod(_backward)


def scanned_layer(*inputs: Any) -> Tensor:
    """`rnn_layer`, as cheaply as it can be called here."""
    if torch.compiler.is_compiling():
        return rnn_layer(*inputs)
    return _EagerLayer.apply(*inputs)
