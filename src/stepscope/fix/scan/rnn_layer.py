"""One layer of a plain RNN whose backward pass is a scan: a torch operator of its own.

`rnn_layer` computes the states as torch does (cuDNN on a GPU) and keeps them alone. Its gradient is
`rnn_layer_backward`: Triton kernels on a GPU, batched matrix products elsewhere. Both are custom
operators with shapes for torch.compile; a second derivative is refused.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stepscope.fix.scan import affine_maps
from stepscope.fix.scan.second_derivative import refuse_second_derivative

PRECISIONS = ("fp32", "tf32x3", "tf32")
_DOT = {"fp32": "ieee", "tf32x3": "tf32x3", "tf32": "tf32"}  # as Triton calls them
_LARGEST_SIZE = 128  # of a state that the kernels keep in registers
_LARGEST_PLAIN = 64  # beyond, products without tensor cores take minutes to compile
_SPLIT_FROM = 1 << 14  # rows: a product of tall matrices is split, or one block would do it all
_SPLITS = 128
_NOT_ONE_PIECE = ".*not part of single contiguous chunk of memory"


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
    weights = [weight_input, weight]
    if bias_input is not None and bias is not None:
        weights += [bias_input, bias]
    compute = torch.rnn_tanh if tanh else torch.rnn_relu
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", _NOT_ONE_PIECE)
        states, _ = compute(
            inputs, initial.unsqueeze(0), weights, len(weights) > 2, 1, 0.0, False, False, False
        )
    return states.contiguous()


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
    reached, left = backward_states(gradient, states, weight, tanh=tanh, precision=precision)
    rows = reached.flatten(0, 1)
    return (
        reached @ weight_input if wants_inputs else inputs.new_empty(0),
        left,
        _tall_product(rows, inputs.flatten(0, 1)),
        _tall_product(reached[1:].flatten(0, 1), states[:-1].flatten(0, 1))
        + reached[0].t() @ initial,
        rows.sum(0),
    )


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
    if _kernels_fit(gradient):
        from stepscope.fix.scan.kernels import backward_states as by_kernels
        from stepscope.fix.scan.launches import launch_for

        return by_kernels(
            gradient,
            states,
            weight.contiguous(),
            tanh=tanh,
            launch=launch_for(gradient.shape, gradient.device),
            precision=_dot(precision, gradient.shape[-1]),
        )
    slope = 1 - states * states if tanh else (states > 0).to(states.dtype)
    return affine_maps.backward_states(gradient, slope, weight)


def _dot(precision: str, size: int) -> str:
    """Three products of tensor cores are as exact as fp32 to a few 10^-7."""
    return _DOT["tf32x3" if precision == "fp32" and size > _LARGEST_PLAIN else precision]


def _kernels_fit(gradient: Tensor) -> bool:
    return (
        gradient.is_cuda
        and gradient.dtype == torch.float32
        and gradient.shape[-1] <= _LARGEST_SIZE
        and has_triton()
    )


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _tall_product(left: Tensor, right: Tensor) -> Tensor:
    """left.T @ right of many rows."""
    rows = left.shape[0]
    if not left.is_cuda or rows < _SPLIT_FROM:
        return left.t() @ right
    whole = rows // _SPLITS * _SPLITS
    parts = [values[:whole].unflatten(0, (_SPLITS, -1)) for values in (left, right)]
    product = torch.bmm(parts[0].transpose(1, 2), parts[1]).sum(0)
    return product + left[whole:].t() @ right[whole:] if whole < rows else product


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, initial, weight_input, weight, bias_input, _, tanh, precision = inputs
    ctx.save_for_backward(output, given, initial, weight_input, weight)
    ctx.tanh, ctx.precision, ctx.has_bias = tanh, precision, bias_input is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    states, given, initial, weight_input, weight = ctx.saved_tensors
    wants_inputs = ctx.needs_input_grad[0]
    of_inputs, of_initial, of_weight_input, of_weight, of_bias = rnn_layer_backward(
        gradient, states, given, initial, weight_input, weight,
        ctx.tanh, ctx.precision, wants_inputs,
    )  # fmt: skip
    bias = of_bias if ctx.has_bias else None
    return (
        of_inputs if wants_inputs else None,
        of_initial, of_weight_input, of_weight, bias, bias, None, None,
    )  # fmt: skip


rnn_layer.register_autograd(_backward, setup_context=_keep)
rnn_layer_backward.register_autograd(refuse_second_derivative)
