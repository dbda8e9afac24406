"""One call of each kind of collective. Bytes are the total: output of an all-gather, else input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """This rank's process group and the world ranks in it."""

    handle: Any
    ranks: tuple[int, ...]
    rank: int

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Two flat tensors that every size is a slice of."""

    first: torch.Tensor
    second: torch.Tensor

    @classmethod
    def allocate(cls, count: int, device: torch.device) -> Buffers:
        """Written once, so that no page is touched for the first time while the clock runs."""
        first, second = (torch.empty(count, device=device).zero_() for _ in range(2))
        return cls(first=first, second=second)


def elements(size_bytes: int, group_size: int) -> int:
    """As many elements as fit, the same number for every rank."""
    return max(1, size_bytes // _ELEMENT_BYTES // group_size) * group_size


def actual_bytes(size_bytes: int, group_size: int) -> int:
    """A sweep's size, rounded so that every rank has the same share."""
    return elements(size_bytes, group_size) * _ELEMENT_BYTES


def make_call(
    kind: str, place: GroupPlace | None, buffers: Buffers, size_bytes: int
) -> Callable[[], object]:
    """This rank's part of the collective; nothing for a rank that is in no group."""
    if place is None:
        return lambda: None
    ranks = len(place.ranks)
    whole = buffers.first[: elements(size_bytes, ranks)]
    other = buffers.second[: len(whole)]
    share = other[: len(whole) // ranks]
    group = place.handle
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: _all_gather()(whole, share, group=group),
        "reduce_scatter": lambda: _reduce_scatter()(share, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, src=place.ranks[0], group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": _send_or_receive(place, whole),
    }
    return calls[kind]


def largest_of_ranks(
    values: list[int], *, group: Any = None, device: torch.device | None = None
) -> list[int]:
    """The largest of each value over the group's ranks, equal on all of them."""
    shared = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    largest: list[int] = shared.tolist()
    return largest


def _all_gather() -> Callable[..., object]:
    """torch 2.13 renamed it."""
    renamed: Callable[..., object] | None = getattr(dist, "all_gather_single", None)
    return renamed or dist.all_gather_into_tensor


def _reduce_scatter() -> Callable[..., object]:
    renamed: Callable[..., object] | None = getattr(dist, "reduce_scatter_single", None)
    return renamed or dist.reduce_scatter_tensor


def _send_or_receive(place: GroupPlace, tensor: torch.Tensor) -> Callable[[], object]:
    """Pairs of neighbours, one way: even ranks send, odd ones receive, a last one rests."""
    index = place.index
    if index % 2:
        source = place.ranks[index - 1]
        return lambda: dist.recv(tensor, src=source, group=place.handle)
    if index + 1 == len(place.ranks):
        return lambda: None
    target = place.ranks[index + 1]
    return lambda: dist.send(tensor, dst=target, group=place.handle)
