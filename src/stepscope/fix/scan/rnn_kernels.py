"""The scan of affine_maps as Triton kernels, and how they are launched on a device.

Imported only where Triton is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.records.scan_costs import GROUP, gpu_chunk

# Four kernels. `_fold_steps`: a program for each chunk, sequence and block of rows keeps its part
# of the chunk's matrix in registers. `_fold_maps`: the same over maps. `_spread`: what enters each
# member of a group. `_replay`: the steps of a chunk for a block of sequences, and what leaves the
# first. Nothing of the size of a Jacobian for every step is ever in memory.
#
# Slopes are computed from the states: 1 - h^2 for tanh, h > 0 for relu.
#
# Tensor cores cut off what they add, always towards zero: three products for one lose 10^-7 of a
# map with every step. A chain that forgets within some dozen steps does not show it; one that does
# not would be 10^-4 off after a thousand. So the first fold notes whether a map lasts, and
# everything is launched `AGAIN` without tensor cores: at once over where nothing lasts, and nobody
# waits to know.

_ROWS = 32  # of a matrix that one program folds
_SEQUENCES = 16  # of the batch that one program replays: the least a matrix product takes
LOSSY_SUMS = ("tf32x3", "fp16x3")  # exact but for what tensor cores cut off
_REMEMBERED = 1600  # steps times size that tensor cores may sum over: 50 of 32 are 5 in 10^6
_SHORTEST = tl.constexpr(8)  # steps: a shorter chunk loses nothing that counts
_BITS = tl.constexpr(1.4426950408889634)  # log2(e)


class Launch(NamedTuple):
    """How the kernels are started; benchmarks/scan_table.py finds what is best."""

    chunk: int
    fold_warps: int = 1
    map_warps: int = 1
    replay_warps: int = 1


@triton.jit
def _slope(state, TANH: tl.constexpr):
    if TANH:
        return 1.0 - state * state
    else:
        return tl.where(state > 0, 1.0, 0.0)


@triton.jit
def _product(left, right, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        return tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16))
    else:
        return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _rescale(matrix, exponent):
    """Every row with its largest number between 1 and 2."""
    largest = tl.max(tl.abs(matrix), axis=1)
    power = tl.where(largest > 0, tl.floor(tl.log2(tl.where(largest > 0, largest, 1.0))), 0.0)
    return matrix * tl.exp2(-power)[:, None], exponent + power


@triton.jit
def _through(row, matrix, exponent):
    """Powers of two in two halves: either may be in range where the whole is not."""
    half = tl.exp2(exponent * 0.5)
    scaled = tl.where(row == 0, 0.0, row * half * half)
    return tl.sum(scaled[:, None] * matrix, axis=0)


@triton.jit
def _lasts(matrix, exponent, is_row, length, REMEMBERED: tl.constexpr, SIZE_BITS: tl.constexpr):
    """Whether a map of so many steps may keep more of a row than a chain that forgets all but 1/e
    of it in REMEMBERED steps; its largest number times its size is at least its norm."""
    is_row = is_row & (tl.max(tl.abs(matrix), axis=1) > 0)
    forgets = -_BITS * length / REMEMBERED - SIZE_BITS
    lasting = is_row & (exponent + 1.0 > forgets) & (length >= _SHORTEST)
    return tl.max(lasting.to(tl.int32), axis=0)


@triton.jit
def _fold_steps(
    gradient, state, weight, lasting, matrix_out, exponent_out, offset_out,
    steps, batch, size, chunk,
    ROWS: tl.constexpr, SIZE: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
    REMEMBERED: tl.constexpr, SIZE_BITS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    if AGAIN:
        if tl.load(lasting) == 0:
            return
    group, sequence, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns, rows = tl.arange(0, SIZE), block * ROWS + tl.arange(0, ROWS)
    inside = columns < size
    w = tl.load(
        weight + columns[:, None] * size + columns[None, :],
        mask=inside[:, None] & inside[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    matrix = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0)
    exponent = tl.zeros([ROWS], tl.float32)
    offset = tl.zeros([SIZE], tl.float32)
    first = group * chunk
    last = tl.minimum(first + chunk, steps) - 1
    here = (last * batch + sequence).to(tl.int64) * size + columns
    g = tl.load(gradient + here, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(state + here, mask=inside, other=0.0).to(tl.float32)
    for back in range(last - first + 1):
        earlier = tl.maximum(last - back - 1, first)  # loaded while this step is computed
        following = (earlier * batch + sequence).to(tl.int64) * size + columns
        next_g = tl.load(gradient + following, mask=inside, other=0.0).to(tl.float32)
        next_h = tl.load(state + following, mask=inside, other=0.0).to(tl.float32)
        slope = tl.where(inside, _slope(h, TANH), 0.0)
        matrix = _product(matrix * slope[None, :], w, PRECISION)
        if block == 0:
            offset = tl.sum(((offset + g) * slope)[:, None] * w, axis=0)
        if back % 8 == 7:
            matrix, exponent = _rescale(matrix, exponent)
        g, h, here = next_g, next_h, following
    matrix, exponent = _rescale(matrix, exponent)
    if REMEMBERED > 0:
        if _lasts(matrix, exponent, rows < size, last - first + 1, REMEMBERED, SIZE_BITS) > 0:
            tl.store(lasting, 1)
    place = (group * batch + sequence).to(tl.int64)
    tl.store(
        matrix_out + place * size * size + rows[:, None] * size + columns[None, :], matrix,
        mask=(rows < size)[:, None] & inside[None, :],
    )  # fmt: skip
    tl.store(exponent_out + place * size + rows, exponent, mask=rows < size)
    if block == 0:
        tl.store(offset_out + place * size + columns, offset, mask=inside)


@triton.jit
def _fold_maps(
    matrix_in, exponent_in, offset_in, lasting, matrix_out, exponent_out, offset_out,
    maps, batch, size, members,
    ROWS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    if AGAIN:
        if tl.load(lasting) == 0:
            return
    group, sequence, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns, rows = tl.arange(0, SIZE), block * ROWS + tl.arange(0, ROWS)
    inside = columns < size
    matrix = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0)
    exponent = tl.zeros([ROWS], tl.float32)
    offset = tl.zeros([SIZE], tl.float32)
    first = group * members
    last = tl.minimum(first + members, maps) - 1
    for back in range(last - first + 1):
        place = ((last - back) * batch + sequence).to(tl.int64)
        its_matrix = tl.load(
            matrix_in + place * size * size + columns[:, None] * size + columns[None, :],
            mask=inside[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        its_exponent = tl.load(exponent_in + place * size + columns, mask=inside, other=0.0)
        largest = tl.max(tl.where(inside, its_exponent, float("-inf")), axis=0)
        scale = tl.where(inside, tl.exp2(its_exponent - largest), 0.0)
        matrix = _product(matrix * scale[None, :], its_matrix, PRECISION)
        matrix, exponent = _rescale(matrix, exponent + largest)
        if block == 0:
            its_offset = tl.load(offset_in + place * size + columns, mask=inside, other=0.0)
            offset = _through(offset, its_matrix, its_exponent) + its_offset
    place = (group * batch + sequence).to(tl.int64)
    tl.store(
        matrix_out + place * size * size + rows[:, None] * size + columns[None, :], matrix,
        mask=(rows < size)[:, None] & inside[None, :],
    )  # fmt: skip
    tl.store(exponent_out + place * size + rows, exponent, mask=rows < size)
    if block == 0:
        tl.store(offset_out + place * size + columns, offset, mask=inside)


@triton.jit
def _spread(
    matrix_in, exponent_in, offset_in, lasting, entering, entering_out,
    maps, batch, size, members,
    SIZE: tl.constexpr, TOP: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    if AGAIN:
        if tl.load(lasting) == 0:
            return
    group, sequence = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, SIZE)
    inside = columns < size
    if TOP:
        row = tl.zeros([SIZE], tl.float32)
    else:
        row = tl.load(
            entering + (group * batch + sequence).to(tl.int64) * size + columns,
            mask=inside, other=0.0,
        )  # fmt: skip
    first = group * members
    last = tl.minimum(first + members, maps) - 1
    for back in range(last - first + 1):
        place = ((last - back) * batch + sequence).to(tl.int64)
        tl.store(entering_out + place * size + columns, row, mask=inside)
        matrix = tl.load(
            matrix_in + place * size * size + columns[:, None] * size + columns[None, :],
            mask=inside[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        exponent = tl.load(exponent_in + place * size + columns, mask=inside, other=0.0)
        row = _through(row, matrix, exponent) + tl.load(
            offset_in + place * size + columns, mask=inside, other=0.0
        )


@triton.jit
def _replay(
    gradient, state, weight, lasting, entering, reached, left,
    steps, batch, size, chunk,
    SEQUENCES: tl.constexpr, SIZE: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    if AGAIN:
        if tl.load(lasting) == 0:
            return
    group = tl.program_id(0)
    columns = tl.arange(0, SIZE)
    sequences = tl.program_id(1) * SEQUENCES + tl.arange(0, SEQUENCES)
    inside = (sequences < batch)[:, None] & (columns < size)[None, :]
    within = (columns < size)[:, None] & (columns < size)[None, :]
    w = tl.load(weight + columns[:, None] * size + columns[None, :], mask=within, other=0.0)
    w = w.to(tl.float32)
    offsets = sequences[:, None] * size + columns[None, :]
    row = tl.load(entering + group.to(tl.int64) * batch * size + offsets, mask=inside, other=0.0)
    first = group * chunk
    last = tl.minimum(first + chunk, steps) - 1
    here = last.to(tl.int64) * batch * size + offsets
    g = tl.load(gradient + here, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(state + here, mask=inside, other=0.0).to(tl.float32)
    for back in range(last - first + 1):
        earlier = tl.maximum(last - back - 1, first)
        following = earlier.to(tl.int64) * batch * size + offsets
        next_g = tl.load(gradient + following, mask=inside, other=0.0).to(tl.float32)
        next_h = tl.load(state + following, mask=inside, other=0.0).to(tl.float32)
        error = (row + g) * tl.where(inside, _slope(h, TANH), 0.0)
        tl.store(reached + here, error.to(reached.dtype.element_ty), mask=inside)
        row = _product(error, w, PRECISION)
        g, h, here = next_g, next_h, following
    if group == 0:
        tl.store(left + offsets, row.to(left.dtype.element_ty), mask=inside)


def backward_states(
    gradient: Tensor,
    state: Tensor,
    weight: Tensor,
    *,
    tanh: bool,
    launch: Launch,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """Compute affine_maps.backward_states from the states instead of the slopes."""
    steps, batch, size = gradient.shape
    first = _Scan.first(batch, size, tanh, precision, launch, gradient.device)
    maps = first.empty_maps(triton.cdiv(steps, launch.chunk))
    reached, left = torch.empty_like(gradient), torch.empty_like(gradient[0])
    for scan in [first, first.again()] if precision in LOSSY_SUMS else [first]:
        scan.backward(gradient, state, weight, maps, reached, left)
    return reached, left


def carries(maps: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The row that enters each of the maps from the right, by products without tensor cores: from
    matrices, exponents of their rows and offsets, as AffineMaps has them."""
    _, batch, size = maps[2].shape
    launch = Launch(1, *[plain_warps(padded_size(size))] * 3)
    return _Scan.first(batch, size, True, "ieee", launch, maps[2].device).carries(maps)


