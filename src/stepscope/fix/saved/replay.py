"""What the pack hook leaves in the graph, and how operators are repeated when backward asks.

A repeated call holds its inputs: kept tensors, encoded values, or other repeated calls. Everything
is freed by reference counts, as soon as autograd drops what it saved. Results that several nodes
need are computed once and held until the last of them has read them.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.saved.operators import is_plain, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.fix.saved.encodings import Encoded, Geometry

_LOCK = threading.RLock()  # a backward pass may run in several threads


_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python).add(
    torch._C.DispatchKey.PythonTLSSnapshot
)


class ChangedInPlaceError(RuntimeError):
    """As autograd's own error: a tensor that backward needs was changed in place."""


class ReplayDiffersError(RuntimeError):
    """A repeated operator returned something else than the first time."""


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that is held, without its history: that would be a circle."""

    tensor: torch.Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> KeptTensor:
        version = tensor._version if is_plain(tensor) else None
        return cls(_without_history(tensor), version)

    def unpack(self) -> torch.Tensor:
        """Under hooks autograd does not check versions itself."""
        if self.version is not None and self.tensor._version != self.version:
            shape = "x".join(map(str, self.tensor.shape)) or "scalar"
            raise ChangedInPlaceError(
                f"a tensor needed for backward ({shape}, {self.tensor.dtype}) was changed by an "
                f"in-place operation: it is at version {self.tensor._version}, expected "
                f"{self.version}. Call saver.remove() before training, or avoid the in-place change"
            )
        return self.tensor


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the same version counter. Inside a dispatch mode torch leaves out the layer that
    shares the counter, so it is switched on; modes need not see this."""
    if isinstance(tensor, torch.nn.Parameter):
        return tensor  # has no history
    with _sharing_versions():
        return tensor.detach()


def on_storage(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Another view of a tensor's storage, with the same version counter."""
    with torch.no_grad(), _sharing_versions():
        return geometry.on(tensor.detach())


def _sharing_versions() -> Any:
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    layers = excluded.remove(torch._C.DispatchKey.ADInplaceOrView) | _MODES
    return torch._C._ForceDispatchKeyGuard(included, layers)


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """`geometry` is the tensor's place in the decoded storage; None: the result as it is."""

    encoded: Encoded
    geometry: Geometry | None

    def unpack(self) -> torch.Tensor:
        with _as_recorded():
            decoded = self.encoded.decode()
            return decoded if self.geometry is None else self.geometry.on(decoded)


@dataclass(eq=False, slots=True)
class RepeatableCall:
    """One operator call of one forward pass. `args` hold KeptTensor, EncodedTensor or CallResult
    where tensors stood; `written` is the place of the argument that it changes, if it does."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: int | None
    places: tuple[int, ...] = ()  # of the result's tensors: one for each new storage
    sizes: tuple[int, ...] = ()  # of these storages
    users: int = 0
    left: int = 0  # users that have not read the results yet
    results: tuple[torch.Tensor, ...] | None = None
    parents: tuple[RepeatableCall, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        links = [link for link in leaves([self.args, self.kwargs]) if isinstance(link, CallResult)]
        self.parents = tuple(dict.fromkeys(link.call for link in links))
        for parent in self.parents:
            parent.add_user()

    def add_user(self) -> None:
        self.users += 1
        self.left += 1

    def was_read(self) -> None:
        """After the last user the results go; another backward pass starts over."""
        self.left -= 1
        if self.left <= 0:
            self.results, self.left = None, self.users


@dataclass(frozen=True, slots=True)
class CallResult:
    """One result of a repeatable call, seen through `geometry`."""

    call: RepeatableCall
    slot: int
    geometry: Geometry

    def unpack(self) -> torch.Tensor:
        with _LOCK, _as_recorded():
            computed = _compute(self.call)
            holder = computed[self.call][self.slot]
            self.call.was_read()
            return self.geometry.on(holder)


def _compute(target: RepeatableCall) -> dict[RepeatableCall, tuple[torch.Tensor, ...]]:
    """Run what is missing, inputs first; without recursion, as chains can be long."""
    computed: dict[RepeatableCall, tuple[torch.Tensor, ...]] = {}
    waiting = [target]
    while waiting:
        call = waiting[-1]
        if call not in computed and call.results is not None:
            computed[call] = call.results
        if call in computed:
            waiting.pop()
            continue
        missing = [parent for parent in call.parents if parent not in computed]
        if missing:
            waiting.extend(missing)
            continue
        computed[call] = call.results = _run(call, computed)
        for parent in call.parents:
            parent.was_read()
    return computed


def _run(
    call: RepeatableCall, computed: dict[RepeatableCall, tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    def tensor_of(held: Any) -> Any:
        if isinstance(held, CallResult):
            return held.geometry.on(computed[held.call][held.slot])
        return held.unpack()

    args = list(with_tensors(call.args, tensor_of))
    kwargs = with_tensors(call.kwargs, tensor_of)
    if call.written is not None:
        args[call.written] = _private_copy(args[call.written])
    made = list(tensors_in(call.operator(*args, **kwargs)))
    results = tuple(made[place] for place in call.places)
    sizes = tuple(tensor.untyped_storage().nbytes() for tensor in results)
    if sizes != call.sizes:
        raise ReplayDiffersError(
            f"{call.operator} returned {sizes} bytes when it was repeated for backward, "
            f"{call.sizes} in forward. Please report this; saver.remove() turns recomputing off"
        )
    return results


def _private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage is copied: what is changed may be a part of it."""
    storage = tensor.untyped_storage().clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(
        storage,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )


@contextmanager
def _as_recorded() -> Iterator[None]:
    """Operators were recorded below autograd and autocast, and are repeated there."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for element in value:
            yield from leaves(element)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def with_tensors(value: Any, tensor_of: Any) -> Any:
    """The arguments again, with tensors where they are held."""
    if isinstance(value, (KeptTensor, EncodedTensor, CallResult)):
        return tensor_of(value)
    if isinstance(value, (tuple, list)):
        return type(value)(with_tensors(element, tensor_of) for element in value)
    if isinstance(value, dict):
        return {name: with_tensors(element, tensor_of) for name, element in value.items()}
    return value
