"""Copies of what a pass did not make, for operators that backward repeats.

A buffer, a batch, a constant over a numpy array or a small weight may change between its use and
backward, also where no version counter says so (`.data`, numpy, a second forward). Nothing else
writes to a copy, so an operator that starts from one repeats what forward computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

from stepscope.fix.saved.encodings import Geometry
from stepscope.fix.saved.encodings.encoded import same_bits
from stepscope.fix.saved.operators import is_plain
from stepscope.fix.saved.replay import KeptTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

# Larger weights are not copied: their version counter is checked in backward.
LARGEST_COPIED_WEIGHT = 1 << 16
_ALIGNED = 64  # elements: kernels may read in another order where memory begins elsewhere
_MOST_GAPS = 2


def checked_weights(parameters: Iterable[torch.nn.Parameter]) -> set[int]:
    """The storages of weights that are started from without a copy: large ones that train. An
    optimizer changes them after backward, and raises their version."""
    held = [p for p in parameters if is_plain(p)]
    trained = {_address(p) for p in held if p.requires_grad}
    frozen = {_address(p) for p in held if not p.requires_grad}
    large = {_address(p) for p in held if p.untyped_storage().nbytes() > LARGEST_COPIED_WEIGHT}
    return (trained & large) - frozen


def copied_bytes(tensor: torch.Tensor) -> int | None:
    """What a copy takes; None where most of that would be gaps between the elements."""
    lead, span = _covered(tensor)
    if span > _MOST_GAPS * tensor.numel():
        return None
    return int((lead + span) * tensor.itemsize)


def private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with the same strides, in memory of its own."""
    lead, span = _covered(tensor)
    begins = tensor.storage_offset() - lead
    memory = tensor.detach().as_strided((lead + span,), (1,), begins).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), lead)


def _covered(tensor: torch.Tensor) -> tuple[int, int]:
    """Elements of the storage to copy before the tensor begins, and from there on."""
    if not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((count - 1) * stride for count, stride in steps)
    return tensor.storage_offset() % _ALIGNED, span


@dataclass(frozen=True, slots=True)
class _KnownCopy:
    kept: KeptTensor
    version: int
    alive: StorageWeakRef  # as long as it is held, no other storage gets this address


class PrivateCopies:
    """Of one pass: operators that read the same content share a copy."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, dict[Geometry, _KnownCopy]] = {}  # by storage

    def of(self, tensor: torch.Tensor) -> KeptTensor:
        """As the tensor is now."""
        copies = self._known.setdefault(_address(tensor), {})
        geometry, version = Geometry.of(tensor), _version(tensor)
        known = copies.get(geometry)
        if known is not None and known.version == version and _is_same(known.kept, tensor):
            return known.kept
        copy = private_copy(tensor)
        kept = KeptTensor(copy, copy._version)
        copies[geometry] = _KnownCopy(kept, version, StorageWeakRef(tensor.untyped_storage()))
        return kept

    def forget(self, written: torch.Tensor) -> None:
        self._known.pop(_address(written), None)

    def clear(self) -> None:
        self._known.clear()


def _is_same(kept: KeptTensor, tensor: torch.Tensor) -> bool:
    """Numpy writes to the memory of CPU tensors without a trace. Elsewhere nobody waits for the
    device to compare: there the version says it."""
    if tensor.device.type != "cpu":
        return True
    one, other = kept.tensor.contiguous().flatten(), tensor.detach().contiguous().flatten()
    return bool(same_bits(one, other))


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
