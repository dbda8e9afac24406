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
    "double": 8,
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e5m2fnuz": 1,
    "c10::Float8_e8m0fnu": 1,
    "c10::Float4_e2m1fn_x2": 1,
    "long int": 8,
    "long": 8,
    "long long": 8,
    "unsigned long": 8,
    "int": 4,
    "unsigned int": 4,
    "short": 2,
    "unsigned short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::complex<c10::Half>": 4,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "c10::qint8": 1,
    "c10::quint8": 1,
    "c10::qint32": 4,
}
# Bytes of an element, by torch's number of the dtype, as plain values carry it.
_SCALAR_TYPE_BYTES = {
    0: 1,
    1: 1,
    2: 2,
    3: 4,
    4: 8,
    5: 2,
    6: 4,
    7: 8,
    8: 4,
    9: 8,
    10: 16,
    11: 1,
    12: 1,
    13: 1,
    14: 4,
    15: 2,
    23: 1,
    24: 1,
    25: 1,
    26: 1,
    27: 2,
    28: 4,
    29: 8,
}
_NOT_TENSORS = frozenset({"", "Scalar", "ScalarList", "TensorList", "GenericList", "Device"})
_WHOLE = frozenset({int})
_INTEGER = re.compile(r"-?\d+")
_MOST_DIGITS = 18

Dims = tuple[int, ...]


class Tensor(msgspec.Struct, frozen=True):
    """An argument that is a tensor."""

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
        return math.prod(self.dims) * ITEM_BYTES[self.dtype]


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
        return {"True": True, "False": False}.get(self.text(place)) is True

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
