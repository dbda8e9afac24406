"""Other ways to fold and replay a chunk: what scan_variants.py times beside the shipped kernels.

Each computes what stepscope.fix.scan.kernels does. They are here, not in the product, until figures
say that one of them is better.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stepscope.fix.scan import kernels
from stepscope.fix.scan.kernels import _rescale, _Scan, _slope, _through

_LOW = tl.constexpr(2048.0)  # 2^11: the second half of a number has its own range


@triton.jit
def _fp16_halves(values):
    high = values.to(tl.float16)
    return high, ((values - high.to(tl.float32)) * _LOW).to(tl.float16)


@triton.jit
def _product_of_halves(matrix, w_high, w_low):
    """Three products of 16 bits for one of 32: 22 bits of each factor count."""
    high, low = _fp16_halves(matrix)
    return tl.dot(high, w_high) + (tl.dot(low, w_high) + tl.dot(high, w_low)) / _LOW


@triton.jit
def fold_sequences(
    gradient, state, weight, matrix_out, exponent_out, offset_out,
    steps, batch, size, chunk,
    SEQUENCES: tl.constexpr, SIZE: tl.constexpr, TANH: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program folds a chunk of several sequences: their matrices, one below the other, meet the
    same weight. HALVES: products of 16 bits. The whole matrix is one block: SIZE up to 64."""
    group = tl.program_id(0)
    columns, lines = tl.arange(0, SIZE), tl.arange(0, SEQUENCES * SIZE)
    sequence, row = tl.program_id(1) * SEQUENCES + lines // SIZE, lines % SIZE
    inside = (sequence < batch)[:, None] & (columns < size)[None, :]
    within = (columns < size)[:, None] & (columns < size)[None, :]
    w = tl.load(weight + columns[:, None] * size + columns[None, :], mask=within, other=0.0)
    # No element of a product is larger than the largest of its row, so 16 bits hold it.
    norm = tl.max(tl.sum(tl.abs(w), axis=0), axis=0)
    power = tl.where(norm > 0, tl.ceil(tl.log2(tl.where(norm > 0, norm, 1.0))), 0.0)
    if HALVES:
        w_high, w_low = _fp16_halves(w * tl.exp2(-power))
    matrix = tl.where(row[:, None] == columns[None, :], 1.0, 0.0)
    exponent = tl.zeros([SEQUENCES * SIZE], tl.float32)
    mine = tl.arange(0, SEQUENCES)
    own = tl.program_id(1) * SEQUENCES + mine
    own_inside = (own < batch)[:, None] & (columns < size)[None, :]
    offset = tl.zeros([SEQUENCES, SIZE], tl.float32)
    first = group * chunk
    last = tl.minimum(first + chunk, steps) - 1
    for back in range(last - first + 1):
        step = (last - back).to(tl.int64) * batch
        here = (step + own)[:, None] * size + columns[None, :]
        g = tl.load(gradient + here, mask=own_inside, other=0.0)
        h = tl.load(state + here, mask=own_inside, other=0.0)
        spread = (step + sequence)[:, None] * size + columns[None, :]
        again = tl.load(state + spread, mask=inside, other=0.0)  # from the cache
        scaled = matrix * tl.where(inside, _slope(again, TANH), 0.0)
        if HALVES:
            matrix = _product_of_halves(scaled, w_high, w_low)
            exponent += power
        else:
            matrix = tl.dot(scaled, w, input_precision=PRECISION)
        error = (offset + g) * tl.where(own_inside, _slope(h, TANH), 0.0)
        offset = tl.sum(error[:, :, None] * w[None, :, :], axis=1)
        if HALVES:
            if back % 2 == 1:
                matrix, exponent = _rescale(matrix, exponent)
        else:
            if back % 8 == 7:
                matrix, exponent = _rescale(matrix, exponent)
    matrix, exponent = _rescale(matrix, exponent)
    place = (group * batch + sequence).to(tl.int64)
    tl.store(
        matrix_out + (place * size + row)[:, None] * size + columns[None, :], matrix,
        mask=inside & (row < size)[:, None],
    )  # fmt: skip
    tl.store(exponent_out + place * size + row, exponent, mask=(sequence < batch) & (row < size))
    there = (group * batch + own).to(tl.int64)[:, None] * size + columns[None, :]
    tl.store(offset_out + there, offset, mask=own_inside)


