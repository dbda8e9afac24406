"""Exact encodings of what backward keeps. Vectorised torch, the same on CPUs and GPUs.

    bits         a mask of booleans                        1 bit an element
    two-valued   a dropout's noise: 0 or one constant      1 bit an element
    window       max pooling's indices, within the window  1 byte an element
    sign         ReLU's backward asks only: above zero?    1 bit an element
    shape        pooling's backward reads only the shape   nothing

The first three keep the value itself, the last two only what one kind of backward node reads.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE_ONLY_NODES = frozenset(
    {"MaxPool2DWithIndicesBackward0", "AvgPool2DBackward0", "AdaptiveAvgPool2DBackward0"}
)
SIGN_NODES = frozenset({"ReluBackward0"})
_GATHER = 0x0102040810204080  # collects the lowest bits of eight bytes in the highest byte


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(
            tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype
        )

    def on(self, holder: torch.Tensor) -> torch.Tensor:
        """The same view of another tensor's storage."""
        return torch.as_strided(holder, self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Encoded:
    """`decode` makes a tensor over a storage like the one that was encoded."""

    size_bytes: int
    decode: Callable[[], torch.Tensor]


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Eight booleans of a flat tensor in one byte."""
    padding = -mask.numel() % 8
    if padding:
        mask = torch.nn.functional.pad(mask, (0, padding))
    eights = mask.view(torch.uint8).view(torch.int64)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    eights = _table(packed.device)[packed.to(torch.int64)]
    return eights.view(torch.bool)[:count]


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """The eight booleans that each byte stands for."""
    numbers = torch.arange(256, device=device)
    masks = (numbers[:, None] >> torch.arange(8, device=device)) & 1
    eights = masks.to(torch.uint8).contiguous().view(torch.int64).flatten()
    table = torch.empty_like(eights)
    table[pack_bits(eights.view(torch.bool)).to(torch.int64)] = eights
    return table


def bit_bytes(count: int) -> int:
    return -(-count // 8)


def encode_value(
    encoding: str, tensor: torch.Tensor, call: tuple[Any, ...] | None
) -> Encoded | None:
    """Keep the whole value; None where this tensor does not allow it."""
    if encoding == "window":
        return _encode_window(tensor, call) if call is not None else None
    flat = _whole(tensor)
    if flat is None:
        return None
    count, dtype = flat.numel(), flat.dtype
    if encoding == "bits":
        packed = pack_bits(flat)
        return Encoded(packed.nbytes, lambda: unpack_bits(packed, count))
    packed, constant = pack_bits(flat != 0), flat.max()

    def decode() -> torch.Tensor:
        zero = torch.zeros((), dtype=dtype, device=constant.device)
        return torch.where(unpack_bits(packed, count), constant, zero)

    return Encoded(packed.nbytes + constant.nbytes, decode)


def encode_use(encoding: str, tensor: torch.Tensor) -> Encoded | None:
    """Keep what one kind of node reads; the result lies in memory as `tensor` does."""
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if encoding == "shape":
        return Encoded(0, lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device))
    # Torch's rule lets a gradient pass unless the output is <= 0: where it is NaN, too.
    mask = ~(tensor <= 0)
    count = tensor.numel()
    if mask.stride() != stride or mask.untyped_storage().nbytes() != count:
        return None
    packed = pack_bits(mask.as_strided((count,), (1,)))
    return Encoded(
        packed.nbytes,
        lambda: unpack_bits(packed, count).to(dtype).as_strided(shape, stride),
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor | None:
    """All of a tensor's storage, flat."""
    count, rest = divmod(tensor.untyped_storage().nbytes(), tensor.itemsize)
    if rest or not count:
        return None
    return tensor.as_strided((count,), (1,), 0)


def window_size(call: tuple[Any, ...]) -> int:
    """Places in the window of a max_pool2d_with_indices call."""
    height, width = _pair(call[1])
    return height * width


def _pair(value: Any) -> tuple[int, int]:
    values = [value] if isinstance(value, int) else list(value)
    return (values[0], values[-1])


def _encode_window(indices: torch.Tensor, call: tuple[Any, ...]) -> Encoded | None:
    """Replace the index into a plane by the one into its window."""
    window = _Window.of(call)
    if window.kernel[0] * window.kernel[1] > 256 or indices.storage_offset():
        return None
    stride = indices.stride()
    rows, columns = window.corners(indices.shape, indices.device)
    row = (indices.div(window.width, rounding_mode="floor") - rows) // window.dilation[0]
    column = (indices % window.width - columns) // window.dilation[1]
    local = (row * window.kernel[1] + column).to(torch.uint8)
    if local.stride() != stride or local.untyped_storage().nbytes() != indices.numel():
        return None

    def decode() -> torch.Tensor:
        places = local.to(torch.int64)
        height = rows + places.div(window.kernel[1], rounding_mode="floor") * window.dilation[0]
        return height * window.width + columns + places % window.kernel[1] * window.dilation[1]

    return Encoded(local.nbytes, decode)


@dataclass(frozen=True, slots=True)
class _Window:
    width: int  # of the input
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, call: tuple[Any, ...]) -> _Window:
        """From the arguments of max_pool2d_with_indices."""
        kernel = _pair(call[1])
        stride = _pair(call[2]) if len(call) > 2 and call[2] else kernel
        padding = _pair(call[3]) if len(call) > 3 else (0, 0)
        dilation = _pair(call[4]) if len(call) > 4 else (1, 1)
        return cls(int(call[0].shape[-1]), kernel, stride, padding, dilation)

    def corners(self, shape: torch.Size, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The first row and column of every window, also outside the plane."""
        rows = torch.arange(shape[-2], device=device) * self.stride[0] - self.padding[0]
        columns = torch.arange(shape[-1], device=device) * self.stride[1] - self.padding[1]
        return rows[:, None], columns


@functools.cache
def coding_ns_per_element(device: torch.device) -> float:
    """What it takes here to pack and unpack one bit, measured once."""
    mask = torch.zeros(1 << 20, dtype=torch.bool, device=device)
    times = []
    for _ in range(3):
        _wait(device)
        began = time.perf_counter_ns()
        unpack_bits(pack_bits(mask), mask.numel())
        _wait(device)
        times.append(time.perf_counter_ns() - began)
    return float(min(times) / mask.numel())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
