"""What workers, shards and the coordinator say to each other, and how gradients are packed
into it: one flat, perhaps compressed message a shard.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, dataclass_transform

import numpy as np
import torch

from stepscope.errors import UsageError

# Every message may arrive late, twice or after a later one, and an answer may be lost: handling one
# again changes nothing and gives the same answer. An *address* is whatever the network can reach: a
# Ray actor, or a name in the tests.


class Unreachable(Exception):  # noqa: N818 - a condition of the network, not a defect
    """No answer came. `dead`: the other process is known to have ended."""

    def __init__(self, why: str, *, dead: bool = False) -> None:
        super().__init__(why)
        self.dead = dead


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message:
    """A frozen record of keyword arguments."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Route(Message):
    """Where a shard is served, None while it is restored. The epoch grows when another actor takes
    over."""

    shard: int
    epoch: int
    address: Any


Routes = dict[int, Route]

# Worker -> coordinator


class Join(Message):
    """`token` is new for each life, and the same when the message is repeated."""

    token: str
    rank: int | None


class Joined(Message):
    member: str
    rank: int
    life: int
    clock: int
    sync_points: int  # that everybody has reached
    routes: Routes
    setup: Any  # ServerSetup, for workers that only know the server's name


class BeginClock(Message):
    """May this member read at this clock?"""

    member: str
    clock: int


class MayRead(Message):
    routes: Routes
    waited_for: int | None


class NotYet(Message):
    """Ask again. `waiting_for` is a rank that holds the asker up."""

    waiting_for: int | None = None


class FinishClock(Message):
    """All shards acknowledged this member's push, in these epochs."""

    member: str
    clock: int
    epochs: dict[int, int]


class Counted(Message):
    """The push is part of the history; no failure that a replica covers can lose it."""


class SendAgain(Message):
    """These shards were restored meanwhile."""

    shards: tuple[int, ...]
    routes: Routes


class Evicted(Message):
    """The member was silent for too long, or replaced; it may join again."""


class ReachSyncPoint(Message):
    member: str
    number: int


class Leave(Message):
    member: str


class StillHere(Message):
    member: str


class ReportShard(Message):
    """A shard did not answer. The answer, once it is served again, is a Found."""

    shard: int
    epoch: int
    dead: bool


class Found(Message):
    routes: Routes


class TakeCheckpoint(Message):
    """One that is being taken answers everybody who asks meanwhile."""


class ReadState(Message):
    """All parameters, at one cut: the answer is a Cut."""


class Cut(Message):
    """`shards` are the snapshots."""

    counts: dict[str, int]
    shards: tuple[Any, ...]


# Shard -> coordinator


class DropBackup(Message):
    """The primary of this epoch cannot reach its backup. Counted, or Stale if it is none."""

    shard: int
    epoch: int
    backup: str


# Worker -> shard


class PushGradients(Message):
    """`settings` are the optimizer's numbers (learning rate, ...), one dictionary per group."""

    member: str
    clock: int
    gradients: Any  # as `compress` packs them
    settings: tuple[dict[str, Any], ...] | None = None


class Ack(Message):
    epoch: int
    missing: tuple[str, ...] = ()  # members of a closed clock whose gradients a failure lost
    count: int | None = None  # of a fenced member: updates that this shard has
    counts: dict[str, int] | None = None  # of all members, if pushes are held


class Busy(Message):
    """The shard's queue is full."""

    queue: int


class Stale(Message):
    """Another actor serves the shard now."""


class ReadParameters(Message):
    member: str
    clock: int


class Values(Message):
    """`flat` is an array of bytes, or a reference to one in the object store."""

    epoch: int
    flat: Any
    size_bytes: int
    seen: dict[str, int]


# Coordinator -> shard. Admit, Fence, CloseClock and BeginCut change its state, as pushes do.


class Admit(Message):
    member: str
    clock: int


class Fence(Message):
    """Take no more pushes of this member. Gradients of clocks from `counted` on are dropped."""

    member: str
    counted: int


class CloseClock(Message):
    """Apply the mean of these members' gradients, added up in this order."""

    clock: int
    members: tuple[str, ...]


class HoldPushes(Message):
    """Apply no push until this cut begins, which is at once."""

    cut: int


class BeginCut(Message):
    """Keep the state that has exactly these counts of updates."""

    cut: int
    counts: dict[str, int]