@triton.jit
def fold_pairs(
    gradient, state, weight, matrix_out, exponent_out, offset_out,
    steps, batch, size, chunk,
    SIZE: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two steps at a time: their own product does not wait for the chunk's, so the chain that waits
    is half as long, for twice the arithmetic. SIZE up to 64; a step beyond the chunk is one that
    changes nothing."""
    group, sequence = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, SIZE)
    inside = columns < size
    w = tl.load(
        weight + columns[:, None] * size + columns[None, :],
        mask=inside[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    identity = tl.where(columns[:, None] == columns[None, :], 1.0, 0.0)
    matrix = identity
    exponent = tl.zeros([SIZE], tl.float32)
    offset = tl.zeros([SIZE], tl.float32)
    first = group * chunk
    last = tl.minimum(first + chunk, steps) - 1
    for pair in range((last - first + 2) // 2):
        later, earlier = last - 2 * pair, last - 2 * pair - 1
        there = (later * batch + sequence).to(tl.int64) * size + columns
        here = (tl.maximum(earlier, 0) * batch + sequence).to(tl.int64) * size + columns
        second = earlier >= first
        d1 = tl.where(inside, _slope(tl.load(state + there, mask=inside, other=0.0), TANH), 0.0)
        d2 = tl.where(inside, _slope(tl.load(state + here, mask=inside, other=0.0), TANH), 0.0)
        g1 = tl.load(gradient + there, mask=inside, other=0.0)
        g2 = tl.load(gradient + here, mask=inside, other=0.0)
        both = d1[:, None] * tl.dot(w * d2[None, :], w, input_precision=PRECISION)
        one = d1[:, None] * w
        step = tl.where(second, both, one)
        matrix = tl.dot(matrix, step, input_precision=PRECISION)
        middle = tl.sum(((offset + g1) * d1)[:, None] * w, axis=0)
        end = tl.sum(((middle + g2) * d2)[:, None] * w, axis=0)
        offset = tl.where(second, end, middle)
        if pair % 4 == 3:
            matrix, exponent = _rescale(matrix, exponent)
    matrix, exponent = _rescale(matrix, exponent)
    place = (group * batch + sequence).to(tl.int64)
    tl.store(
        matrix_out + place * size * size + columns[:, None] * size + columns[None, :], matrix,
        mask=inside[:, None] & inside[None, :],
    )  # fmt: skip
    tl.store(exponent_out + place * size + columns, exponent, mask=inside)
    tl.store(offset_out + place * size + columns, offset, mask=inside)


@triton.jit
def one_launch(
    gradient, state, weight, entering, ready, reached, left,
    steps, batch, size, chunk, chunks,
    SIZE: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold, wait for what enters from the right, hand on what leaves, replay. The last chunk has
    the first number: programs start in order, so whoever waits waits for one that runs."""
    from_end, sequence = tl.program_id(0), tl.program_id(1)
    group = chunks - 1 - from_end
    columns = tl.arange(0, SIZE)
    inside = columns < size
    w = tl.load(
        weight + columns[:, None] * size + columns[None, :],
        mask=inside[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    first = group * chunk
    last = tl.minimum(first + chunk, steps) - 1
    row = tl.zeros([SIZE], tl.float32)
    if from_end == 0:
        offset = row
    else:
        matrix = tl.where(columns[:, None] == columns[None, :], 1.0, 0.0)
        exponent = tl.zeros([SIZE], tl.float32)
        offset = tl.zeros([SIZE], tl.float32)
        for back in range(last - first + 1):
            here = ((last - back) * batch + sequence).to(tl.int64) * size + columns
            h = tl.load(state + here, mask=inside, other=0.0)
            g = tl.load(gradient + here, mask=inside, other=0.0)
            slope = tl.where(inside, _slope(h, TANH), 0.0)
            matrix = tl.dot(matrix * slope[None, :], w, input_precision=PRECISION)
            offset = tl.sum(((offset + g) * slope)[:, None] * w, axis=0)
            if back % 8 == 7:
                matrix, exponent = _rescale(matrix, exponent)
        mine = ready + from_end * batch + sequence
        while tl.atomic_cas(mine, 1, 1) != 1:
            pass
        row = tl.load(
            entering + (from_end * batch + sequence).to(tl.int64) * size + columns,
            mask=inside, other=0.0, volatile=True,
        )  # fmt: skip
        offset = _through(row, matrix, exponent) + offset
        _hand_on(entering, ready, offset, from_end, sequence, batch, size, chunks, columns)
    for back in range(last - first + 1):
        here = ((last - back) * batch + sequence).to(tl.int64) * size + columns
        h = tl.load(state + here, mask=inside, other=0.0)
        g = tl.load(gradient + here, mask=inside, other=0.0)
        error = (row + g) * tl.where(inside, _slope(h, TANH), 0.0)
        tl.store(reached + here, error, mask=inside)
        row = tl.sum(error[:, None] * w, axis=0)
    if from_end == 0:
        _hand_on(entering, ready, row, from_end, sequence, batch, size, chunks, columns)
    if group == 0:
        tl.store(left + sequence * size + columns, row, mask=inside)


@triton.jit
def _hand_on(entering, ready, row, from_end, sequence, batch, size, chunks, columns):
    if from_end + 1 < chunks:
        place = ((from_end + 1) * batch + sequence).to(tl.int64)
        tl.store(entering + place * size + columns, row, mask=columns < size)
        tl.debug_barrier()
        tl.atomic_xchg(ready + place, 1)


def folded_by(fold: str, chunk: int, precision: str, sequences: int = 1) -> Any:
    """A backward pass with another fold: "sequences", "halves" or "pairs"."""

    def backward_states(gradient: Any, state: Any, weight: Any, *, tanh: bool) -> Any:
        steps, batch, size = gradient.shape
        scan = _Scan(batch, size, tanh, precision, kernels.Launch(chunk))
        chunks = triton.cdiv(steps, chunk)
        maps = scan.empty_maps(chunks, gradient.device)
        given = (gradient, state, weight, *maps, steps, batch, size, chunk)
        if fold == "pairs":
            fold_pairs[chunks, batch](
                *given, SIZE=scan.padded, TANH=tanh, PRECISION=precision, num_warps=1
            )
        else:
            fold_sequences[chunks, triton.cdiv(batch, sequences)](
                *given, SEQUENCES=sequences, SIZE=scan.padded, TANH=tanh,
                HALVES=fold == "halves", PRECISION=precision, num_warps=sequences,
            )  # fmt: skip
        entering = scan.carries(maps)
        reached, left = torch.empty_like(gradient), torch.empty_like(gradient[0])
        kernels._replay[chunks, triton.cdiv(batch, kernels._SEQUENCES)](
            gradient, state, weight, entering, reached, left, steps, batch, size, chunk,
            SEQUENCES=kernels._SEQUENCES, SIZE=scan.padded, TANH=tanh, PRECISION=precision,
            num_warps=1,
        )  # fmt: skip
        return reached, left

    return backward_states


def in_one_launch(chunk: int, precision: str) -> Any:
    """A backward pass whose chunks wait for each other inside one kernel."""

    def backward_states(gradient: Any, state: Any, weight: Any, *, tanh: bool) -> Any:
        steps, batch, size = gradient.shape
        chunks = triton.cdiv(steps, chunk)
        reached, left = torch.empty_like(gradient), torch.empty_like(gradient[0])
        entering = gradient.new_empty(chunks, batch, size)
        ready = torch.zeros(chunks, batch, dtype=torch.int32, device=gradient.device)
        one_launch[chunks, batch](
            gradient, state, weight, entering, ready, reached, left,
            steps, batch, size, chunk, chunks,
            SIZE=max(16, triton.next_power_of_2(size)), TANH=tanh, PRECISION=precision,
            num_warps=1,
        )  # fmt: skip
        return reached, left

    return backward_states
