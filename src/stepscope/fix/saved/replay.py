"""Repeat operators when backward asks: what the pack hook leaves in the graph, prepared
calls, and copies of what a pass did not make.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.fix.saved.encodings import Encoded, Geometry
from stepscope.fix.saved.encodings.encoded import same_bits
from stepscope.fix.saved.norm_recompute import FUSED, NormInputs, normalised
from stepscope.fix.saved.operators import is_plain, plain_name, tensors_in

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
                decoded = self.encoded.holder()
        else:
            decoded = self.encoded.holder()
        return decoded if self.geometry is None else self.geometry.seen_on(decoded)


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """Where a tensor stood among the arguments: the how-manieth."""

    number: int


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """An operator with its arguments, without their tensors; `written` is the place of the argument
    that it changes, if it does. `again` is a cheaper way to have its result."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: int | None
    again: str | None = None
    quickest: list[Any] = field(default_factory=list)  # to call instead, once it was repeated

    @property
    def normalises(self) -> bool:
        return self.again is not None and self.again != FUSED

    @classmethod
    def of(
        cls, operator: Any, args: Any, kwargs: dict[str, Any], written: int | None
    ) -> CallTemplate:
        places = map(ArgumentPlace, itertools.count())
        return cls(operator, _with_places(args, places), _with_places(kwargs, places), written)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Below autograd."""
        if self.normalises and self.again is not None:
            return normalised(self.again, NormInputs(*tensors))
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
        if self.quickest:
            return self.quickest[0](*args, **kwargs)
        function, result = quickest_call(self.operator, args, kwargs)
        self.quickest.append(function)
        return result


@dataclass(eq=False, slots=True)
class RepeatableCall:
    """One operator call of one forward pass. Its tensors are had from `inputs`; where there is a
    geometry, it is how the tensor lay in that storage."""

    template: CallTemplate
    inputs: tuple[KeptTensor | EncodedTensor | CallResult, ...]
    geometries: tuple[Geometry | None, ...]
    places: tuple[int, ...] = ()  # of the result's tensors: one for each new storage
    sizes: tuple[int, ...] = ()  # of these storages
    parents: tuple[RepeatableCall, ...] = ()  # `calls_among` the inputs
    users: int = 0
    left: int = 0  # users that have not read the results yet
    results: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self) -> None:
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


@dataclass(eq=False, slots=True)
class CallResult:
    """One result of a repeatable call, seen through `geometry`."""

    call: RepeatableCall
    slot: int
    geometry: Geometry

    def unpack(self) -> torch.Tensor:
        with _LOCK:
            call = self.call
            results = call.results
            if results is None:
                if _grad_enabled() or _autocast_enabled():
                    with _BelowAutograd(), _WithoutAutocast():
                        results = _compute(call)
                else:
                    results = _compute(call)
            call.was_read()
            return self.geometry.seen_on(results[self.slot])


def calls_among(inputs: Iterable[Any]) -> tuple[RepeatableCall, ...]:
    """Each once."""
    calls = [one.call for one in inputs if type(one) is CallResult]
    return tuple(dict.fromkeys(calls)) if len(calls) > 1 else tuple(calls)


def _compute(target: RepeatableCall) -> tuple[torch.Tensor, ...]:
    """Run what is missing, inputs first; without recursion, as chains can be long. Results that
    nobody reads any more go at once: a chain is not there as a whole."""
    computed: dict[RepeatableCall, tuple[torch.Tensor, ...]] = {}
    fusions: dict[RepeatableCall, _Fusion | None] = {}
    waiting = [target]
    while waiting:
        call = waiting[-1]
        if call.results is not None:
            computed[call] = call.results
        if call in computed:
            waiting.pop()
            continue
        if call not in fusions:
            fusions[call] = _fusion(call) if call.template.again == FUSED else None
        fused = fusions[call]
        parents = call.parents if fused is None else fused.parents
        missing = [parent for parent in parents if parent not in computed]
        if missing:
            waiting.extend(missing)
            continue
        if fused is None:
            computed[call] = call.results = _run(call, computed)
        else:
            computed[call] = call.results = _run_fused(call, fused, computed)
        for one in (call, *(() if fused is None else fused.absorbed)):
            for parent in one.parents:
                parent.was_read()
                if parent.results is None:
                    computed.pop(parent, None)
    return computed[target]


@dataclass(frozen=True, slots=True)
class _Fusion:
    """A norm with a sum and an activation behind it, of which only the last result is asked for."""

    norm: RepeatableCall
    absorbed: tuple[RepeatableCall, ...]  # with the norm: nobody else reads their results
    residual: KeptTensor | EncodedTensor | CallResult | None = None
    activation: str | None = None

    @property
    def parents(self) -> tuple[RepeatableCall, ...]:
        added = (self.residual.call,) if isinstance(self.residual, CallResult) else ()
        return (*self.norm.parents, *added)


def _fusion(call: RepeatableCall) -> _Fusion | None:
    """None where what it follows is there, or is read by others too."""
    inputs = call.inputs
    if len(inputs) == 1:
        before = _absorbable(inputs[0])
        if before is None:
            return None
        if before.template.normalises:
            return _Fusion(before, (before,), activation=_activation(call))
        summed = _fusion(before) if before.template.again == FUSED else None
        if summed is None or summed.activation is not None:
            return None
        absorbed = (*summed.absorbed, before)
        return replace(summed, absorbed=absorbed, activation=_activation(call))
    for one, other in (inputs, inputs[::-1]) if len(inputs) == 2 else ():
        norm = _absorbable(one)
        if norm is not None and norm.template.normalises:
            return _Fusion(norm, (norm,), residual=other)
    return None


def _activation(call: RepeatableCall) -> str:
    return plain_name(call.template.operator).rstrip("_")


def _absorbable(held: Any) -> RepeatableCall | None:
    """The call, if its result is neither there nor read by others."""
    if type(held) is not CallResult:
        return None
    call = held.call
    return call if call.results is None and call.left == 1 else None


def _run_fused(
    call: RepeatableCall,
    fused: _Fusion,
    computed: dict[RepeatableCall, tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    held = zip(fused.norm.inputs, fused.norm.geometries, strict=True)
    inputs = NormInputs(*(_input(one, geometry, computed) for one, geometry in held))
    residual = None if fused.residual is None else _input(fused.residual, None, computed)
    form = fused.norm.template.again
    assert form is not None
    made = normalised(form, inputs, residual=residual, activation=fused.activation)
    return _checked(call, (made,))


def _run(
    call: RepeatableCall, computed: dict[RepeatableCall, tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    held = zip(call.inputs, call.geometries, strict=True)
    made = call.template.run([_input(one, geometry, computed) for one, geometry in held])
    if isinstance(made, torch.Tensor) and len(call.places) == 1:
        results: tuple[torch.Tensor, ...] = (made,)
    else:
        listed = list(tensors_in(made))
        results = tuple(listed[place] for place in call.places)
    return _checked(call, results)


def _input(
    held: KeptTensor | EncodedTensor | CallResult,
    geometry: Geometry | None,
    computed: dict[RepeatableCall, tuple[torch.Tensor, ...]],
) -> torch.Tensor:
    if type(held) is CallResult:
        return (geometry or held.geometry).seen_on(computed[held.call][held.slot])
    tensor = held.unpack()
    return tensor if geometry is None else geometry.seen_on(tensor)


def _checked(call: RepeatableCall, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    for tensor, size_bytes in zip(results, call.sizes, strict=True):
        if tensor.untyped_storage().nbytes() != size_bytes:
            raise ReplayDiffersError(
                f"{call.template.operator} returned {tensor.untyped_storage().nbytes()} bytes "
                f"when it was repeated for backward, but {size_bytes} in forward. Please "
                "report this. saver.remove() turns recomputing off"
            )
    return results


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


# Repeated calls with as little Python as possible.
#
# An overload that is called from Python looks up its schema for every argument. Torch's own
# bindings (`torch.relu`) take half as long, and mostly end at the same overload. Whether they do is
# seen when a call is repeated for the first time: then it runs under a mode that notes what is
# dispatched.

_BINDINGS = (torch._C._VariableFunctions, torch._C._nn)


class _DispatchedCalls(TorchDispatchMode):  # type: ignore[misc]
    """Notes what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def quickest_call(operator: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """What to call from now on with arguments like these, and what it returned for them."""
    binding = _binding(operator)
    if binding is not None:
        try:
            with _DispatchedCalls() as seen:
                result = binding(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError):  # it takes other arguments
            return operator._op, operator(*args, **kwargs)
        if len(seen.calls) == 1 and _is_same((operator, args, kwargs), seen.calls[0]):
            return binding, result
    return operator._op, operator(*args, **kwargs)


def _binding(operator: Any) -> Callable[..., Any] | None:
    name = plain_name(operator)
    if operator.namespace != "aten" or name.endswith("_"):
        return None
    found = (getattr(module, name, None) for module in _BINDINGS)
    return next((binding for binding in found if binding is not None), None)


def _is_same(one: Any, other: Any) -> bool:
    """Tensors are compared by identity."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)


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
    """Of one pass: operators that read the same content share a copy."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, dict[Geometry, _KnownCopy]] = {}  # by storage

    def of(self, tensor: torch.Tensor) -> KeptTensor:
        """As the tensor is now."""
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
