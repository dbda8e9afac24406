"""All gradients of an RNN layer with few launches, as Triton kernels: the whole backward
pass for small states, the weights' gradients for any.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.fix.scan.rnn_kernels import (
    LOSSY_SUMS,
    _lasts,
    _product,
    _rescale,
    _slope,
    _through,
    multiprocessors,
    padded_size,
    plain_warps,
    remembered,
)

# A layer's whole backward pass in three launches and a sum, for states of at most 32.
#
# Up to some thousand steps the host's launches take longer than the device's work, so here few
# kernels do everything. `_fold_and_chain`: a program for each chunk and sequence folds its steps;
# the one that is done last for a sequence goes through all its maps. `_replay_and_sum`: the steps
# of a chunk for a block of sequences, the gradients of its inputs, and its part of the weights'
# sums. The gradient that reached each step never leaves the registers.
#
# The state's true size is known when a kernel is compiled: addresses are cheap, and loads take four
# numbers at a time. The matrix is padded to a power of two; where a row of it is free, the map's
# offset is that row, and costs nothing.

_SEQUENCES = 16  # of the batch that one program replays
_REPLAY_WARPS = 4  # one would not hold the sums; without tensor cores a step waits the least


@triton.jit
def _load_steps(values, here, inside):
    return tl.load(values + here, mask=inside, other=0.0)


@triton.jit
def _first(sequences, count, inside):
    return (sequences < count)[:, None] & inside[None, :]


@triton.jit
def _tf32_parts(values):
    """The 10 bits of a number's fraction that a tensor core looks at, and the rest."""
    high = (values.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, values - high


@triton.jit
def _fp16_parts(values):
    """22 bits of a number in two halves; the second has its own range."""
    high = values.to(tl.float16)
    return high, ((values - high.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def _weight_parts(w, PRECISION: tl.constexpr):
    """High and low part, and the powers of two that products of 16 bits leave out of it: then no
    number of a product is larger than the largest of its row, and 16 bits hold it."""
    if PRECISION == "fp16x3":
        norm = tl.maximum(tl.max(tl.sum(tl.abs(w), axis=0), axis=0), 1e-30)
        shrunk = tl.ceil(tl.log2(norm))
        high, low = _fp16_parts(w * tl.exp2(-shrunk))
        return high, low, shrunk
    else:
        high, low = _tf32_parts(w)
        return high, low, 0.0


@triton.jit
def _raised(matrix, exponent, PRECISION: tl.constexpr):
    """High in the range of 16 bits, so that eight steps may shrink it."""
    if PRECISION == "fp16x3":
        return matrix * 4096.0, exponent - 12.0
    else:
        return matrix, exponent


@triton.jit
def _times(left, w, w_high, w_low, PRECISION: tl.constexpr):
    """Times the weight, whose parts are computed once."""
    if PRECISION == "tf32x3":  # Triton's own spends a third of the loop on infinities
        high, low = _tf32_parts(left)
        small = tl.dot(
            high, w_low, tl.dot(low, w_high, input_precision="tf32"), input_precision="tf32"
        )
        return tl.dot(high, w_high, small, input_precision="tf32")
    elif PRECISION == "fp16x3":
        high, low = _fp16_parts(left)
        small = tl.dot(high, w_low, tl.dot(low, w_high))
        return tl.dot(high, w_high, small / 2048.0)
    else:
        return _product(left, w, PRECISION)


@triton.jit
def _fold_and_chain(
    gradient, state, weight, lasting, matrices, exponents, offsets, entering, done,
    steps, batch, chunk, chunks,
    SIZE: tl.constexpr, PADDED: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
    REMEMBERED: tl.constexpr, SIZE_BITS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    if AGAIN:
        if tl.load(lasting) == 0:
            return
    group, sequence = tl.program_id(0) + 1, tl.program_id(1)  # nothing comes before the first chunk
    columns, rows = tl.arange(0, PADDED), tl.arange(0, PADDED)
    inside = columns < SIZE
    within = (rows < SIZE)[:, None] & inside[None, :]
    w = tl.load(weight + rows[:, None] * SIZE + columns[None, :], mask=within, other=0.0)
    offset_is_a_row: tl.constexpr = SIZE < PADDED and PRECISION != "fp16x3"
    w_high, w_low, shrunk = _weight_parts(w, PRECISION)
    matrix = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0)
    exponent = tl.zeros([PADDED], tl.float32)
    offset = tl.zeros([PADDED], tl.float32)
    matrix, exponent = _raised(matrix, exponent, PRECISION)
    if offset_is_a_row:
        matrix = tl.where(within, matrix, 0.0)
        is_offset = tl.where(rows == SIZE, 1.0, 0.0)
    first = group * chunk
    last = tl.minimum(first + chunk, steps) - 1
    here = (last * batch + sequence).to(tl.int64) * SIZE + columns
    g, h = _load_steps(gradient, here, inside), _load_steps(state, here, inside)
    for back in range(last - first + 1):
        earlier = tl.maximum(last - back - 1, first)  # loaded while this step is computed
        here = (earlier * batch + sequence).to(tl.int64) * SIZE + columns
        next_g, next_h = _load_steps(gradient, here, inside), _load_steps(state, here, inside)
        slope = tl.where(inside, _slope(h, TANH), 0.0)
        if offset_is_a_row:
            scaled = matrix * slope[None, :] + is_offset[:, None] * (g * slope)[None, :]
        else:
            scaled = matrix * slope[None, :]
            offset = tl.sum(((offset + g) * slope)[:, None] * w, axis=0)
        matrix = _times(scaled, w, w_high, w_low, PRECISION)
        if back % 8 == 7:
            matrix, exponent = _rescale_map(matrix, exponent, rows, SIZE, offset_is_a_row)
            matrix, exponent = _raised(matrix, exponent, PRECISION)
        g, h = next_g, next_h
    exponent += shrunk * (last - first + 1)
    matrix, exponent = _rescale_map(matrix, exponent, rows, SIZE, offset_is_a_row)
    if REMEMBERED > 0:
        if _lasts(matrix, exponent, rows < SIZE, last - first + 1, REMEMBERED, SIZE_BITS) > 0:
            tl.store(lasting, 1)
    if offset_is_a_row:
        offset = tl.sum(tl.where((rows == SIZE)[:, None], matrix, 0.0), axis=0)
    place = (group * batch + sequence).to(tl.int64)
    tl.store(
        matrices + place * (SIZE * SIZE) + rows[:, None] * SIZE + columns[None, :], matrix,
        mask=within,
    )  # fmt: skip
    tl.store(exponents + place * SIZE + rows, exponent, mask=rows < SIZE)
    tl.store(offsets + place * SIZE + columns, offset, mask=inside)
    tl.debug_barrier()
    before_me = tl.atomic_add(done + sequence, 1, sem="acq_rel", scope="gpu")
    if before_me == chunks - 2:  # every other chunk of this sequence is folded
        tl.debug_barrier()
        _chain(matrices, exponents, offsets, entering, sequence, batch, chunks, SIZE, PADDED)


@triton.jit
def _rescale_map(matrix, exponent, rows, SIZE: tl.constexpr, OFFSET_IS_A_ROW: tl.constexpr):
    """The offset's row meets gradients that come later, so it stays as it is."""
    if OFFSET_IS_A_ROW:
        scaled, power = _rescale(matrix, exponent)
        is_matrix = rows < SIZE
        return (
            tl.where(is_matrix[:, None], scaled, matrix),
            tl.where(is_matrix, power, exponent),
        )
    else:
        return _rescale(matrix, exponent)


@triton.jit
def _chain(
    matrices, exponents, offsets, entering, sequence, batch, chunks,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute what enters each chunk but the last, one after the other; the next map is loaded
    while this one is computed."""
    columns, rows = tl.arange(0, PADDED), tl.arange(0, PADDED)
    inside = columns < SIZE
    within = (rows < SIZE)[:, None] & inside[None, :]
    cells = rows[:, None] * SIZE + columns[None, :]
    row = tl.zeros([PADDED], tl.float32)
    place = ((chunks - 1) * batch + sequence).to(tl.int64)
    matrix = tl.load(matrices + place * (SIZE * SIZE) + cells, mask=within, other=0.0)
    exponent = tl.load(exponents + place * SIZE + columns, mask=inside, other=0.0)
    offset = tl.load(offsets + place * SIZE + columns, mask=inside, other=0.0)
    for back in range(chunks - 1):
        group = chunks - 1 - back
        following = (tl.maximum(group - 1, 1) * batch + sequence).to(tl.int64)
        next_matrix = tl.load(matrices + following * (SIZE * SIZE) + cells, mask=within, other=0.0)
        next_exponent = tl.load(exponents + following * SIZE + columns, mask=inside, other=0.0)
        next_offset = tl.load(offsets + following * SIZE + columns, mask=inside, other=0.0)
        row = _through(row, matrix, exponent) + offset
        there = ((group - 1) * batch + sequence).to(tl.int64) * SIZE + columns
        tl.store(entering + there, row, mask=inside)
        matrix, exponent, offset = next_matrix, next_exponent, next_offset


@triton.jit(do_not_specialize=["batch"])  # a batch of one would be no tensor, and have no type
def _replay_and_sum(
    gradient, state, initial, inputs, weight, weight_input, entering, left, of_inputs, partial,
    steps, batch, chunk, chunks, sums_of_input, sums_of_bias, sums_width,
    SIZE: tl.constexpr, PADDED: tl.constexpr, FEATURES: tl.constexpr, WIDE: tl.constexpr,
    SEQUENCES: tl.constexpr, WANTS_INPUTS: tl.constexpr, TANH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    group, block = tl.program_id(0), tl.program_id(1)
    columns, features, rows = tl.arange(0, PADDED), tl.arange(0, WIDE), tl.arange(0, PADDED)
    sequences = block * SEQUENCES + tl.arange(0, SEQUENCES)
    inside = _first(sequences, batch, columns < SIZE)
    fed = _first(sequences, batch, features < FEATURES)
    square = (rows < SIZE)[:, None] & (columns < SIZE)[None, :]
    oblong = (rows < SIZE)[:, None] & (features < FEATURES)[None, :]
    of_weight = rows[:, None] * SIZE + columns[None, :]
    of_weight_input = rows[:, None] * FEATURES + features[None, :]
    w = tl.load(weight + of_weight, mask=square, other=0.0)
    if WANTS_INPUTS:
        w_input = tl.load(weight_input + of_weight_input, mask=oblong, other=0.0)
    states = sequences[:, None] * SIZE + columns[None, :]
    given = sequences[:, None] * FEATURES + features[None, :]
    of_a_step, fed_a_step = (batch * SIZE).to(tl.int64), (batch * FEATURES).to(tl.int64)
    entered = tl.where(group < chunks - 1, batch, 0)  # nothing enters the last chunk
    row = _load_steps(
        entering, group * of_a_step + states, _first(sequences, entered, columns < SIZE)
    )
    sum_weight = tl.zeros([PADDED, PADDED], tl.float32)
    sum_input = tl.zeros([PADDED, WIDE], tl.float32)
    sum_bias = tl.zeros([SEQUENCES, PADDED], tl.float32)
    first = group * chunk
    last = tl.minimum(first + chunk, steps) - 1
    g = _load_steps(gradient, last * of_a_step + states, inside)
    h = _load_steps(state, last * of_a_step + states, inside)
    x = _load_steps(inputs, last * fed_a_step + given, fed)
    for back in range(last - first + 1):
        step = last - back
        earlier = tl.maximum(step - 1, 0)
        next_g = _load_steps(gradient, earlier * of_a_step + states, inside)
        next_x = _load_steps(inputs, earlier * fed_a_step + given, fed)
        later = tl.where(step > 0, batch, 0)
        before = _load_steps(
            state, earlier * of_a_step + states, _first(sequences, later, columns < SIZE)
        ) + _load_steps(initial, states, _first(sequences, batch - later, columns < SIZE))
        error = (row + g) * tl.where(inside, _slope(h, TANH), 0.0)
        row = tl.dot(error, w, input_precision=PRECISION)
        if WANTS_INPUTS:
            met = tl.dot(error, w_input, input_precision=PRECISION)
            tl.store(of_inputs + step * fed_a_step + given, met, mask=fed)
        turned = tl.trans(error)
        sum_weight = tl.dot(turned, before, sum_weight, input_precision=PRECISION)
        sum_input = tl.dot(turned, x, sum_input, input_precision=PRECISION)
        sum_bias += error
        g, h, x = next_g, before, next_x
    if group == 0:
        tl.store(left + states, row, mask=inside)
    mine = partial + (group * tl.num_programs(1) + block).to(tl.int64) * sums_width
    tl.store(mine + of_weight, sum_weight, mask=square)
    tl.store(mine + sums_of_input + of_weight_input, sum_input, mask=oblong)
    tl.store(mine + sums_of_bias + columns, tl.sum(sum_bias, axis=0), mask=columns < SIZE)


def layer_gradients(
    *tensors: Tensor, tanh: bool, chunk: int, precision: str, wants_inputs: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of inputs (empty if not wanted), initial state, both weights and a bias.

    `tensors` are the gradient and the states, then what was given to the layer: inputs, initial
    state, both weights; all contiguous, in fp32, the state and the features no larger than
    FUSED_SIZE. `precision` is the fold's; the steps themselves are exact unless a short one is
    asked for."""
    gradient, state, inputs, initial, weight_input, weight = tensors
    steps, batch, size = gradient.shape
    features, chunks = inputs.shape[-1], triton.cdiv(steps, chunk)
    padded, wide = padded_size(size), padded_size(features)
    entering = gradient.new_empty(chunks, batch, size)
    folds = [precision, "ieee"] if precision in LOSSY_SUMS else [precision]
    if chunks > 1:
        lasting, *done = gradient.new_zeros(1 + len(folds) * batch, dtype=torch.int32).split(
            [1] + [batch] * len(folds)
        )
        maps = (
            gradient.new_empty(chunks, batch, size, size), torch.empty_like(entering),
            torch.empty_like(entering),
        )  # fmt: skip
        for fold, its_done in zip(folds, done, strict=True):
            _fold_and_chain[chunks - 1, batch](
                gradient, state, weight, lasting, *maps, entering, its_done,
                steps, batch, chunk, chunks,
                SIZE=size, PADDED=padded, TANH=tanh, PRECISION=fold,
                REMEMBERED=remembered(padded, fold), SIZE_BITS=padded.bit_length() - 1,
                AGAIN=fold != precision, num_warps=plain_warps(padded),
            )  # fmt: skip
    left = torch.empty_like(initial)
    of_inputs = torch.empty_like(inputs) if wants_inputs else inputs.new_empty(0)
    sums = GradientSums.of(size, features)
    blocks = triton.cdiv(batch, _SEQUENCES)
    partial = gradient.new_empty(chunks * blocks, sums.width)
    _replay_and_sum[chunks, blocks](
        gradient, state, initial, inputs, weight, weight_input, entering, left,
        of_inputs, partial,
        steps, batch, chunk, chunks, sums.of_input, sums.of_bias, sums.width,
        SIZE=size, PADDED=padded, FEATURES=features, WIDE=wide, SEQUENCES=_SEQUENCES,
        WANTS_INPUTS=wants_inputs, TANH=tanh,
        PRECISION="tf32" if precision in ("tf32", "bf16") else "ieee", num_warps=_REPLAY_WARPS,
    )  # fmt: skip
    return of_inputs, left, *sums.parts(partial.sum(0))


# An RNN layer's weight gradients in two launches instead of a dozen.
#
# At a thousand steps the host's launches, not the device, decide how long a backward pass takes.
#
# All three are sums over every step and sequence of (gradient of the state) x (what it met): the
# state before, the input, and one. `_partial_sums` sums a stretch of rows in each program; one sum
# of torch's joins the stretches.

_ROWS = 64  # that one product sums
_LEAST_ROWS = 256  # of a stretch
_STRETCHES = 4  # a multiprocessor
_COLUMNS = 64  # of the inputs that one program meets
_ALIGNED = 32  # numbers: where each gradient begins in the sum


class WeightGradients(NamedTuple):
    """Gradients of one layer's weights; the bias's is that of both biases."""

    input: Tensor
    recurrent: Tensor
    bias: Tensor


class GradientSums(NamedTuple):
    """Where each gradient stands in a row of sums: the recurrent weight's first, each aligned."""

    size: int
    features: int
    of_input: int
    of_bias: int
    width: int

    @classmethod
    def of(cls, size: int, features: int) -> GradientSums:
        of_input = _aligned(size * size)
        of_bias = of_input + _aligned(size * features)
        return cls(size, features, of_input, of_bias, of_bias + _aligned(size))

    def parts(self, total: Tensor) -> WeightGradients:
        size, features = self.size, self.features
        return WeightGradients(
            total[self.of_input : self.of_input + size * features].view(size, features),
            total[: size * size].view(size, size),
            total[self.of_bias : self.of_bias + size],
        )


@triton.jit
def _partial_sums(
    reached, state, initial, inputs, partial,
    rows, batch, size, features, stretch, of_input, of_bias, width,
    ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    piece, block = tl.program_id(0), tl.program_id(1)
    out = tl.arange(0, SIZE)
    columns = tl.arange(0, COLUMNS)
    if block > 0:
        columns += (block - 1) * COLUMNS
    total = tl.zeros([SIZE, COLUMNS], tl.float32)
    bias = tl.zeros([SIZE], tl.float32)
    first = piece * stretch
    for start in range(first, tl.minimum(first + stretch, rows), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        here = row < rows
        error = tl.load(
            reached + row[:, None] * size + out[None, :],
            mask=here[:, None] & (out < size)[None, :], other=0.0,
        )  # fmt: skip
        if block == 0:
            inside = (columns < size)[None, :]
            later = here & (row >= batch)
            met = tl.load(
                state + (row - batch)[:, None] * size + columns[None, :],
                mask=later[:, None] & inside, other=0.0,
            ) + tl.load(
                initial + row[:, None] * size + columns[None, :],
                mask=(here & (row < batch))[:, None] & inside, other=0.0,
            )  # fmt: skip
            bias += tl.sum(error, axis=0)
        else:
            met = tl.load(
                inputs + row[:, None] * features + columns[None, :],
                mask=here[:, None] & (columns < features)[None, :], other=0.0,
            )  # fmt: skip
        total = tl.dot(tl.trans(error), met, total, input_precision=PRECISION)
    mine = partial + piece.to(tl.int64) * width
    if block == 0:
        tl.store(
            mine + out[:, None] * size + columns[None, :], total,
            mask=(out < size)[:, None] & (columns < size)[None, :],
        )  # fmt: skip
        tl.store(mine + of_bias + out, bias, mask=out < size)
    else:
        tl.store(
            mine + of_input + out[:, None] * features + columns[None, :], total,
            mask=(out < size)[:, None] & (columns < features)[None, :],
        )  # fmt: skip


def weight_gradients(
    reached: Tensor, state: Tensor, initial: Tensor, inputs: Tensor, *, precision: str = "ieee"
) -> WeightGradients:
    """From [steps, batch, size] gradients that reached the states' sums, the states, the first
    state and [steps, batch, features]; all contiguous, in fp32. They are parts of one tensor."""
    steps, batch, size = reached.shape
    rows, features = steps * batch, inputs.shape[-1]
    sums = GradientSums.of(size, features)
    padded = max(16, triton.next_power_of_2(size))
    columns = max(padded, min(_COLUMNS, max(16, triton.next_power_of_2(features))))
    stretch = _stretch(rows, multiprocessors(reached.device))
    partial = reached.new_empty(triton.cdiv(rows, stretch), sums.width)
    _partial_sums[len(partial), 1 + triton.cdiv(features, columns)](
        reached, state, initial, inputs, partial,
        rows, batch, size, features, stretch, sums.of_input, sums.of_bias, sums.width,
        ROWS=_ROWS, SIZE=padded, COLUMNS=columns, PRECISION=precision,
        num_warps=8 if padded * columns > 64 * 64 else 4,
    )  # fmt: skip
    return sums.parts(partial.sum(0))


def _aligned(numbers: int) -> int:
    return -(-numbers // _ALIGNED) * _ALIGNED


def _stretch(rows: int, processors: int) -> int:
    """Rows of a program: every multiprocessor has some, and none has too few to be worth it."""
    wanted = max(_LEAST_ROWS, -(-rows // (_STRETCHES * processors)))
    return -(-wanted // _ROWS) * _ROWS
