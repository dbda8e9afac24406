"""Convolutions as matrix products: kernels of one element, inputs of every output side by
side in a row, and filters in the precision and order they are read in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from stepscope.fix.fuse.kernel_choice import proven_kernels
from stepscope.fix.fuse.stacked import is_ordinary

# The rows are as many times as large as the input as the kernel has elements, so this pays for
# small pictures with many channels, where grouped kernels are poor, and for the first layer, whose
# few channels leave other kernels idle. Backward makes the rows again, or keeps them, which is
# faster and takes memory.


def convolve_unfolded(
    last: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    keep_rows: bool = False,
) -> torch.Tensor:
    """[batch, *sizes, models, channels] -> [batch, models * outputs, *sizes], channels last in
    memory."""
    models, outputs, _, *kernel = weight.shape
    dimensions = len(kernel)
    window = KernelWindow(
        tuple(kernel), *(each_dimension(one, dimensions) for one in (stride, padding, dilation))
    )
    last = last.to(precision_of_autocast(last))
    filters = channels_last(weight, precision_of_autocast(weight))
    made = _Unfolded.apply(last, filters, window, keep_rows)
    if bias is not None:
        made = made + bias.to(made.dtype)
    whole: torch.Tensor = made.reshape(*made.shape[:-2], models * outputs).movedim(-1, 1)
    return whole


class _Unfolded(torch.autograd.Function):
    """[batch, *sizes, models, channels] and [models, outputs, *kernel, channels]."""

    @staticmethod
    def forward(
        context: Any,
        last: torch.Tensor,
        weight: torch.Tensor,
        window: KernelWindow,
        keep_rows: bool,
    ) -> torch.Tensor:
        rows = window.rows(last)
        context.save_for_backward(rows if keep_rows else last, weight)
        context.window, context.shape, context.has_rows = window, last.shape, keep_rows
        matrices = window.shape_of(weight).matrices(weight)
        return _multiplied(rows, matrices.transpose(1, 2), window, last.shape)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        seen, weight = context.saved_tensors
        window, gradient = context.window, gradients[0].contiguous()
        of_input = of_weight = None
        if context.needs_input_grad[0]:
            of_input = _input_gradient(gradient, context.shape, weight, window)
        if context.needs_input_grad[1]:
            rows = seen if context.has_rows else window.rows(seen)
            flat = gradient.reshape(-1, *gradient.shape[-2:])
            made = torch.bmm(flat.permute(1, 2, 0), rows.transpose(0, 1))
            of_weight = window.shape_of(weight).filters(made)
        return of_input, of_weight, None, None


def _multiplied(
    rows: torch.Tensor, matrices: torch.Tensor, window: KernelWindow, shape: torch.Size
) -> torch.Tensor:
    """`shape` is that of the pictures that the rows were made of."""
    made = multiply_rows(rows, matrices)
    return made.reshape(shape[0], *window.outputs(shape[1:-2]), *made.shape[1:])


def _input_gradient(
    gradient: torch.Tensor, shape: torch.Size, weight: torch.Tensor, window: KernelWindow
) -> torch.Tensor:
    if all(step == 1 for step in window.stride):
        back = window.turned()
        matrices = back.shape_of(gradient).turned_matrices(weight)
        return _multiplied(back.rows(gradient), matrices, back, gradient.shape)
    # Every kernel element's share, added where it was read.
    sizes = shape[1:-2]
    wide = [size + 2 * border for size, border in zip(sizes, window.padding, strict=True)]
    models, channels = shape[-2:]
    total = gradient.new_zeros(shape[0], *wide, models, channels)
    flat = gradient.reshape(-1, *gradient.shape[-2:])
    shares = multiply_rows(flat, weight.flatten(2))
    shares = shares.reshape(*gradient.shape[:-1], prod(window.kernel), channels)
    for number, tap in enumerate(product(*map(range, window.kernel))):
        total[_read_by(tap, window, gradient.shape[1:-2])] += shares[..., number, :]
    return total[(slice(None), *between(sizes, window.padding))].contiguous()


def _read_by(tap: tuple[int, ...], window: KernelWindow, outputs: Any) -> tuple[slice, ...]:
    """Where a kernel element reads, for all outputs."""
    parts = []
    for at, step, gap, count in zip(tap, window.stride, window.dilation, outputs, strict=True):
        parts.append(slice(at * gap, at * gap + (count - 1) * step + 1, step))
    return (slice(None), *parts)


# The inputs of every output of a convolution, side by side in a row.
#
# A row is as wide as the kernel has elements times the channels, so writing the rows takes longest.
# Neighbouring channels are therefore copied as one number of up to 16 bytes, and rows end at a
# multiple of 16 bytes: matrix products with unaligned rows run many times slower.

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
            # For a compiler, which writes the copies itself.
            shape = self.shape_of(last)
            borders = [one for size in reversed(self.padding) for one in (size, size)]
            extra = shape.padded_channels - shape.channels
            seen = functional.pad(last, (0, extra, 0, 0, *borders))
            rows = self._patches(seen).reshape(-1, last.shape[-2], shape.used_columns)
            return functional.pad(rows, (0, shape.columns - shape.used_columns))
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
        """Return the window that brings gradients back to inputs, where the stride is one."""
        borders = (
            (taps - 1) * gap - border
            for taps, border, gap in zip(self.kernel, self.padding, self.dilation, strict=True)
        )
        return self._replace(padding=tuple(borders))

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
    """Return how many channels fit 16 bytes, where a row grows by a third at most."""
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


# Convolutions with kernels of one element are matrix products: one for each model, in one call.


def pointwise_product(
    front: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[models, batch, channels, *rest] -> the same with `weight`'s outputs.

    The result lies in memory as [models, channels, batch, *rest], so that a chain of such layers,
    with norms between them, moves nothing.
    """
    wide = front.transpose(1, 2)
    models, channels, batch, *rest = wide.shape
    filters = weight.reshape(models, -1, channels)
    columns = wide.reshape(models, channels, -1)
    if bias is None:
        outputs = torch.bmm(filters, columns)
    else:
        outputs = torch.baddbmm(bias.unsqueeze(2), filters, columns)
    return outputs.reshape(models, -1, batch, *rest).transpose(1, 2)


