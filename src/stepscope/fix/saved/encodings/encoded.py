"""What an encoding returns, and how a tensor lies in its storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


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

    def seen_on(self, holder: torch.Tensor) -> torch.Tensor:
        """`on`, or the holder itself where it lies just like that: a view costs an operator."""
        if (
            holder.stride() == self.stride
            and holder.shape == self.shape
            and holder.storage_offset() == self.offset
        ):
            return holder
        return self.on(holder)


@dataclass(frozen=True, slots=True)
class Encoded:
    """`decode` makes a tensor over a storage like the one that was encoded."""

    size_bytes: int
    decode: Callable[[], torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor | None:
    """All of a tensor's storage, flat; None where there is nothing."""
    count, rest = divmod(tensor.untyped_storage().nbytes(), tensor.itemsize)
    if rest or not count:
        return None
    return tensor.as_strided((count,), (1,), 0)


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements in memory order, flat; None where the tensor has gaps or overlaps."""
    count = tensor.numel()
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]))
    expected = 1
    for dimension in order:
        if tensor.shape[dimension] == 1:
            continue
        if tensor.stride(dimension) != expected:
            return None
        expected *= tensor.shape[dimension]
    return tensor.as_strided((count,), (1,)) if count else None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether two flat tensors of one type are the same to the last bit: NaN and -0.0 too."""
    return (a.view(BITS_OF[a.itemsize]) == b.view(BITS_OF[b.itemsize])).all()


BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