def padded_size(size: int) -> int:
    """Return the size of a matrix in kernels: a power of two that tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())


def remembered(padded: int, precision: str) -> int:
    """Steps that a chain may remember before tensor cores' sums are too far off; 0: no matter."""
    return _REMEMBERED // padded if precision in LOSSY_SUMS else 0


def plain_warps(padded: int) -> int:
    """For products without tensor cores: every thread's share is that of one warp for size 32, or
    compiling would take minutes."""
    return max(1, (padded // 32) ** 2)


class _Scan(NamedTuple):
    """The settings that all levels of one backward pass share."""

    batch: int
    size: int
    tanh: bool
    precision: str
    launch: Launch
    lasting: Tensor  # 1 once a map lasts too long for tensor cores
    is_again: bool = False

    @classmethod
    def first(
        cls,
        batch: int,
        size: int,
        tanh: bool,
        precision: str,
        launch: Launch,
        device: torch.device,
    ) -> _Scan:
        lasting = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(batch, size, tanh, precision, launch, lasting)

    def again(self) -> _Scan:
        """The same without tensor cores, where a map lasts."""
        launch = Launch(self.launch.chunk, *[plain_warps(self.padded)] * 3)
        return self._replace(precision="ieee", launch=launch, is_again=True)

    @property
    def padded(self) -> int:
        return padded_size(self.size)

    @property
    def rows(self) -> int:
        return min(self.padded, _ROWS)

    @property
    def blocks(self) -> int:
        return -(-self.size // self.rows)

    def empty_maps(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        new: dict[str, Any] = {"device": self.lasting.device, "dtype": torch.float32}
        rows = (count, self.batch, self.size)
        return (
            torch.empty(*rows, self.size, **new),
            torch.empty(rows, **new),
            torch.empty(rows, **new),
        )

    def backward(
        self,
        gradient: Tensor,
        state: Tensor,
        weight: Tensor,
        maps: tuple[Tensor, Tensor, Tensor],
        reached: Tensor,
        left: Tensor,
    ) -> None:
        """Fill the maps, then what reached every state and what left the first."""
        steps, chunks, launch = len(gradient), len(maps[0]), self.launch
        _fold_steps[chunks, self.batch, self.blocks](
            gradient, state, weight, self.lasting, *maps, steps, self.batch, self.size,
            launch.chunk, ROWS=self.rows, SIZE=self.padded, TANH=self.tanh,
            PRECISION=self.precision, AGAIN=self.is_again,
            REMEMBERED=remembered(self.padded, self.precision),
            SIZE_BITS=self.padded.bit_length() - 1,
            num_warps=launch.fold_warps,
        )  # fmt: skip
        entering = self.carries(maps)
        _replay[chunks, triton.cdiv(self.batch, _SEQUENCES)](
            gradient, state, weight, self.lasting, entering, reached, left, steps, self.batch,
            self.size, launch.chunk, SEQUENCES=_SEQUENCES, SIZE=self.padded, TANH=self.tanh,
            PRECISION=self.precision, AGAIN=self.is_again, num_warps=launch.replay_warps,
        )  # fmt: skip

    def carries(self, maps: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The row that enters each of the maps from the right."""
        count, top = len(maps[0]), len(maps[0]) <= GROUP
        groups, members = (1, count) if top else (triton.cdiv(count, GROUP), GROUP)
        above = maps[2] if top else self.carries(self._folded(maps, groups))
        entering = torch.empty_like(maps[2])
        _spread[groups, self.batch](
            *maps, self.lasting, above, entering, count, self.batch, self.size, members,
            SIZE=self.padded, TOP=top, AGAIN=self.is_again, num_warps=1,
        )  # fmt: skip
        return entering

    def _folded(
        self, maps: tuple[Tensor, Tensor, Tensor], groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        above = self.empty_maps(groups)
        _fold_maps[groups, self.batch, self.blocks](
            *maps, self.lasting, *above, len(maps[0]), self.batch, self.size, GROUP,
            ROWS=self.rows, SIZE=self.padded, PRECISION=self.precision, AGAIN=self.is_again,
            num_warps=self.launch.map_warps,
        )  # fmt: skip
        return above


# How the scan's kernels are started on a device: how long a chunk is (records/scan_costs.py), and
# how many warps share a product.

# Of steps, of maps and of the replay, by padded size: the fewest whose registers hold everything,
# or nearly (ptxas for sm_90).
_WARPS = {16: (1, 1, 1), 32: (1, 1, 1), 64: (2, 4, 4), 128: (4, 8, 8)}


def launch_for(shape: torch.Size, device: torch.device, precision: str) -> Launch:
    """`shape` is steps, batch and size."""
    steps, batch, size = shape
    padded = padded_size(size)
    warps = (plain_warps(padded),) * 3 if precision == "ieee" else _WARPS[padded]
    return Launch(gpu_chunk(steps, batch, size, multiprocessors(device)), *warps)


# How many programs a device runs side by side.


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
