"""Repeat operators when backward asks: what the pack hook leaves in the graph, and copies of
what a pass did not make.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stepscope.fix.saved.encodings import Encoded, Geometry
from stepscope.fix.saved.encodings.encoded import same_bits
from stepscope.fix.saved.operators import is_plain, tensors_in

# A repeated call holds its inputs: kept tensors, encoded values, or other repeated calls.
# Everything is freed by reference counts, as soon as autograd drops what it saved. Results that
# several nodes need are computed once and held until the last of them has read them.

_LOCK = threading.RLock()  # a backward pass may run in several threads
# Operators were recorded below autograd and autocast, and are repeated there.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_WithoutAutocast = torch._C._DisableAutocast
# Backward mostly runs with neither: then operators end at the same kernels without guards.
_grad_enabled = torch.is_grad_enabled
_autocast_enabled = torch._C._is_any_autocast_enabled

_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python).add(
    torch._C.DispatchKey.PythonTLSSnapshot
)


class ChangedInPlaceError(RuntimeError):
    """As autograd's own error: a tensor that backward needs was changed in place."""


class ReplayDiffersError(RuntimeError):
    """A repeated operator returned something else than the first time."""


@dataclass(eq=False, slots=True)  # thousands are made in a pass: frozen ones take twice as long
class KeptTensor:
    """A tensor that is held, without its history: that would be a circle."""

    tensor: torch.Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> KeptTensor:
        """As autograd itself keeps it. A leaf is held itself: whoever assigns to its `data` changes
        what backward reads, with autograd's own way of keeping as well."""
        version = tensor._version if is_plain(tensor) else None
        return cls(tensor if tensor.is_leaf else _without_history(tensor), version)

    @classmethod
    def to_start_from(cls, tensor: torch.Tensor) -> KeptTensor:
        """Its memory of now, which an assignment to `data` leaves as it is."""
        return cls(_without_history(tensor), tensor._version)

    def unpack(self) -> torch.Tensor:
        """Under hooks autograd does not check versions itself."""
        if self.version is not None and self.tensor._version != self.version:
            shape = "x".join(map(str, self.tensor.shape)) or "scalar"
            raise ChangedInPlaceError(
                f"a tensor needed for backward ({shape}, {self.tensor.dtype}) was changed by "
                f"an in-place operation. It is at version {self.tensor._version}, but "
                f"{self.version} was expected. Call saver.remove() before training, or avoid "
                "the in-place change"
            )
        return self.tensor


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the same version counter. Inside a dispatch mode torch leaves out the layer that
    shares the counter, so it is switched on; modes need not see this."""
    with _sharing_versions():
        return tensor.detach()


def _sharing_versions() -> Any:
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    layers = excluded.remove(torch._C.DispatchKey.ADInplaceOrView) | _MODES
    return torch._C._ForceDispatchKeyGuard(included, layers)


@dataclass(eq=False, slots=True)
class EncodedTensor:
    """`geometry` is the tensor's place in the decoded storage; None: the result as it is."""

    encoded: Encoded
    geometry: Geometry | None

    def unpack(self) -> torch.Tensor:
        if _grad_enabled() or _autocast_enabled():
            with _BelowAutograd(), _WithoutAutocast():
                decoded = self.encoded.decode()
        else:
            decoded = self.encoded.decode()
        return decoded if self.geometry is None else self.geometry.seen_on(decoded)


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """Where a tensor stood among the arguments: the how-manieth."""

    number: int


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """An operator with its arguments, without their tensors; `written` is the place of the argument
    that it changes, if it does."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: int | None

    @classmethod
    def of(
        cls, operator: Any, args: Any, kwargs: dict[str, Any], written: int | None
    ) -> CallTemplate:
        places = map(ArgumentPlace, itertools.count())
        return cls(operator, _with_places(args, places), _with_places(kwargs, places), written)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Below autograd."""
        args = [
            tensors[one.number] if type(one) is ArgumentPlace else _filled(one, tensors)
            for one in self.args
        ]
        if self.written is not None:
            # The whole storage is copied: what is changed may be a part of it.
            tensor = args[self.written]
            storage = tensor.untyped_storage().clone()
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            args[self.written] = empty.set_(
                storage,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
        kwargs = _filled(self.kwargs, tensors) if self.kwargs else self.kwargs
        return self.operator(*args, **kwargs)


@dataclass(eq=False, slots=True)
class RepeatableCall:
    """One operator call of one forward pass. A slot is one of the storages that it fills; its
    result stays until all its users have read it, and another backward pass starts over."""

    template: CallTemplate
    inputs: tuple[KeptTensor | EncodedTensor | CallResult, ...]
    places: tuple[int, ...] = ()  # of the result's tensors: one for each slot
    sizes: tuple[int, ...] = ()  # of these storages
    sources: tuple[tuple[RepeatableCall, int], ...] = ()  # other calls' slots among the inputs
    users: dict[int, int] = field(default_factory=dict)  # by slot
    left: dict[int, int] = field(default_factory=dict)  # users that have not read it yet
    results: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        held = [(one.call, one.slot) for one in self.inputs if type(one) is CallResult]
        self.sources = tuple(dict.fromkeys(held)) if len(held) > 1 else tuple(held)
        for call, slot in self.sources:
            call.add_user(slot)

    def add_user(self, slot: int) -> None:
        self.users[slot] = self.users.get(slot, 0) + 1
        self.left[slot] = self.left.get(slot, 0) + 1

    def was_read(self, slot: int) -> None:
        self.left[slot] -= 1
        if self.left[slot] <= 0:
            self.results.pop(slot, None)
            if not any(left > 0 for left in self.left.values()):
                self.left = dict(self.users)

    def run(self, asked: int) -> None:
        """Its inputs are there; makes what is asked for, and what others have not read yet."""
        tensors = [
            held.geometry.seen_on(held.call.results[held.slot])
            if type(held) is CallResult
            else held.unpack()
            for held in self.inputs
        ]
        made = list(tensors_in(self.template.run(tensors)))
        if self.left.get(asked, 0) <= 0:
            self.left[asked] = self.users.get(asked, 1)
        for slot, place in enumerate(self.places):
            _check_size(self, made[place], self.sizes[slot])
            if self.left.get(slot, 0) > 0:
                self.results[slot] = made[place]
        for call, slot in self.sources:
            call.was_read(slot)


@dataclass(eq=False, slots=True)
class CallResult:
    """One result of a repeatable call, seen through `geometry`."""

    call: RepeatableCall
    slot: int
    geometry: Geometry

    def unpack(self) -> torch.Tensor:
        with _LOCK:
            call = self.call
            if self.slot not in call.results:
                if _grad_enabled() or _autocast_enabled():
                    with _BelowAutograd(), _WithoutAutocast():
                        _compute(call, self.slot)
                else:
                    _compute(call, self.slot)
            result = call.results[self.slot]
            call.was_read(self.slot)
            return self.geometry.seen_on(result)


def _compute(target: RepeatableCall, asked: int) -> None:
    """Run what is missing, inputs first; without recursion, as chains can be long."""
    waiting = [(target, asked)]
    while waiting:
        call, slot = waiting[-1]
        if slot in call.results:
            waiting.pop()
            continue
        missing = [source for source in call.sources if source[1] not in source[0].results]
        if missing:
            waiting.extend(missing)
        else:
            call.run(slot)


def _check_size(call: RepeatableCall, tensor: torch.Tensor, size_bytes: int) -> None:
    if tensor.untyped_storage().nbytes() != size_bytes:
        raise ReplayDiffersError(
            f"{call.template.operator} returned {tensor.untyped_storage().nbytes()} bytes "
            f"when it was repeated for backward, but {size_bytes} in forward. Please "
            "report this. saver.remove() turns recomputing off"
        )


def _with_places(value: Any, places: Iterator[ArgumentPlace]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(places)
    if isinstance(value, (tuple, list)):
        return type(value)(_with_places(element, places) for element in value)
    if isinstance(value, dict):
        return {name: _with_places(element, places) for name, element in value.items()}
    return value


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, ArgumentPlace):
        return tensors[value.number]
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(element, tensors) for element in value)
    if isinstance(value, dict):
        return {name: _filled(element, tensors) for name, element in value.items()}
    return value


# Copies of what a pass did not make, for operators that backward repeats.
#
# A buffer, a batch, a constant over a numpy array or a small weight may change between its use and
# backward, also where no version counter says so (`.data`, numpy, a second forward). Nothing else
# writes to a copy, so an operator that starts from one repeats what forward computed.

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
    """Share copies in one pass between operators that read the same content."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, dict[Geometry, _KnownCopy]] = {}  # by storage

    def of(self, tensor: torch.Tensor) -> KeptTensor:
        """Keep the tensor as it is now."""
        copies = self._known.setdefault(_address(tensor), {})
        geometry, version = Geometry.of(tensor), _version(tensor)
        known = copies.get(geometry)
        if known is not None and known.version == version and _is_unchanged(known.kept, tensor):
            return known.kept
        copy = private_copy(tensor)
        kept = KeptTensor(copy, copy._version)
        copies[geometry] = _KnownCopy(kept, version, StorageWeakRef(tensor.untyped_storage()))
        return kept

    def forget(self, written: torch.Tensor) -> None:
        self._known.pop(_address(written), None)

    def clear(self) -> None:
        self._known.clear()


def _is_unchanged(kept: KeptTensor, tensor: torch.Tensor) -> bool:
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