Change = PushGradients | Admit | Fence | CloseClock | BeginCut


class FetchCut(Message):
    cut: int


class CutAborted(Message):
    """A member of the cut went away before its last update came."""


class Ping(Message):
    """Any answer shows that the actor lives."""


class Promote(Message):
    """A backup becomes the primary."""

    epoch: int


class AddBackup(Message):
    """Bring this new actor up to date and repeat every change to it from now on."""

    backup: str
    address: Any


# Primary -> backup


class Load(Message):
    epoch: int
    index: int  # of the last change in `snapshot`
    snapshot: Any


class Repeat(Message):
    epoch: int
    index: int
    change: Change


class OutOfOrder(Message):
    """A message that makes sense in no history; its sender has a defect."""

    why: str


# Which shard holds which tensor, and where each lies in the shard's one flat message.

_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One parameter and where its bytes begin in the flat message."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    trained: bool
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return int(self.elements * self.dtype.itemsize)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The tensors of one shard in the model's order."""

    places: tuple[TensorPlace, ...]
    size_bytes: int

    def views(self, flat: Any) -> dict[str, Any]:
        """Each tensor as a window into the flat bytes."""
        return {
            place.name: flat[place.offset : place.offset + place.size_bytes]
            .view(place.dtype)
            .view(place.shape)
            for place in self.places
        }


def lay_out(tensors: Iterable[tuple[str, tuple[int, ...], Any, bool]]) -> Layout:
    """Put tensors one after another; each begins where any type may begin."""
    places, offset = [], 0
    for name, shape, dtype, trained in tensors:
        places.append(TensorPlace(name, tuple(shape), dtype, trained, offset))
        offset += -(-places[-1].size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return Layout(places=tuple(places), size_bytes=offset)


def assign(sizes: Mapping[str, int], shards: int) -> list[list[str]]:
    """Names by shard: the largest tensor first, each to the shard with the fewest bytes so far.
    Within a shard, names keep the order of `sizes`."""
    load = [0] * shards
    chosen: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        shard = min(range(shards), key=lambda shard: (load[shard], shard))
        chosen[name] = shard
        load[shard] += sizes[name]
    return [[name for name in sizes if chosen[name] == shard] for shard in range(shards)]


def shard_layouts(tensors: Mapping[str, Any], shards: int) -> list[Layout]:
    """Share out a model's named parameters. UsageError where a shard would have nothing."""
    if shards < 1:
        raise UsageError(f"shards={shards}: a parameter server needs at least one shard")
    if len(tensors) < shards:
        raise UsageError(
            f"shards={shards}, but the model has {len(tensors)} parameter tensors: use at most "
            "one shard for each"
        )
    sizes = {name: one.numel() * one.element_size() for name, one in tensors.items()}
    facts = {name: (name, one.shape, one.dtype, one.requires_grad) for name, one in tensors.items()}
    return [lay_out(facts[name] for name in names) for names in assign(sizes, shards)]


def flatten(layout: Layout, tensors: Mapping[str, Any]) -> Any:
    """Copy tensors into one flat array of bytes, on the host."""
    flat = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name].detach())
    return flat


def unflatten(layout: Layout, flat: Any, into: Mapping[str, Any]) -> None:
    """Copy the flat bytes into tensors, whose device may be another."""
    first = next(iter(into.values()), None)
    if first is not None and first.device != flat.device:
        flat = flat.to(first.device)
    for name, view in layout.views(flat).items():
        into[name].copy_(view)


