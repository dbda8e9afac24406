"""The inputs of every output of a convolution, side by side in a row.

A row is as wide as the kernel has elements times the channels, so writing the rows takes longest.
Neighbouring channels are therefore copied as one number of up to 16 bytes, and rows end at a
multiple of 16 bytes: matrix products with unaligned rows run many times slower.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from stepscope.fix.fuse.stacked import is_ordinary

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGNED = 16  # bytes
_NUMBERS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}


class PatchShape(NamedTuple):
    """How a row is laid out: kernel elements, then channels, both with room after them."""

    kernel: tuple[int, ...]
    channels: int
    lanes: int  # channels that are copied as one number
    padded_channels: int
    columns: int

    @classmethod
    def of(cls, kernel: tuple[int, ...], channels: int, element_size: int) -> PatchShape:
        lanes = _lanes(channels, element_size)
        padded = _round_up(channels, lanes)
        columns = _round_up(prod(kernel) * padded, max(1, _ALIGNED // element_size))
        return cls(kernel, channels, lanes, padded, columns)

    @property
    def used_columns(self) -> int:
        return prod(self.kernel) * self.padded_channels

    def matrices(self, weight: torch.Tensor) -> torch.Tensor:
        """[models, outputs, *kernel, channels] -> [models, outputs, columns]."""
        if self.padded_channels > self.channels:
            weight = functional.pad(weight, (0, self.padded_channels - self.channels))
        flat = weight.flatten(2)
        if self.columns > self.used_columns:
            flat = functional.pad(flat, (0, self.columns - self.used_columns))
        return flat

    def turned_matrices(self, weight: torch.Tensor) -> torch.Tensor:
        """[models, outputs, *kernel, channels] -> [models, columns, channels], kernel elements in
        reverse: what brings rows of an output's gradients, which have this shape, to the input."""
        outputs, *kernel, channels = weight.shape[1:]
        if not is_ordinary(weight) or self.columns > prod(kernel) * outputs:
            spatial = tuple(range(2, weight.dim() - 1))
            return self.matrices(weight.flip(spatial).transpose(1, -1)).transpose(1, 2)
        lanes = _lanes(channels, weight.element_size())
        lanes = lanes if _has_aligned_channels(weight, lanes) and channels % lanes == 0 else 1
        by_tap = _in_numbers(weight, lanes).flatten(2, -2).transpose(1, 2)
        backwards = torch.arange(prod(kernel) - 1, -1, -1, device=weight.device)
        return by_tap.index_select(1, backwards).view(weight.dtype).flatten(1, 2)

    def filters(self, matrices: torch.Tensor) -> torch.Tensor:
        """The inverse of `matrices`."""
        used = matrices[..., : self.used_columns]
        return used.unflatten(-1, (*self.kernel, self.padded_channels))[..., : self.channels]


class KernelWindow(NamedTuple):
    """How a kernel moves over [batch, *sizes, models, channels]."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def shape_of(self, last: torch.Tensor) -> PatchShape:
        """For pictures or filters with channels last."""
        return PatchShape.of(self.kernel, last.shape[-1], last.element_size())

    def rows(self, last: torch.Tensor) -> torch.Tensor:
        """[batch * outputs, models, columns]."""
        if not is_ordinary(last):
            return self._recorded_rows(last)
        shape = self.shape_of(last)
        patches = self._patches(_in_numbers(self._bordered(last, shape), shape.lanes))
        used, columns = (one // shape.lanes for one in (shape.used_columns, shape.columns))
        rows = patches.new_empty(*patches.shape[: 2 + len(self.kernel)], columns)
        rows[..., used:] = 0
        rows[..., :used].unflatten(-1, patches.shape[-len(self.kernel) - 1 :]).copy_(patches)
        return rows.view(last.dtype).reshape(-1, last.shape[-2], shape.columns)

    def outputs(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            (size + 2 * border - (taps - 1) * gap - 1) // step + 1
            for size, taps, step, border, gap in zip(sizes, *self, strict=True)
        )

    def turned(self) -> KernelWindow:
        """What brings gradients of outputs back to inputs, where the stride is one."""
        borders = (
            (taps - 1) * gap - border
            for taps, border, gap in zip(self.kernel, self.padding, self.dilation, strict=True)
        )
        return self._replace(padding=tuple(borders))

    def _recorded_rows(self, last: torch.Tensor) -> torch.Tensor:
        """For a compiler, which writes the copies itself."""
        shape = self.shape_of(last)
        borders = [one for size in reversed(self.padding) for one in (size, size)]
        extra = shape.padded_channels - shape.channels
        seen = functional.pad(last, (0, extra, 0, 0, *borders))
        rows = self._patches(seen).reshape(-1, last.shape[-2], shape.used_columns)
        return functional.pad(rows, (0, shape.columns - shape.used_columns))

    def _bordered(self, last: torch.Tensor, shape: PatchShape) -> torch.Tensor:
        """With borders of zeros and room after the channels, without gaps in memory."""
        last = last[(slice(None), *self._kept(last.shape[1:-2]))]
        borders = [max(0, border) for border in self.padding]
        extra = shape.padded_channels - shape.channels
        if not extra and not any(borders):
            return last.contiguous()
        sizes = last.shape[1:-2]
        wide = (size + 2 * border for size, border in zip(sizes, borders, strict=True))
        whole = last.new_zeros(last.shape[0], *wide, last.shape[-2], shape.padded_channels)
        inner = whole[(slice(None), *between(sizes, borders))][..., : shape.channels]
        if not extra and _has_aligned_channels(last, shape.lanes):
            last, inner = (_in_numbers(one, shape.lanes) for one in (last, inner))
        inner.copy_(last)
        return whole

    def _kept(self, sizes: tuple[int, ...]) -> tuple[slice, ...]:
        """A border below zero cuts the picture."""
        pairs = zip(sizes, self.padding, strict=True)
        return tuple(slice(max(0, -border), size + min(0, border)) for size, border in pairs)

    def _patches(self, seen: torch.Tensor) -> torch.Tensor:
        """[batch, *outputs, models, *kernel, channels]; a view."""
        dimensions = len(self.kernel)
        for at in range(dimensions):
            reach = (self.kernel[at] - 1) * self.dilation[at] + 1
            seen = seen.unfold(1 + at, reach, self.stride[at])[..., :: self.dilation[at]]
        taps = range(3 + dimensions, 3 + 2 * dimensions)
        return seen.permute(*range(2 + dimensions), *taps, 2 + dimensions)


def between(sizes: Sequence[int], borders: Sequence[int]) -> tuple[slice, ...]:
    """Where a picture lies inside its borders."""
    pairs = zip(sizes, borders, strict=True)
    return tuple(slice(border, border + size) for size, border in pairs)


def _lanes(channels: int, element_size: int) -> int:
    """As many as fit 16 bytes, where that enlarges a row by a third at most."""
    for size in _NUMBERS:
        lanes = size // element_size
        if lanes > 1 and 3 * _round_up(channels, lanes) <= 4 * channels:
            return lanes
    return 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _in_numbers(tensor: torch.Tensor, lanes: int) -> torch.Tensor:
    """Every `lanes` channels as one number; a view."""
    if lanes == 1:
        return tensor
    return tensor.view(_NUMBERS[lanes * tensor.element_size()])


def _has_aligned_channels(tensor: torch.Tensor, lanes: int) -> bool:
    *others, channels = tensor.stride()
    whole = not any(one % lanes for one in (*others, tensor.storage_offset()))
    return channels == 1 and whole
