"""`window`: max pooling's int64 indices, as places within their windows: 2, 4 or 8 bits.

An index counts places in the plane (or volume) of the input. Where the window of each output begins
is known from the layer's options, so the place within the window is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.fix.saved.encodings.bits import pack_codes, unpack_codes
from stepscope.fix.saved.encodings.device_kernels import kernels_for
from stepscope.fix.saved.encodings.encoded import Encoded, dense

_POOLS = {"max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3}
_ADAPTIVE = {"adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3}
_MOST_PLACES = 256


@dataclass(frozen=True, slots=True)
class PoolingWindow:
    """One entry for each dimension. An adaptive layer has no stride: windows begin where the
    output's size says."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    size: tuple[int, ...]  # of the input

    @property
    def width(self) -> int:
        """Bits for a place."""
        places = math.prod(self.kernel)
        return next(width for width in (1, 2, 4, 8) if places <= 2**width)

    def starts(self, outputs: torch.Size, device: torch.device) -> list[torch.Tensor]:
        """The first place of every window along each dimension, also outside the input."""
        dimensions = len(self.kernel)
        counts = outputs[-dimensions:]
        places = [torch.arange(count, device=device) for count in counts]
        if not self.stride:
            return [
                place * size // count
                for place, size, count in zip(places, self.size, counts, strict=True)
            ]
        return [
            place * stride - padding
            for place, stride, padding in zip(places, self.stride, self.padding, strict=True)
        ]

    def spec(self) -> str:
        parts = (self.kernel, self.stride, self.padding, self.dilation, self.size)
        return "window " + "/".join(",".join(map(str, part)) for part in parts)

    @classmethod
    def of_spec(cls, text: str) -> PoolingWindow:
        parts = [
            tuple(int(number) for number in part.split(",") if number) for part in text.split("/")
        ]
        return cls(*parts)


def pooling_spec(name: str, args: Any) -> str | None:
    """The encoding of the indices of one call; None for other operators, and large windows."""
    window = None
    if name in _POOLS:
        window = _of_pool(args, _POOLS[name])
    elif name in _ADAPTIVE:
        window = _of_adaptive(args, _ADAPTIVE[name])
    if window is None or math.prod(window.kernel) > _MOST_PLACES:
        return None
    return window.spec()


def _of_pool(args: Any, dimensions: int) -> PoolingWindow:
    def option(place: int, default: Any) -> tuple[int, ...]:
        value = args[place] if len(args) > place and args[place] != [] else default
        values = [value] if isinstance(value, int) else list(value)
        return tuple(values * dimensions if len(values) == 1 else values)

    kernel = option(1, 1)
    size = tuple(int(length) for length in args[0].shape[-dimensions:])
    return PoolingWindow(kernel, option(2, kernel), option(3, 0), option(4, 1), size)


def _of_adaptive(args: Any, dimensions: int) -> PoolingWindow:
    size = tuple(int(length) for length in args[0].shape[-dimensions:])
    # A window ends at ceil((i + 1) * size / count).
    counts = [size[place] if count is None else count for place, count in enumerate(args[1])]
    kernel = tuple(
        max(-(-(i + 1) * length // count) - i * length // count for i in range(count))
        for length, count in zip(size, counts, strict=True)
    )
    return PoolingWindow(kernel, (), (), (1,) * dimensions, size)


def encode_window(tensor: torch.Tensor, spec: str) -> Encoded | None:
    """The result lies in memory as the indices did."""
    window, flat = PoolingWindow.of_spec(spec), dense(tensor)
    covers_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
    if flat is None or not covers_storage or tensor.dtype != torch.int64:
        return None
    shape, stride = tensor.shape, tensor.stride()
    starts = window.starts(shape, tensor.device)
    kernels = kernels_for(tensor, "bit_kernels")
    if kernels is not None:
        packed = kernels.pack_window(flat, shape, stride, starts, window)
        return Encoded(
            packed.nbytes,
            lambda: kernels.unpack_window(packed, shape, stride, starts, window),
        )
    local = _local(tensor, window, starts)
    codes = torch.empty_strided(shape, stride, dtype=torch.uint8, device=tensor.device)
    codes.copy_(local)
    count = tensor.numel()
    packed = pack_codes(codes.as_strided((count,), (1,)), window.width)

    def decode() -> torch.Tensor:
        places = unpack_codes(packed, count, window.width).as_strided(shape, stride)
        indices = torch.empty_strided(shape, stride, dtype=torch.int64, device=places.device)
        return indices.copy_(_global(places.to(torch.int64), window, starts)).as_strided(
            (count,), (1,)
        )

    return Encoded(packed.nbytes, decode)


def _local(
    indices: torch.Tensor, window: PoolingWindow, starts: list[torch.Tensor]
) -> torch.Tensor:
    """The place within the window, the last dimension running fastest."""
    rest, local, faster = indices, torch.zeros_like(indices), 1
    for place in reversed(range(len(window.kernel))):
        coordinate = rest % window.size[place]
        rest = rest.div(window.size[place], rounding_mode="floor")
        offset = coordinate - _along(starts[place], place - len(window.kernel))
        local += offset.div(window.dilation[place], rounding_mode="floor") * faster
        faster *= window.kernel[place]
    return local


def _global(local: torch.Tensor, window: PoolingWindow, starts: list[torch.Tensor]) -> torch.Tensor:
    rest, index, faster = local, torch.zeros_like(local), 1
    for place in reversed(range(len(window.kernel))):
        offset = rest % window.kernel[place] * window.dilation[place]
        rest = rest.div(window.kernel[place], rounding_mode="floor")
        index += (_along(starts[place], place - len(window.kernel)) + offset) * faster
        faster *= window.size[place]
    return index


def _along(values: torch.Tensor, dimension: int) -> torch.Tensor:
    """A row of values that broadcasts along one of the last dimensions."""
    return values.view(-1, *[1] * (-dimension - 1))