# Gradients as one message per shard: as they are, as bf16, or the largest few.
#
# `top-k:0.01` sends a hundredth of the numbers. What is not sent is added to the next gradient
# (error feedback), so that nothing is forgotten, only delayed.


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients travel. `share` is the part of the numbers that top-k sends."""

    kind: str  # "none", "bf16" or "top-k"
    share: float = 1.0

    @classmethod
    def parse(cls, text: str | None) -> Compression:
        if text is None or text == "bf16":
            return cls(text or "none")
        spelled = re.fullmatch(r"top-k:(\d*\.?\d+)", text)
        if spelled is not None and 0.0 < float(spelled[1]) <= 1.0:
            return cls("top-k", float(spelled[1]))
        raise UsageError(
            f'compression "{text}" is unknown. Use None, "bf16", or "top-k:0.01" for '
            "the largest hundredth of the gradient"
        )

    @property
    def words(self) -> str:
        """Spell it as `parse` takes it."""
        return f"top-k:{self.share:g}" if self.kind == "top-k" else self.kind

    def travel_layout(self, layout: Layout) -> Layout:
        """Return the layout in which wide floating-point numbers have the type they travel as."""
        if self.kind != "bf16":
            return layout
        half = torch.bfloat16
        is_wide = {
            one.dtype: one.dtype.is_floating_point and one.dtype.itemsize > half.itemsize
            for one in layout.places
        }
        return lay_out(
            (one.name, one.shape, half if is_wide[one.dtype] else one.dtype, one.trained)
            for one in layout.places
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedGradients:
    """`present` are the places of tensors that have a gradient at all. `chosen` holds, for top-k,
    the elements sent of each such tensor, counted from its beginning."""

    present: tuple[int, ...]
    flat: Any  # bytes; for top-k, the chosen values of all tensors one after another
    chosen: tuple[Any, ...] | None = None

    @property
    def size_bytes(self) -> int:
        chosen = sum(one.nbytes for one in self.chosen) if self.chosen is not None else 0
        return int(self.flat.nbytes + chosen)


class GradientPacker:
    """Packs one worker's gradients for one shard; keeps what top-k left out."""

    def __init__(self, compression: Compression, layout: Layout) -> None:
        self._compression = compression
        self._layout = compression.travel_layout(layout)
        self._left_out: dict[int, Any] = {}

    def pack(self, gradients: Mapping[str, Any]) -> PackedGradients:
        """Gradients by name; a parameter without one is not in the message."""
        dense: dict[int, Any] = {}
        for index, place in enumerate(self._layout.places):
            if (gradient := gradients.get(place.name)) is not None:
                detached = gradient.detach()
                is_dense = detached.layout == torch.strided
                dense[index] = detached if is_dense else detached.to_dense()
        if self._compression.kind == "top-k":
            return self._pack_largest(dense)
        device = next(iter(dense.values())).device if dense else "cpu"
        flat = torch.zeros(self._layout.size_bytes, dtype=torch.uint8, device=device)
        views = list(self._layout.views(flat).values())
        for index, gradient in dense.items():
            views[index].copy_(gradient)
        return PackedGradients(present=tuple(dense), flat=flat.cpu().numpy())

    def _pack_largest(self, dense: dict[int, Any]) -> PackedGradients:
        chosen, values = [], []
        for index, gradient in dense.items():
            total = gradient.reshape(-1).clone()
            if index in self._left_out:
                total += self._left_out[index]
            count = max(1, round(self._compression.share * total.numel())) if total.numel() else 0
            places = torch.topk(total.abs(), count, sorted=False).indices.sort().values
            picked = total[places]
            total[places] = 0
            self._left_out[index] = total
            chosen.append(places.to(torch.int32).cpu().numpy())
            values.append(picked.cpu().contiguous().view(torch.uint8).numpy())
        flat = np.concatenate(values) if values else np.zeros(0, np.uint8)
        return PackedGradients(present=tuple(dense), flat=flat, chosen=tuple(chosen))


def unpack(compression: Compression, layout: Layout, packed: PackedGradients) -> dict[str, Any]:
    """Gradients by name in the parameters' own types; parameters without one are left out."""
    if packed.chosen is not None:
        gradients, offset = {}, 0
        for index, chosen in zip(packed.present, packed.chosen, strict=True):
            place = layout.places[index]
            size = len(chosen) * place.dtype.itemsize
            total = torch.zeros(place.elements, dtype=place.dtype)
            if size:  # copied, because no value of this message begins at a multiple of its size
                part = bytearray(packed.flat[offset : offset + size])
                total[as_tensor(chosen).long()] = torch.frombuffer(part, dtype=place.dtype)
            gradients[place.name] = total.view(place.shape)
            offset += size
        return gradients
    travelled = compression.travel_layout(layout)
    views = list(travelled.views(as_tensor(packed.flat)).values())
    return {
        layout.places[index].name: views[index].to(layout.places[index].dtype)
        for index in packed.present
    }


def as_tensor(array: Any) -> Any:
    """Ray's store gives read-only arrays, and torch has no such tensors: nobody writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
