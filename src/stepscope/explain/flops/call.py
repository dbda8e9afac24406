"""One distinct call of an operator as the trace describes it: shapes, dtypes, and plain values."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

# Bytes of an element, by the names that the profiler writes.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "signed char", "unsigned char", "c10::qint8", "c10::quint8"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e4m3fnuz", "c10::Float8_e5m2"), 1),
    **dict.fromkeys(("c10::Float8_e5m2fnuz", "c10::Float8_e8m0fnu", "c10::Float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short", "unsigned short"), 2),
    **dict.fromkeys(("float", "int", "unsigned int", "c10::qint32", "c10::complex<c10::Half>"), 4),
    **dict.fromkeys(("double", "long int", "long", "long long", "unsigned long"), 8),
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
# By torch's number of the dtype, as plain values carry it: bytes of an element and the numbers.
_SCALAR_TYPES = (
    (1, (0, 1, 11, 12, 13, 23, 24, 25, 26)),
    (2, (2, 5, 15, 27)),
    (4, (3, 6, 8, 14, 28)),
    (8, (4, 7, 9, 29)),
    (16, (10,)),
)
_SCALAR_TYPE_BYTES = {number: size for size, numbers in _SCALAR_TYPES for number in numbers}
_NOT_TENSORS = frozenset({"", "Scalar", "ScalarList", "TensorList", "GenericList", "Device"})
_WHOLE = frozenset({int})
_INTEGER = re.compile(r"-?\d+")
_MOST_DIGITS = 18

Dims = tuple[int, ...]


class Tensor(msgspec.Struct, frozen=True):
    dims: Dims
    dtype: str  # as the profiler writes it

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def item_bytes(self) -> int:
        """Raises KeyError for an unknown dtype: its bytes are unknown then."""
        return ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.elements * self.item_bytes


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size_bytes for tensor in tensors)


class Unknown(Exception):  # noqa: N818 - an answer, not a failure
    """The trace does not say what a formula needs."""


class Call:
    """Arguments by place. A missing one raises Unknown."""

    __slots__ = ("_concrete", "_dtypes", "_shapes", "name")

    def __init__(self, name: str, shapes: Any, dtypes: Any, concrete: Any) -> None:
        self.name = name
        self._shapes = shapes if isinstance(shapes, list) else []
        self._dtypes = dtypes if isinstance(dtypes, list) else []
        self._concrete = concrete if isinstance(concrete, list) else []

    def __len__(self) -> int:
        return len(self._shapes)

    def has_tensor(self, place: int) -> bool:
        return place < len(self._dtypes) and self._dtypes[place] not in _NOT_TENSORS

    def tensor(self, place: int) -> Tensor:
        """The tensor at a place; a file without dtypes still has its shape."""
        if place >= len(self._shapes):
            raise Unknown
        dims = self._shapes[place]
        if not _WHOLE.issuperset(map(type, dims)):
            raise Unknown
        if self.has_tensor(place):
            return Tensor(tuple(dims), self._dtypes[place])
        if self._dtypes or not dims:
            raise Unknown
        return Tensor(tuple(dims), "")

    def tensors(self) -> list[Tensor]:
        """All single tensors, in order."""
        return [self.tensor(place) for place in range(len(self)) if self.has_tensor(place)]

    def lists(self) -> list[list[Dims] | None]:
        """Every list of tensors as their shapes; None if it was too long to be recorded."""
        return [
            self.tensor_list(place)
            for place in range(len(self))
            if place < len(self._dtypes) and self._dtypes[place] == "TensorList"
        ]

    def tensor_list(self, place: int) -> list[Dims] | None:
        shapes = self._shapes[place] if place < len(self._shapes) else None
        if not shapes or not all(isinstance(dims, list) for dims in shapes):
            return None
        return [tuple(dims) for dims in shapes]

    def has_value(self, place: int) -> bool:
        """Whether a plain value was recorded at this place."""
        return place < len(self._concrete) and self._concrete[place] not in ("", None)

    def text(self, place: int) -> str:
        if not self.has_value(place):
            raise Unknown
        return str(self._concrete[place])

    def number(self, place: int) -> int:
        match = _INTEGER.fullmatch(self.text(place))
        if not match:
            raise Unknown
        return _whole(match[0])

    def numbers(self, place: int) -> list[int]:
        """A list of whole numbers; one number is a list of one."""
        return [_whole(digits) for digits in _INTEGER.findall(self.text(place))]

    def flag(self, place: int) -> bool:
        return self.text(place) == "True"

    def flags(self, place: int) -> list[bool]:
        return [word == "True" for word in re.findall(r"True|False", self.text(place))]

    def dtype_bytes(self, place: int) -> int:
        """Bytes of an element of the dtype that a plain value names."""
        if (code := self.number(place)) not in _SCALAR_TYPE_BYTES:
            raise Unknown
        return _SCALAR_TYPE_BYTES[code]


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise Unknown
    return int(digits)
