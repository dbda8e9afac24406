"""The element-wise linear recurrence as Triton kernels: fold chunks, join them, replay.

A thread has one element of the state and walks along the steps, so neighbours read neighbours. The
inputs are read twice and the states written once; between the two only one pair a chunk is kept.
Complex numbers are pairs of real ones, side by side as torch keeps them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK, _WIDTH = 64, 128


@triton.jit
def _load(values, here, inside, COMPLEX: tl.constexpr):
    """Real and imaginary part; that of a real number is zero and costs nothing."""
    if COMPLEX:
        real = tl.load(values + 2 * here, mask=inside, other=0.0)
        return real, tl.load(values + 2 * here + 1, mask=inside, other=0.0)
    else:
        real = tl.load(values + here, mask=inside, other=0.0)
        return real, tl.zeros_like(real)


@triton.jit
def _store(values, here, real, imaginary, inside, COMPLEX: tl.constexpr):
    if COMPLEX:
        tl.store(values + 2 * here, real, mask=inside)
        tl.store(values + 2 * here + 1, imaginary, mask=inside)
    else:
        tl.store(values + here, real, mask=inside)


@triton.jit
def _times(a, a_i, b, b_i, COMPLEX: tl.constexpr):
    """Zero times what has overflowed is zero."""
    if COMPLEX:
        zero = ((a == 0) & (a_i == 0)) | ((b == 0) & (b_i == 0))
        real, imaginary = a * b - a_i * b_i, a * b_i + a_i * b
        return tl.where(zero, 0.0, real), tl.where(zero, 0.0, imaginary)
    else:
        return tl.where((a == 0) | (b == 0), 0.0, a * b), a_i


@triton.jit
def _fold(
    decay, inputs, decays_out, states_out, steps, width, chunk,
    WIDTH: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    product, product_i = tl.full([WIDTH], 1.0, tl.float32), tl.zeros([WIDTH], tl.float32)
    state, state_i = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    first = group * chunk
    here = first.to(tl.int64) * width + columns
    for _ in range(first, tl.minimum(first + chunk, steps)):
        a, a_i = _load(decay, here, inside, COMPLEX)
        b, b_i = _load(inputs, here, inside, COMPLEX)
        state, state_i = _times(a, a_i, state, state_i, COMPLEX)
        state, state_i = state + b, state_i + b_i
        product, product_i = _times(a, a_i, product, product_i, COMPLEX)
        here += width
    there = group.to(tl.int64) * width + columns
    _store(decays_out, there, product, product_i, inside, COMPLEX)
    _store(states_out, there, state, state_i, inside, COMPLEX)


@triton.jit
def _replay(
    decay, inputs, entering, states, steps, width, chunk,
    WIDTH: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    state, state_i = _load(entering, group.to(tl.int64) * width + columns, inside, COMPLEX)
    first = group * chunk
    here = first.to(tl.int64) * width + columns
    for _ in range(first, tl.minimum(first + chunk, steps)):
        a, a_i = _load(decay, here, inside, COMPLEX)
        b, b_i = _load(inputs, here, inside, COMPLEX)
        state, state_i = _times(a, a_i, state, state_i, COMPLEX)
        state, state_i = state + b, state_i + b_i
        _store(states, here, state, state_i, inside, COMPLEX)
        here += width


def scan_pairs(decay: Tensor, inputs: Tensor) -> Tensor:
    """All states from a state of zero; both are [steps, ...], float32 or complex64."""
    steps, width = len(inputs), inputs[0].numel()
    chunks, blocks = triton.cdiv(steps, _CHUNK), triton.cdiv(width, _WIDTH)
    decay, inputs = decay.resolve_conj().contiguous(), inputs.resolve_conj().contiguous()
    states = torch.empty_like(inputs)
    entering = inputs.new_zeros(chunks, width)
    options = {"WIDTH": _WIDTH, "COMPLEX": inputs.is_complex(), "num_warps": 4}
    if chunks > 1:
        decays, ends = inputs.new_empty(chunks, width), inputs.new_empty(chunks, width)
        given = map(_as_floats, (decay, inputs, decays, ends))
        _fold[chunks, blocks](*given, steps, width, _CHUNK, **options)
        entering[1:] = scan_pairs(decays, ends)[:-1]
    given = map(_as_floats, (decay, inputs, entering, states))
    _replay[chunks, blocks](*given, steps, width, _CHUNK, **options)
    return states


def _as_floats(values: Tensor) -> Tensor:
    """The same memory."""
    return torch.view_as_real(values) if values.is_complex() else values
