"""Bits and small codes as Triton kernels: masks, signs, places in pooling windows.

A program handles a tile of [bytes, codes in a byte], so that neighbours read neighbours. All give
the same bits as the CPU versions.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.fix.saved.encodings.encoded import BITS_OF
from stepscope.fix.saved.encodings.exact import PoolingWindow

_BYTES = 256  # of the packed tensor, a program
_WARPS = 4


@triton.jit
def _pack(
    values, packed, count, INFINITY: tl.constexpr, LARGEST: tl.constexpr, WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // WIDTH
    rows = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    columns = tl.arange(0, EACH)
    places = rows[:, None] * EACH + columns[None, :]
    inside = places < count
    value = tl.load(values + places, mask=inside, other=0)
    code = value.to(tl.int32)
    if INFINITY:
        # Patterns of floats. Not only what is above 0: where it is NaN, torch lets a gradient pass.
        negative_nan = (value < 0) & ((value & LARGEST) > INFINITY)
        code = ((value > 0) | negative_nan).to(tl.int32)
    byte = tl.sum(code << (columns[None, :] * WIDTH), axis=1)
    tl.store(packed + rows, byte.to(tl.uint8), mask=rows * EACH < count)


@triton.jit
def _unpack(packed, values, count, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    EACH: tl.constexpr = 8 // WIDTH
    rows = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    columns = tl.arange(0, EACH)
    byte = tl.load(packed + rows, mask=rows * EACH < count, other=0).to(tl.int32)
    code = (byte[:, None] >> (columns[None, :] * WIDTH)) & ((1 << WIDTH) - 1)
    places = rows[:, None] * EACH + columns[None, :]
    tl.store(values + places, code.to(values.dtype.element_ty), mask=places < count)


@triton.jit
def _relu_backward(gradient, packed, result, count, BYTES: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    columns = tl.arange(0, 8)
    places = rows[:, None] * 8 + columns[None, :]
    inside = places < count
    byte = tl.load(packed + rows, mask=rows * 8 < count, other=0).to(tl.int32)
    passes = ((byte[:, None] >> columns[None, :]) & 1) != 0
    value = tl.load(gradient + places, mask=inside, other=0)
    tl.store(result + places, tl.where(passes, value, tl.zeros_like(value)), mask=inside)


def _programs(rows: int) -> tuple[int]:
    return (triton.cdiv(rows, _BYTES),)


def pack(values: Tensor, width: int) -> Tensor:
    """Booleans or codes of a flat tensor."""
    values = values.contiguous()
    plain = values.view(torch.uint8) if values.dtype == torch.bool else values
    return _packed(plain, width)


def pack_signs(values: Tensor) -> Tensor:
    """1 where ReLU's backward lets the gradient pass."""
    patterns = values.view(BITS_OF[values.itemsize])
    return _packed(patterns, 1, *_limits(values.dtype, patterns.dtype))


@functools.cache
def _limits(dtype: torch.dtype, patterns: torch.dtype) -> tuple[int, int]:
    """The pattern of infinity, and the largest of all."""
    infinity = torch.tensor(torch.inf, dtype=dtype, device="cpu").view(patterns)
    return int(infinity), torch.iinfo(patterns).max


