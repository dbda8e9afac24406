"""One layer of a plain RNN whose backward pass is a scan: a torch operator of its own,
without second derivatives.
"""

from __future__ import annotations

import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from stepscope.fix.scan import affine_maps
from stepscope.records.scan_costs import LARGEST_SIZE, fused_chunk, is_fused


class SecondDerivativeError(NotImplementedError):
    """The gradient of a scan's gradient was asked for."""


def refuse_second_derivative(*_: Any) -> NoReturn:
    raise SecondDerivativeError(
        "the gradient of a scan's gradient is not implemented. Use torch's own modules where "
        "a second derivative is needed (create_graph=True, gradient penalties)"
    )


# `rnn_layer` computes the states as torch does (cuDNN on a GPU) and keeps them alone. Its gradient
# is `rnn_layer_backward`: Triton kernels on a GPU, batched matrix products elsewhere. Both are
# custom operators with shapes for torch.compile; a second derivative is refused.

PRECISIONS = ("fp32", "tf32x3", "tf32", "bf16")
_DOT = {"fp32": "ieee", "tf32x3": "tf32x3", "tf32": "tf32", "bf16": "bf16"}  # as kernels call them
_FOLD = _DOT | {"tf32x3": "fp16x3"}  # of fused kernels: the same bits, faster
_LARGEST_PLAIN = 64  # beyond, products without tensor cores take minutes to compile
MOST_STEPS = 65535  # that cuDNN takes at once


@torch.library.custom_op("stepscope::rnn_layer", mutates_args=())
def rnn_layer(
    inputs: Tensor,
    initial: Tensor,
    weight_input: Tensor,
    weight: Tensor,
    bias_input: Tensor | None,
    bias: Tensor | None,
    tanh: bool,
    precision: str,
) -> Tensor:
    """All states, [steps, batch, size], from [steps, batch, features] and [batch, size]."""
    return _states(inputs, initial, weight_input, weight, bias_input, bias, tanh)


def _states(
    inputs: Tensor,
    initial: Tensor,
    weight_input: Tensor,
    weight: Tensor,
    bias_input: Tensor | None,
    bias: Tensor | None,
    tanh: bool,
) -> Tensor:
    weights = [weight_input, weight]
    if bias_input is not None and bias is not None:
        weights += [bias_input, bias]
    compute = torch.rnn_tanh if tanh else torch.rnn_relu
    options = (weights, len(weights) > 2, 1, 0.0, False, False, False)
    with torch.no_grad(), no_warning(weights):
        states, state = compute(inputs[:MOST_STEPS], initial.unsqueeze(0), *options)
        found = [states]
        for some in inputs[MOST_STEPS:].split(MOST_STEPS) if len(inputs) > MOST_STEPS else ():
            states, state = compute(some, state, *options)
            found.append(states)
    return (torch.cat(found) if len(found) > 1 else states).contiguous()


def no_warning(weights: list[Tensor]) -> AbstractContextManager[Any]:
    """cuDNN wants weights in one piece and says so; only the first layer's are."""
    pieces = {one.untyped_storage().data_ptr() for one in weights}
    if not weights[0].is_cuda or (len(pieces) == 1 and weights[0].storage_offset() == 0):
        return nullcontext()  # looking away costs as much as a short layer
    return warnings.catch_warnings(action="ignore", category=UserWarning)


@rnn_layer.register_fake
def _(inputs: Tensor, initial: Tensor, *_: Any) -> Tensor:
    return inputs.new_empty(inputs.shape[0], *initial.shape)


