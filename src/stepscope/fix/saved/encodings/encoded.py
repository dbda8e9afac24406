"""What an encoding returns, how a tensor lies in its storage, the pending check that it
could be encoded, and which tensors Triton kernels handle.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stepscope.fix.saved.operators import is_capturing


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

    @property
    def size_bytes(self) -> int:
        return int(math.prod(self.shape) * self.dtype.itemsize)

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
    """`decode` makes a tensor over a storage like the one that was encoded. Where whether the
    tensor could be encoded is known only later, `check` has the plain tensor until then."""

    size_bytes: int
    decode: Callable[[], torch.Tensor]
    check: PendingCheck | None = None

    def holder(self) -> torch.Tensor:
        """A tensor with the storage's content: decoded, or the plain one that had to be kept."""
        plain = None if self.check is None else self.check.plain()
        return self.decode() if plain is None else plain


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


# Whether a tensor could be encoded is computed on the device; the host hardly waits for it.
#
# The plain tensor stays until the answer has arrived, which is asked for whenever another one is
# encoded. A host that is far ahead of its device would hold all of them: it stays a few behind. On
# CPUs there is nothing to wait for, and no check is made.

_MOST_WAITING = 2  # while the device works on what lies between them


class PlainTensor(Protocol):
    """A tensor that is kept, and knows whether it was changed in place."""

    def unpack(self) -> torch.Tensor: ...


class PendingCheck:
    """Ask later whether one tensor could be encoded."""

    def __init__(self, fits: torch.Tensor) -> None:
        self._answer = torch.empty((), dtype=torch.bool, pin_memory=fits.device.type == "cuda")
        self._answer.copy_(fits, non_blocking=True)
        self._arrived: Any = None
        if fits.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._plain: PlainTensor | None = None
        self._known = False
        _WAITING.append(weakref.ref(self))

    def keep_until_known(self, plain: PlainTensor) -> None:
        """Call it once, right after encoding."""
        self._plain = plain

    def settle(self) -> bool:
        """Drop the plain tensor if the answer is there and says so; False while it is not."""
        if not self._known and (self._arrived is None or self._arrived.query()):
            self._known = True
            if bool(self._answer):
                self._plain = None
        return self._known

    def wait(self) -> None:
        if not self._known and self._arrived is not None:
            self._arrived.synchronize()
        self.settle()

    def plain(self) -> torch.Tensor | None:
        """The tensor, if it could not be encoded. Waits for the answer: backward needs it now."""
        self.wait()
        if not bool(self._answer) and self._plain is None:
            raise RuntimeError("a tensor that could not be encoded was not kept either")
        return None if self._plain is None else self._plain.unpack()


_WAITING: deque[weakref.ref[PendingCheck]] = deque()


def settle_waiting() -> None:
    """Answers arrive in order: stop at the first that has not, unless too many wait. While a CUDA
    graph is captured, no event may be asked."""
    while _WAITING and not is_capturing():
        check = _WAITING[0]()
        if check is not None and not check.settle():
            if len(_WAITING) <= _MOST_WAITING:
                return
            check.wait()
        _WAITING.popleft()


# Which tensors are handled by Triton kernels.


def kernels_for(tensor: torch.Tensor, module: str) -> Any:
    """A module of kernels for tensors on a CUDA device, or in Triton's interpreter; else None."""
    if not tensor.numel() or not (tensor.is_cuda or _interpreted()):
        return None
    return _kernels(module)


@functools.cache
def _kernels(module: str) -> Any:
    try:
        return importlib.import_module(f"stepscope.fix.saved.encodings.{module}")
    except ImportError:
        return None


@functools.cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