def _packed(values: Tensor, width: int, infinity: int = 0, largest: int = 0) -> Tensor:
    """With `infinity`, the values are patterns of floats: their signs are packed."""
    count = values.numel()
    packed = torch.empty(-(-count * width // 8), dtype=torch.uint8, device=values.device)
    _pack[_programs(len(packed))](
        values, packed, count, INFINITY=infinity, LARGEST=largest, WIDTH=width, BYTES=_BYTES,
        num_warps=_WARPS,
    )  # fmt: skip
    return packed


def unpack(packed: Tensor, count: int, *, width: int, dtype: torch.dtype) -> Tensor:
    values = torch.empty(count, dtype=dtype, device=packed.device)
    target = values.view(torch.uint8) if dtype == torch.bool else values
    _unpack[_programs(len(packed))](
        packed, target, count, WIDTH=width, BYTES=_BYTES, num_warps=_WARPS
    )
    return values


def relu_backward(gradient: Tensor, packed: Tensor) -> Tensor:
    """For a dense gradient that lies in memory as the ReLU's output did."""
    flat = gradient.as_strided((gradient.numel(),), (1,)).view(BITS_OF[gradient.itemsize])
    result = torch.empty_like(flat)
    _relu_backward[_programs(len(packed))](
        flat, packed, result, len(flat), BYTES=_BYTES, num_warps=_WARPS
    )
    return result.view(gradient.dtype).as_strided(gradient.shape, gradient.stride())


# max pooling's indices


@triton.jit
def _window_start(starts, places, stride, outputs):
    return tl.load(starts + (places // stride) % outputs)


@triton.jit
def _pack_window(
    indices, packed, count, starts_d, starts_h, starts_w, stride_d, stride_h, stride_w,
    outputs_d, outputs_h, outputs_w, size_h, size_w, kernel_h, kernel_w,
    dilation_d, dilation_h, dilation_w, WIDTH: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // WIDTH
    rows = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    columns = tl.arange(0, EACH)
    places = rows[:, None] * EACH + columns[None, :]
    inside = places < count
    index = tl.load(indices + places, mask=inside, other=0)
    d = index // (size_h * size_w) - _window_start(starts_d, places, stride_d, outputs_d)
    h = (index // size_w) % size_h - _window_start(starts_h, places, stride_h, outputs_h)
    w = index % size_w - _window_start(starts_w, places, stride_w, outputs_w)
    local = (d // dilation_d * kernel_h + h // dilation_h) * kernel_w + w // dilation_w
    local = tl.where(inside, local, 0).to(tl.int32)
    byte = tl.sum(local << (columns[None, :] * WIDTH), axis=1)
    tl.store(packed + rows, byte.to(tl.uint8), mask=rows * EACH < count)


@triton.jit
def _unpack_window(
    packed, indices, count, starts_d, starts_h, starts_w, stride_d, stride_h, stride_w,
    outputs_d, outputs_h, outputs_w, size_h, size_w, kernel_h, kernel_w,
    dilation_d, dilation_h, dilation_w, WIDTH: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // WIDTH
    rows = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    columns = tl.arange(0, EACH)
    places = rows[:, None] * EACH + columns[None, :]
    byte = tl.load(packed + rows, mask=rows * EACH < count, other=0).to(tl.int32)
    local = ((byte[:, None] >> (columns[None, :] * WIDTH)) & ((1 << WIDTH) - 1)).to(tl.int64)
    w = _window_start(starts_w, places, stride_w, outputs_w) + local % kernel_w * dilation_w
    local = local // kernel_w
    h = _window_start(starts_h, places, stride_h, outputs_h) + local % kernel_h * dilation_h
    d = _window_start(starts_d, places, stride_d, outputs_d) + local // kernel_h * dilation_d
    tl.store(indices + places, (d * size_h + h) * size_w + w, mask=places < count)


def _window_arguments(
    shape: Any, stride: Any, starts: list[Tensor], window: PoolingWindow
) -> tuple[Any, ...]:
    """Describe a window in three dimensions: a plane is a volume of depth 1."""
    lacking = 3 - len(window.kernel)
    zero = torch.zeros(1, dtype=torch.int64, device=starts[0].device)
    strides = [1] * lacking + list(stride[-len(window.kernel) :])
    outputs = [1] * lacking + list(shape[-len(window.kernel) :])
    strides = [max(1, one) for one in strides]
    dilation = [1] * lacking + list(window.dilation)
    return (
        *([zero] * lacking + starts), *strides, *outputs, *window.size[-2:], *window.kernel[-2:],
        *dilation,
    )  # fmt: skip


def pack_window(
    flat: Tensor, shape: Any, stride: Any, starts: list[Tensor], window: PoolingWindow
) -> Tensor:
    packed = torch.empty(
        -(-flat.numel() * window.width // 8), dtype=torch.uint8, device=flat.device
    )
    _pack_window[_programs(len(packed))](
        flat, packed, flat.numel(), *_window_arguments(shape, stride, starts, window),
        WIDTH=window.width, BYTES=_BYTES, num_warps=_WARPS,
    )  # fmt: skip
    return packed


def unpack_window(
    packed: Tensor, shape: Any, stride: Any, starts: list[Tensor], window: PoolingWindow
) -> Tensor:
    count = math.prod(shape)
    indices = torch.empty(count, dtype=torch.int64, device=packed.device)
    _unpack_window[_programs(len(packed))](
        packed, indices, count, *_window_arguments(shape, stride, starts, window),
        WIDTH=window.width, BYTES=_BYTES, num_warps=_WARPS,
    )  # fmt: skip
    return indices
