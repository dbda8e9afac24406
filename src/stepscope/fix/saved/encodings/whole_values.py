"""Encodings of whole values. Exact: packed bits, pooling windows, sparse values, shorter
integers. Lossy: short floats with a scale a block, and 4 bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.fix.saved.encodings.encoded import BITS_OF, Encoded, dense, whole
from stepscope.fix.saved.operators import is_capturing

# Small numbers packed into bytes: 1, 2 or 4 bits each, the first in the lowest bits.

_GATHER = 0x0102040810204080  # collects the lowest bits of eight bytes in the highest byte


def packed_bytes(count: int, width: int = 1) -> int:
    return -(-count * width // 8)


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Eight booleans of a flat tensor in one byte."""
    padding = -mask.numel() % 8
    if padding:
        mask = torch.nn.functional.pad(mask, (0, padding))
    eights = mask.contiguous().view(torch.uint8).view(torch.int64)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    eights = _table(packed.device)[packed.to(torch.int64)]
    return eights.view(torch.bool)[:count]


def pack_codes(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes below 2 ** width of a flat uint8 tensor."""
    if width == 8:
        return codes
    if width == 1:
        return pack_bits(codes.view(torch.bool))
    each = 8 // width
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    packed = rows[:, 0].clone()
    for place in range(1, each):
        packed |= rows[:, place] << (place * width)
    return packed


def unpack_codes(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    if width == 8:
        return packed
    if width == 1:
        return unpack_bits(packed, count).view(torch.uint8)
    shifts = [(packed >> shift) & (2**width - 1) for shift in range(0, 8, width)]
    return torch.stack(shifts, 1).flatten()[:count]


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """The eight booleans that each byte stands for."""
    numbers = torch.arange(256, device=device)
    masks = (numbers[:, None] >> torch.arange(8, device=device)) & 1
    return masks.to(torch.uint8).contiguous().view(torch.int64).flatten()


def encode_bits(tensor: torch.Tensor) -> Encoded | None:
    """`bits`: a mask of booleans."""
    flat = whole(tensor)
    if flat is None or flat.dtype != torch.bool:
        return None
    count, packed = flat.numel(), pack_bits(flat)
    return Encoded(packed.nbytes, lambda: unpack_bits(packed, count))


def encode_two_valued(tensor: torch.Tensor) -> Encoded | None:
    """`two-valued`: a dropout's noise, which is 0 or one positive constant."""
    flat = whole(tensor)
    if flat is None or not flat.is_floating_point():
        return None
    count, dtype = flat.numel(), flat.dtype
    packed, constant = pack_bits(flat != 0), flat.max()

    def decode() -> torch.Tensor:
        zero = torch.zeros((), dtype=dtype, device=constant.device)
        return torch.where(unpack_bits(packed, count), constant, zero)

    return Encoded(packed.nbytes + constant.nbytes, decode)


# `window`: max pooling's int64 indices, as places within their windows: 2, 4 or 8 bits.
#
# An index counts places in the plane (or volume) of the input. Where the window of each output
# begins is known from the layer's options, so the place within the window is enough.

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
        dimensions = _POOLS[name]

        def option(place: int, default: Any) -> tuple[int, ...]:
            value = args[place] if len(args) > place and args[place] != [] else default
            values = [value] if isinstance(value, int) else list(value)
            return tuple(values * dimensions if len(values) == 1 else values)

        kernel = option(1, 1)
        size = tuple(int(length) for length in args[0].shape[-dimensions:])
        window = PoolingWindow(kernel, option(2, kernel), option(3, 0), option(4, 1), size)
    elif name in _ADAPTIVE:
        window = _of_adaptive(args, _ADAPTIVE[name])
    if window is None or math.prod(window.kernel) > _MOST_PLACES:
        return None
    return window.spec()


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
    # The place within the window, the last dimension running fastest.
    rest, local, faster = tensor, torch.zeros_like(tensor), 1
    for place in reversed(range(len(window.kernel))):
        coordinate = rest % window.size[place]
        rest = rest.div(window.size[place], rounding_mode="floor")
        offset = coordinate - _along(starts[place], place - len(window.kernel))
        local += offset.div(window.dilation[place], rounding_mode="floor") * faster
        faster *= window.kernel[place]
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


# `sparse`: a mask of what is not zero, and those elements one after the other.
#
# Zero means all bits zero: -0.0 and NaN are kept as they are. The sizes of this and of `narrow` are
# known when the device has answered. On a GPU the host would wait for that in every step: they are
# for CPUs.

_WORTH = 0.9  # of the plain bytes: a value that compresses less is left alone


def sparse_spec(tensor: torch.Tensor) -> str | None:
    """Name a sparse encoding; None where it does not compress."""
    flat = whole(tensor)
    if flat is None or not flat.is_floating_point() or flat.device.type != "cpu":
        return None
    count = int(torch.count_nonzero(flat.view(BITS_OF[flat.itemsize])))
    return "sparse" if _size(flat, count) <= _WORTH * flat.nbytes else None


def _size(flat: torch.Tensor, count: int) -> int:
    return packed_bytes(flat.numel()) + count * int(flat.itemsize)


def encode_sparse(tensor: torch.Tensor) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or is_capturing():  # how much is not zero differs from step to step
        return None
    dtype, count = flat.dtype, flat.numel()
    patterns = flat.view(BITS_OF[flat.itemsize])
    mask = patterns != 0
    values = patterns[mask]
    if _size(flat, values.numel()) > _WORTH * flat.nbytes:
        return None
    packed = pack_bits(mask)

    def decode() -> torch.Tensor:  # must not name the tensor: it would be held as well
        decoded = torch.zeros(count, dtype=values.dtype, device=packed.device)
        return decoded.masked_scatter_(unpack_bits(packed, count), values).view(dtype)

    return Encoded(packed.nbytes + values.nbytes, decode)


# `narrow TYPE`: integers in a type as short as their values allow.

_TYPES = {"uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32}


def narrow_spec(tensor: torch.Tensor) -> str | None:
    """Name a shorter type; None where nothing shorter fits."""
    flat = whole(tensor)
    if flat is None or flat.dtype not in (torch.int16, torch.int32, torch.int64):
        return None
    if flat.device.type != "cpu":
        return None
    low, high = (int(limit) for limit in torch.aminmax(flat))
    for name, dtype in _TYPES.items():
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max and dtype.itemsize < flat.itemsize:
            return f"narrow {name}"
    return None


def encode_narrow(tensor: torch.Tensor, name: str) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or flat.dtype.is_floating_point or is_capturing():
        return None
    dtype, limits = flat.dtype, torch.iinfo(_TYPES[name])
    low, high = (int(limit) for limit in torch.aminmax(flat))
    if low < limits.min or high > limits.max:
        return None
    short = flat.to(_TYPES[name])
    return Encoded(short.nbytes, lambda: short.to(dtype))


# Lossy: NaN and infinities come back as NaN.
#
# `fp16`, `fp8-e4m3`, `fp8-e5m2`: a block of 256 elements is multiplied by the power of two that
# brings its largest element below 2 ** top; one byte an exponent keeps it. bf16 has float32's range
# and needs no scale.

_BLOCK = 256
_MOST_SHIFT = 120  # so that a scale is an ordinary float32
_SHORT = {
    "fp16": (torch.float16, 15),
    "fp8-e4m3": (torch.float8_e4m3fn, 8),
    "fp8-e5m2": (torch.float8_e5m2, 15),
}
_ROUNDED = (torch.float32, torch.float16, torch.bfloat16)


def encode_reduced(tensor: torch.Tensor, name: str) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or flat.dtype not in _ROUNDED:
        return None
    dtype, count = flat.dtype, flat.numel()
    if name == "bf16":
        plain = flat.to(torch.bfloat16)
        return Encoded(plain.nbytes, lambda: plain.to(dtype)) if dtype.itemsize > 2 else None
    kind, top = _SHORT[name]
    if kind.itemsize >= flat.itemsize:
        return None
    blocks = torch.nn.functional.pad(flat.float(), (0, -count % _BLOCK)).view(-1, _BLOCK)
    finite = blocks.isfinite()
    largest = torch.where(finite, blocks.abs(), 0).amax(1)
    exponent = ((largest.view(torch.int32) >> 23) & 255).clamp(min=1) - 126
    shifts = (top - exponent).clamp(max=_MOST_SHIFT)
    scaled = torch.where(finite, blocks * _power_of_two(shifts)[:, None], torch.nan)
    short, shifts = scaled.to(kind), shifts.to(torch.int8)

    def decode() -> torch.Tensor:
        decoded = short.float() * _power_of_two(-shifts.int())[:, None]
        return decoded.flatten()[:count].to(dtype)

    return Encoded(count * kind.itemsize + shifts.nbytes, decode)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two for int32 exponents from -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


# `4-bit`: groups of 128 elements on 16 even steps from their smallest to their largest. Rounding is
# up or down by chance, so that errors cancel on average. The chance is a hash of the element's
# place and of how many tensors were encoded before: torch's random numbers are not used.

_GROUP, _LEVELS = 128, 15
_LEAST_STEP = 2.0**-120  # a group within smaller steps becomes its smallest element
_SEEDS = itertools.count()
_LOW_32 = 0xFFFFFFFF


def encode_four_bits(tensor: torch.Tensor) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or flat.dtype not in _ROUNDED:
        return None
    dtype, count, seed = flat.dtype, flat.numel(), _hashed(next(_SEEDS))
    padding = -count % _GROUP
    values = torch.cat([flat.float(), flat[-1:].float().expand(padding)])
    groups = values.view(-1, _GROUP)
    finite = groups.isfinite().all(1)
    lowest, highest = groups.amin(1), groups.amax(1)
    step = highest / _LEVELS - lowest / _LEVELS
    inverse = torch.where(step > _LEAST_STEP, 1 / step, 0)
    places = torch.arange(groups.numel(), device=flat.device).view(-1, _GROUP)
    chance = (_hashed(places ^ seed) >> 8).float() * 2.0**-24
    levels = ((groups - lowest[:, None]) * inverse[:, None] + chance).floor().clamp(0, _LEVELS)
    levels = torch.where(finite[:, None], levels, 0)
    lowest = torch.where(finite, lowest, torch.nan)
    packed = pack_codes(levels.to(torch.uint8).flatten(), 4)

    def decode() -> torch.Tensor:
        codes = unpack_codes(packed, len(lowest) * _GROUP, 4).view(-1, _GROUP).float()
        return (codes * step[:, None] + lowest[:, None]).flatten()[:count].to(dtype)

    return Encoded(packed.nbytes + lowest.nbytes + step.nbytes, decode)


def _hashed(number: Any) -> Any:
    """32 bits that look random; the constants are Chris Wellons' lowbias32
    (nullprogram.com/blog/2018/07/31)."""
    number = number & _LOW_32
    number = number ^ (number >> 16)
    number = (number * 0x7FEB352D) & _LOW_32
    number = number ^ (number >> 15)
    number = (number * 0x846CA68B) & _LOW_32
    return number ^ (number >> 16)