def shared_product(
    pictures: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same for [batch, channels, *rest] that all models share: one product for all filters."""
    wide = pictures.transpose(0, 1)
    channels, batch, *rest = wide.shape
    models = weight.shape[0]
    filters = weight.reshape(-1, channels)
    columns = wide.reshape(channels, -1)
    if bias is None:
        outputs = torch.mm(filters, columns)
    else:
        outputs = torch.addmm(bias.reshape(-1, 1), filters, columns)
    return outputs.reshape(models, -1, batch, *rest).transpose(1, 2)


def product_in_channels(
    pictures: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[batch, models * channels, *rest], channels last in memory -> the same; nothing is moved."""
    models, outputs = weight.shape[:2]
    last = pictures.movedim(1, -1)
    batch_and_rest = last.shape[:-1]
    rows = last.reshape(-1, models, last.shape[-1] // models)
    filters = weight.reshape(models, outputs, -1)
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, filters = rows.to(dtype), filters.to(dtype)
    made = _RowsTimesFilters.apply(rows, filters)
    if bias is not None:
        made = made + bias.to(made.dtype)
    whole: torch.Tensor = made.reshape(*batch_and_rest, models * outputs)
    return whole.movedim(-1, 1)


class _RowsTimesFilters(torch.autograd.Function):
    """[rows, models, inputs] times [models, outputs, inputs]: batched products read and write
    every second dimension in place, which torch's own would first bring to the front."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(rows, filters)
        return multiply_rows(rows, filters.transpose(1, 2))

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, filters = context.saved_tensors
        (gradient,) = gradients
        gradient = gradient.contiguous()
        of_filters = torch.bmm(gradient.permute(1, 2, 0), rows.transpose(0, 1))
        return multiply_rows(gradient, filters), of_filters


def multiply_rows(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """[rows, models, inputs] times [models, inputs, outputs] -> [rows, models, outputs]."""
    if not is_ordinary(rows):  # a compiler chooses the result's layout, and gives no place for it
        return torch.bmm(rows.transpose(0, 1), matrices).transpose(0, 1)
    result = rows.new_empty(*rows.shape[:2], matrices.shape[2])
    torch.bmm(rows.transpose(0, 1), matrices, out=result.transpose(0, 1))
    return result


# Filters in the precision and order that a convolution reads: one pass over memory each way.
#
# A cast and a copy to another layout would be two passes, and as many for the gradient on its way
# back, for every weight of every model in every step.

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by a tensor's dimensions
_CAST = (torch.float32, torch.float16, torch.bfloat16)  # autocast leaves float64 as it is


def channels_last(weight: torch.Tensor, precision: torch.dtype | None = None) -> torch.Tensor:
    """[models, outputs, inputs, *kernel] -> [models, outputs, *kernel, inputs], without gaps."""
    arranged: torch.Tensor = _ChannelsLast.apply(weight, precision or weight.dtype)
    return arranged


def as_filters(arranged: torch.Tensor) -> torch.Tensor:
    """View the result of `channels_last` as one convolution of all models takes it."""
    return arranged.flatten(0, 1).movedim(-1, 1)


def precision_of_autocast(tensor: torch.Tensor) -> torch.dtype:
    """In which autocast would compute with it."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype in _CAST:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


class _ChannelsLast(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
        context.precision = weight.dtype
        kernels = _kernels_for(weight, precision, weight.shape[3:])
        if kernels is not None:
            arranged: torch.Tensor = kernels.channels_last(weight, precision)
            return arranged
        turned = weight.movedim(2, -1)
        return torch.empty(turned.shape, dtype=precision, device=weight.device).copy_(turned)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0]
        kernels = _kernels_for(gradient, context.precision, gradient.shape[2:-1])
        if kernels is not None:
            return kernels.channels_first(gradient, context.precision), None
        turned = gradient.movedim(-1, 2)
        made = torch.empty(turned.shape, dtype=context.precision, device=turned.device)
        return made.copy_(turned), None


def _kernels_for(source: torch.Tensor, target: torch.dtype, kernel: torch.Size) -> Any:
    """A kernel that copies whole lines of memory, where there is one."""
    kernels = proven_kernels("filter_kernel", source)
    if kernels is None or not kernels.can_exchange(source, target, kernel.numel()):
        return None
    return kernels


# The elements of a convolution's kernel that ever meet its input.
#
# A kernel of 3 x 3 over one element with a border of one sees eight zeros: only the element in its
# middle counts. Deep layers over small pictures are full of such kernels.


class UsefulTaps(NamedTuple):
    """A kernel's elements from `first` to before `end` in each dimension, and the border left."""

    first: tuple[int, ...]
    end: tuple[int, ...]
    padding: tuple[int, ...]

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The part of [models, outputs, inputs, *kernel]."""
        parts = (slice(*pair) for pair in zip(self.first, self.end, strict=True))
        part: torch.Tensor = _KernelPart.apply(weight, (..., *parts))
        return part


class _KernelPart(torch.autograd.Function):
    """One fill and one copy on the way back; torch's own would take them for each dimension."""

    @staticmethod
    def forward(context: Any, whole: torch.Tensor, place: tuple[Any, ...]) -> torch.Tensor:
        context.shape, context.place = whole.shape, place
        return whole[place]

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradients[0].new_zeros(context.shape)
        whole[context.place] = gradients[0]
        return whole, None


def useful_taps(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: Any,
    padding: Any,
    dilation: Any,
) -> UsefulTaps | None:
    """Return the useful part of a kernel; None if all of it is, or the border would be unequal."""
    if isinstance(padding, str):
        return None
    steps, borders, gaps = (each_dimension(one, len(sizes)) for one in (stride, padding, dilation))
    facts = list(zip(sizes, kernel, steps, borders, gaps, strict=True))
    found = [_in_one_dimension(*one) for one in facts]
    if all(one == (0, kernel[at]) for at, one in enumerate(found)):
        return None
    left = []
    for (first, end), (size, taps, step, border, gap) in zip(found, facts, strict=True):
        before = border - first * gap
        outputs = (size + 2 * border - (taps - 1) * gap - 1) // step + 1
        needed = (outputs - 1) * step + (end - first - 1) * gap + 1
        # torch's border is the same on both sides; one element more than needed makes no output
        if before < 0 or not needed <= size + 2 * before < needed + step:
            return None
        left.append(before)
    return UsefulTaps(tuple(a for a, _ in found), tuple(b for _, b in found), tuple(left))


def _in_one_dimension(size: int, taps: int, step: int, border: int, gap: int) -> tuple[int, int]:
    outputs = (size + 2 * border - (taps - 1) * gap - 1) // step + 1
    seen = [
        tap
        for tap in range(taps)
        if any(0 <= at * step - border + tap * gap < size for at in range(outputs))
    ]
    return (seen[0], seen[-1] + 1) if seen else (0, taps)


def each_dimension(setting: Any, dimensions: int) -> tuple[int, ...]:
    """`stride=2` and `stride=(2,)` mean every dimension."""
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * dimensions if len(values) == 1 else values
