"""Triton kernels of GRU, LSTM and linear recurrences: fold chunks, join them, replay."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.fix.scan.rnn_kernels import _rescale, carries, multiprocessors, padded_size
from stepscope.records.scan_costs import gpu_chunk

# The scan of gated_layer.py as Triton kernels, for states of up to 64.
#
# `_fold`: a program for each chunk and sequence keeps the chunk's matrix in registers, and makes
# each step's change there from its coefficients. `_replay`: the steps of a chunk again, for the row
# that enters it. Carries between chunks are those of plain RNNs. Products are of
# float32 without tensor cores: a gate that keeps nearly everything makes a long memory.


@triton.jit
def _tile(basis, mixed, size, MIXED: tl.constexpr, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE), tl.arange(0, SIZE)
    return tl.load(
        basis + (rows[:, None] * MIXED + mixed) * size + columns[None, :],
        mask=(rows < size)[:, None] & (columns < size)[None, :], other=0.0,
    )  # fmt: skip


@triton.jit
def _change(
    coefficient, place, inside, b0, b1, b2, b3, b4, MIXED: tl.constexpr, SIZE: tl.constexpr
):
    """The change that one step of one sequence makes: its Jacobian but for what is kept."""
    here = coefficient + (place + tl.arange(0, SIZE)) * MIXED
    change = tl.load(here, mask=inside, other=0.0)[:, None] * b0
    change += tl.load(here + 1, mask=inside, other=0.0)[:, None] * b1
    change += tl.load(here + 2, mask=inside, other=0.0)[:, None] * b2
    change += tl.load(here + 3, mask=inside, other=0.0)[:, None] * b3
    if MIXED == 5:
        change += tl.load(here + 4, mask=inside, other=0.0)[:, None] * b4
    return change


@triton.jit
def _fold(
    gradient, coefficient, basis, matrix_out, exponent_out, offset_out,
    steps, batch, size, chunk, kept,
    MIXED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    group, sequence = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, SIZE), tl.arange(0, SIZE)
    inside, is_kept = columns < size, (columns >= kept) & (columns < size)
    b0 = _tile(basis, 0, size, MIXED, SIZE)
    b1 = _tile(basis, 1, size, MIXED, SIZE)
    b2 = _tile(basis, 2, size, MIXED, SIZE)
    b3 = _tile(basis, 3, size, MIXED, SIZE)
    b4 = _tile(basis, MIXED - 1, size, MIXED, SIZE)
    matrix = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0)
    exponent = tl.zeros([SIZE], tl.float32)
    offset = tl.zeros([SIZE], tl.float32)
    first = group * chunk
    last = tl.minimum(first + chunk, steps) - 1
    for back in range(last - first + 1):
        place = ((last - back) * batch + sequence).to(tl.int64) * size
        change = _change(coefficient, place, inside, b0, b1, b2, b3, b4, MIXED, SIZE)
        arrived = offset + tl.load(gradient + place + columns, mask=inside, other=0.0)
        unchanged = tl.where(is_kept[None, :], matrix, 0.0)
        matrix = unchanged + tl.dot(matrix, change, input_precision="ieee")
        offset = tl.where(is_kept, arrived, 0.0) + tl.sum(arrived[:, None] * change, axis=0)
        if back % 8 == 7:
            matrix, exponent = _rescale(matrix, exponent)
    matrix, exponent = _rescale(matrix, exponent)
    place = (group * batch + sequence).to(tl.int64) * size
    tl.store(
        matrix_out + (place + rows[:, None]) * size + columns[None, :], matrix,
        mask=(rows < size)[:, None] & inside[None, :],
    )  # fmt: skip
    tl.store(exponent_out + place + rows, exponent, mask=rows < size)
    tl.store(offset_out + place + columns, offset, mask=inside)


@triton.jit
def _replay(
    gradient, coefficient, basis, entering, reached, left,
    steps, batch, size, chunk, kept,
    MIXED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    group, sequence = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, SIZE)
    inside, is_kept = columns < size, (columns >= kept) & (columns < size)
    b0 = _tile(basis, 0, size, MIXED, SIZE)
    b1 = _tile(basis, 1, size, MIXED, SIZE)
    b2 = _tile(basis, 2, size, MIXED, SIZE)
    b3 = _tile(basis, 3, size, MIXED, SIZE)
    b4 = _tile(basis, MIXED - 1, size, MIXED, SIZE)
    enters = entering + (group * batch + sequence).to(tl.int64) * size
    row = tl.load(enters + columns, mask=inside, other=0.0)
    first = group * chunk
    last = tl.minimum(first + chunk, steps) - 1
    for back in range(last - first + 1):
        place = ((last - back) * batch + sequence).to(tl.int64) * size
        change = _change(coefficient, place, inside, b0, b1, b2, b3, b4, MIXED, SIZE)
        arrived = row + tl.load(gradient + place + columns, mask=inside, other=0.0)
        tl.store(reached + place + columns, arrived, mask=inside)
        row = tl.where(is_kept, arrived, 0.0) + tl.sum(arrived[:, None] * change, axis=0)
    if group == 0:
        tl.store(left + sequence * size + columns, row, mask=inside)


def backward_rows(
    gradient: Tensor, coefficient: Tensor, basis: Tensor, kept: int, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute gated_layer.backward_rows; tensors of float32, contiguous."""
    steps, batch, size = map(int, gradient.shape)
    chunk = chunk or gpu_chunk(steps, batch, size, multiprocessors(gradient.device))
    chunks, padded = triton.cdiv(steps, chunk), padded_size(size)
    given, numbers = (gradient, coefficient, basis), (steps, batch, size, chunk, kept)
    options = {"MIXED": basis.shape[1], "SIZE": padded, "num_warps": padded**2 // 256}
    maps = (
        gradient.new_empty(chunks, batch, size, size),
        gradient.new_empty(chunks, batch, size),
        gradient.new_empty(chunks, batch, size),
    )
    _fold[chunks, batch](*given, *maps, *numbers, **options)
    reached, left = torch.empty_like(gradient), torch.empty_like(gradient[0])
    _replay[chunks, batch](*given, carries(maps), reached, left, *numbers, **options)
    return reached, left


# The element-wise linear recurrence as Triton kernels: fold chunks, join them, replay.
#
# A thread has one element of the state and walks along the steps, so neighbours read neighbours.
# The inputs are read twice and the states written once; between the two only one pair a chunk is
# kept. Complex numbers are pairs of real ones, side by side as torch keeps them.

_CHUNK, _WIDTH = 64, 128


@triton.jit
def _load_number(values, here, inside, COMPLEX: tl.constexpr):
    """Real and imaginary part; that of a real number is zero and costs nothing."""
    if COMPLEX:
        real = tl.load(values + 2 * here, mask=inside, other=0.0)
        return real, tl.load(values + 2 * here + 1, mask=inside, other=0.0)
    else:
        real = tl.load(values + here, mask=inside, other=0.0)
        return real, tl.zeros_like(real)


@triton.jit
def _store_number(values, here, real, imaginary, inside, COMPLEX: tl.constexpr):
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
def _fold_pairs(
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
        a, a_i = _load_number(decay, here, inside, COMPLEX)
        b, b_i = _load_number(inputs, here, inside, COMPLEX)
        state, state_i = _times(a, a_i, state, state_i, COMPLEX)
        state, state_i = state + b, state_i + b_i
        product, product_i = _times(a, a_i, product, product_i, COMPLEX)
        here += width
    there = group.to(tl.int64) * width + columns
    _store_number(decays_out, there, product, product_i, inside, COMPLEX)
    _store_number(states_out, there, state, state_i, inside, COMPLEX)


@triton.jit
def _replay_pairs(
    decay, inputs, entering, states, steps, width, chunk,
    WIDTH: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    state, state_i = _load_number(entering, group.to(tl.int64) * width + columns, inside, COMPLEX)
    first = group * chunk
    here = first.to(tl.int64) * width + columns
    for _ in range(first, tl.minimum(first + chunk, steps)):
        a, a_i = _load_number(decay, here, inside, COMPLEX)
        b, b_i = _load_number(inputs, here, inside, COMPLEX)
        state, state_i = _times(a, a_i, state, state_i, COMPLEX)
        state, state_i = state + b, state_i + b_i
        _store_number(states, here, state, state_i, inside, COMPLEX)
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
        _fold_pairs[chunks, blocks](*given, steps, width, _CHUNK, **options)
        entering[1:] = scan_pairs(decays, ends)[:-1]
    given = map(_as_floats, (decay, inputs, entering, states))
    _replay_pairs[chunks, blocks](*given, steps, width, _CHUNK, **options)
    return states


def _as_floats(values: Tensor) -> Tensor:
    """The same memory."""
    return torch.view_as_real(values) if values.is_complex() else values