@torch.library.custom_op("stepscope::rnn_layer_backward", mutates_args=())
def rnn_layer_backward(
    gradient: Tensor,
    states: Tensor,
    inputs: Tensor,
    initial: Tensor,
    weight_input: Tensor,
    weight: Tensor,
    tanh: bool,
    precision: str,
    wants_inputs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of inputs (empty if not wanted), initial state, both weights and a bias."""
    found = _gradients(
        gradient, states, inputs, initial, weight_input, weight,
        tanh=tanh, precision=precision, wants_inputs=wants_inputs,
    )  # fmt: skip
    of_inputs, of_initial, *of_weights = found
    return of_inputs, of_initial, *(one.clone() for one in of_weights)


def _gradients(
    gradient: Tensor,
    states: Tensor,
    inputs: Tensor,
    initial: Tensor,
    weight_input: Tensor,
    weight: Tensor,
    *,
    tanh: bool,
    precision: str,
    wants_inputs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the operator gives them; those of weights may be parts of one tensor."""
    steps, batch, size = map(int, gradient.shape)
    if kernels_fit(gradient, LARGEST_SIZE) and is_fused(size, inputs.shape[-1]):
        from stepscope.fix.scan.rnn_gradient_kernels import layer_gradients
        from stepscope.fix.scan.rnn_kernels import multiprocessors

        return layer_gradients(
            gradient.contiguous(), states, inputs, initial, weight_input.contiguous(),
            weight.contiguous(), tanh=tanh, precision=_FOLD[precision],
            chunk=fused_chunk(steps, batch, multiprocessors(gradient.device)),
            wants_inputs=wants_inputs,
        )  # fmt: skip
    return gradients_by_parts(
        gradient, states, inputs, initial, weight_input, weight,
        tanh=tanh, precision=precision, wants_inputs=wants_inputs,
    )  # fmt: skip


def gradients_by_parts(
    gradient: Tensor,
    states: Tensor,
    inputs: Tensor,
    initial: Tensor,
    weight_input: Tensor,
    weight: Tensor,
    *,
    tanh: bool,
    precision: str,
    wants_inputs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """First what reaches every state, then the gradients that follow from it."""
    reached, left = backward_states(gradient, states, weight, tanh=tanh, precision=precision)
    of_inputs = reached @ weight_input if wants_inputs else inputs.new_empty(0)
    return of_inputs, left, *_of_weights(reached, states, inputs, initial, precision)


def _of_weights(
    reached: Tensor, states: Tensor, inputs: Tensor, initial: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    if kernels_fit(reached, LARGEST_SIZE):
        from stepscope.fix.scan.rnn_gradient_kernels import weight_gradients

        # A sum over all steps is no place for 16 bits.
        dot = _of_sums("tf32" if precision == "bf16" else precision, reached.shape[-1])
        return weight_gradients(reached, states, initial, inputs, precision=dot)
    rows = reached.flatten(0, 1)
    before = torch.cat([initial.unsqueeze(0), states[:-1]]).flatten(0, 1)
    return rows.t() @ inputs.flatten(0, 1), rows.t() @ before, rows.sum(0)


@rnn_layer_backward.register_fake
def _(
    gradient: Tensor,
    states: Tensor,
    inputs: Tensor,
    initial: Tensor,
    weight_input: Tensor,
    weight: Tensor,
    tanh: bool,
    precision: str,
    wants_inputs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(inputs) if wants_inputs else inputs.new_empty(0),
        torch.empty_like(initial),
        torch.empty_like(weight_input),
        torch.empty_like(weight),
        weight.new_empty(weight.shape[0]),
    )


def backward_states(
    gradient: Tensor, states: Tensor, weight: Tensor, *, tanh: bool, precision: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """By the kernels where they can run, else by batched products."""
    gradient = gradient.contiguous()
    if kernels_fit(gradient, LARGEST_SIZE):
        from stepscope.fix.scan.rnn_kernels import backward_states as by_kernels
        from stepscope.fix.scan.rnn_kernels import launch_for

        return by_kernels(
            gradient,
            states,
            weight.contiguous(),
            tanh=tanh,
            launch=launch_for(gradient.shape, gradient.device, _DOT[precision]),
            precision=_DOT[precision],
        )
    states_wide = wide(states)
    slope = 1 - states_wide * states_wide if tanh else (states_wide > 0).to(states_wide.dtype)
    reached, left = affine_maps.backward_states(wide(gradient), slope, wide(weight))
    return reached.to(states.dtype), left.to(states.dtype)


def wide(values: Tensor) -> Tensor:
    """16 bits hold neither products of many Jacobians nor their powers of two."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _of_sums(precision: str, size: int) -> str:
    """Three products of tensor cores are as exact as fp32 to a few 10^-7."""
    return _DOT["tf32x3" if precision == "fp32" and size > _LARGEST_PLAIN else precision]


def kernels_fit(values: Tensor, largest: int | None = None, *, or_complex: bool = False) -> bool:
    """Whether Triton's kernels take them; `largest` is that of the last dimension."""
    return (
        values.is_cuda
        and (values.dtype == torch.float32 or (or_complex and values.dtype == torch.complex64))
        and (largest is None or values.shape[-1] <= largest)
        and _has_triton()
    )


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, initial, weight_input, weight, bias_input, _, tanh, precision = inputs
    ctx.save_for_backward(output, given, initial, weight_input, weight)
    ctx.tanh, ctx.precision, ctx.has_bias = tanh, precision, bias_input is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    states, given, initial, weight_input, weight = ctx.saved_tensors
    wants_inputs = ctx.needs_input_grad[0]
    # The operator only where its own gradient may be asked for (and refused), or it is compiled.
    as_operator = torch.is_grad_enabled() or torch.compiler.is_compiling()
    of_inputs, of_initial, of_weight_input, of_weight, of_bias = (
        rnn_layer_backward if as_operator else _gradients
    )(
        gradient, states, given, initial, weight_input, weight,
        tanh=ctx.tanh, precision=ctx.precision, wants_inputs=wants_inputs,
    )  # fmt: skip
    bias = of_bias if ctx.has_bias else None
    return (
        of_inputs if wants_inputs else None,
        of_initial, of_weight_input, of_weight, bias, bias, None, None,
    )  # fmt: skip


rnn_layer.register_autograd(_backward, setup_context=_keep)
rnn_layer_backward.register_autograd(refuse_second_derivative)


class _EagerLayer(torch.autograd.Function):
    """The operator without torch.library around it, which costs a tenth of a millisecond a call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        states = _states(*inputs[:7])
        _keep(ctx, inputs, states)
        return states

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, gradient)


def scanned_layer(*inputs: Any) -> Tensor:
    """`rnn_layer`, as cheaply as it can be called here."""
    if torch.compiler.is_compiling():
        return rnn_layer(*inputs)
    return _EagerLayer.apply(*inputs)
