"""An RNN layer's weight gradients in two launches instead of a dozen.

At a thousand steps the host's launches, not the device, decide how long a backward pass takes.

All three are sums over every step and sequence of (gradient of the state) x (what it met): the
state before, the input, and one. `_partial_sums` sums a stretch of rows in each program; one sum of
torch's joins the stretches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from stepscope.fix.scan.device_size import multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 64  # that one product sums
_LEAST_ROWS = 256  # of a stretch
_STRETCHES = 4  # a multiprocessor
_COLUMNS = 64  # of the inputs that one program meets
_ALIGNED = 32  # numbers: where each gradient begins in the sum


class WeightGradients(NamedTuple):
    """Of one layer; the bias's is that of both biases."""

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
