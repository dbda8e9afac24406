"""Carry out a plan in one forward pass, with every operator watched and a hook on what
autograd saves.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.fix.saved.encodings import (
    Encoded,
    Geometry,
    encode_use,
    encode_value,
    is_outcome,
    offload,
)
from stepscope.fix.saved.norm_recompute import FUSED, form_here, needed_again
from stepscope.fix.saved.operators import (
    facts,
    is_capturing,
    is_plain,
    new_storages,
    repeatable_arguments,
    tensors_in,
    written_tensors,
)
from stepscope.fix.saved.replay import (
    CallResult,
    CallTemplate,
    EncodedTensor,
    KeptTensor,
    PrivateCopies,
    RepeatableCall,
    calls_among,
)
from stepscope.fix.saved.save_plan import ENCODE, RECOMPUTE, PlannedRepeat, SavePlan
from stepscope.fix.saved.step_record import OffloadPoints, described

# Operators are counted; those that the plan may repeat are held with their inputs, and the pack
# hook replaces what they made. Everything is looked up by storage and version in this very pass: a
# pass that differs from the recorded one keeps more, but never something wrong.

Held = KeptTensor | EncodedTensor | CallResult
_NOTHING = frozenset[int]()


@dataclass(frozen=True, slots=True)
class FollowedPlan:
    """A plan, ready to be looked up by ordinal."""

    plan: SavePlan
    repeated: dict[int, PlannedRepeat]
    again: dict[int, str | None]  # a cheaper way than the operator itself
    kept: dict[int, dict[int, str | None]]  # results by operator and slot: how they are encoded
    left_at: frozenset[int]  # saved tensors at which offloaded values have left the device
    fetch_at: frozenset[int]  # and at which others have to be fetched
    tried_again: set[int] = field(default_factory=set)  # operators: their way was tried here

    @classmethod
    def of(cls, plan: SavePlan) -> FollowedPlan:
        kept: dict[int, dict[int, str | None]] = {}
        for result in plan.results:
            kept.setdefault(result.operator, {})[result.slot] = result.encoding
        repeated = {call.operator: call for call in plan.repeated}
        points = [OffloadPoints.of(result.encoding) for result in plan.results]
        left_at = frozenset(one.left_at for one in points if one is not None)
        fetch_at = frozenset(one.fetch_at for one in points if one is not None)
        again = {call.operator: call.again for call in plan.repeated}
        return cls(plan, repeated, again, kept, left_at, fetch_at)

    def at_point(self, number: int, held: Any) -> Any:
        """What the graph holds of a saved tensor, after copies to host memory were seen to."""
        if number in self.left_at:
            offload.packed(number)
        return offload.FetchPoint(number, held) if number in self.fetch_at else held


@dataclass(slots=True)
class _MadeAgain:
    """A storage that a repeatable call filled."""

    call: RepeatableCall
    slot: int
    version: int
    alive: StorageWeakRef  # as long as it is held, no other storage gets this address


@dataclass(slots=True)
class ToEncode:
    """A storage whose content is encoded when it is first asked for."""

    encoding: str
    version: int
    alive: StorageWeakRef
    tensor_geometry: Geometry
    encoded: Encoded | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, encoding: str, geometry: Geometry) -> ToEncode:
        alive = StorageWeakRef(tensor.untyped_storage())
        return cls(encoding, tensor._version, alive, geometry)


@dataclass(slots=True)
class PassReport:
    """What one pass did; bytes are counted once a storage, without parameters."""

    deviation: str | None = None
    failure: Exception | None = None  # of ours: the rest of the pass was kept
    held_bytes: int = 0
    recomputed: int = 0
    encoded: int = 0
    kept: int = 0
    uncaptured: set[str] = field(default_factory=set)  # encodings that a CUDA graph cannot hold
    held: list[Held] = field(default_factory=list)


def unpack_held(held: Held) -> torch.Tensor:
    return held.unpack()


class PlanFollower(TorchDispatchMode):  # type: ignore[misc]
    """Active during one forward pass, together with its pack hook."""

    def __init__(self, followed: FollowedPlan, owned: frozenset[int], *, count: bool) -> None:
        super().__init__()
        self.report = PassReport()
        self._followed = followed
        self._operators = followed.plan.operators
        self._uses = followed.plan.uses
        self._owned = owned
        self._count = count
        self._ordinal = 0
        self._packed = 0
        self._busy = False
        self._made_again: dict[int, _MadeAgain] = {}
        self._to_encode: dict[int, ToEncode] = {}
        self._copies = PrivateCopies()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch would run compiled functions as they are written, for good."""
        return True

    # operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._busy or self.report.deviation is not None:
            return result
        ordinal = self._ordinal
        self._ordinal += 1
        known = facts(func)
        if ordinal >= len(self._operators) or self._operators[ordinal] != known.name:
            expected = self._operators[ordinal] if ordinal < len(self._operators) else "the end"
            self._deviates(f"operator {ordinal} is {known.name}, {expected} was recorded")
            return result
        repeats = ordinal in self._followed.repeated
        if repeats or ordinal in self._followed.kept or known.written:
            self._busy = True
            try:
                self._follow(func, args, kwargs, result, repeats)
            except Exception as error:  # the training goes on without us
                self.fails(error)
            finally:
                self._busy = False
        return result

    def _follow(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, repeats: bool
    ) -> None:
        ordinal = self._ordinal - 1
        given, made = list(tensors_in([args, kwargs])), list(tensors_in(result))
        written = written_tensors(func, args, kwargs)
        if not all(map(is_plain, [*given, *made])):
            return
        call = self._repeatable(func, args, kwargs, result) if repeats else None
        for tensor in written:
            self._forget(tensor)
        fresh = new_storages(given, made, written)
        kept = self._followed.kept.get(ordinal, {})
        changed = bool(facts(func).written)
        if call is not None:
            self._register(call, fresh, made, changed=changed, kept=kept)
        for slot, encoding in kept.items():
            if slot < len(fresh) and encoding is not None:
                self._will_encode(fresh[slot], encoding, changed)

    def _repeatable(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any
    ) -> RepeatableCall | None:
        """Called before versions change: the inputs are as the operator saw them. None where an
        input that should be recomputed cannot be: it may be overwritten later."""
        args = repeatable_arguments(func, args)
        tensors = list(tensors_in([args, kwargs]))
        repeat = self._followed.repeated[self._ordinal - 1]
        copied = repeat.copied_inputs or (None,) * len(tensors)
        if not len(tensors) == len(repeat.recomputed_inputs) == len(copied):
            return None
        held: list[Held] = []
        for tensor, is_again, is_copy in zip(
            tensors, repeat.recomputed_inputs, copied, strict=True
        ):
            kept = self._again(tensor) if is_again else self._start(tensor, is_copy=is_copy)
            if kept is None:
                return None
            held.append(kept)
        written = facts(func).written
        template = CallTemplate.of(func, args, kwargs, written[0] if written else None)
        again = self._cheaper_way(func, args, result)
        if again is not None:
            template = replace(template, again=again)
            again_from = needed_again(func, args, result)
            held += [KeptTensor.to_start_from(tensor) for tensor in again_from]
        parents = calls_among(held)
        return RepeatableCall(template, tuple(held), (None,) * len(held), parents=parents)

    def _start(self, tensor: torch.Tensor, *, is_copy: bool | None) -> Held:
        """What a kept argument is taken from in backward."""
        if is_copy or (is_copy is None and tensor.grad_fn is None):
            return self._copies.of(tensor)
        return self._encoded(tensor) or KeptTensor.to_start_from(tensor)

    def _cheaper_way(self, func: Any, args: Any, result: Any) -> str | None:
        """As planned; of a norm, if it gives these values to the last bit."""
        followed, number = self._followed, self._ordinal - 1
        planned = followed.again.get(number)
        if planned is None or planned == FUSED or number in followed.tried_again:
            return planned
        followed.tried_again.add(number)
        followed.again[number] = form_here(planned, func, args, result)
        return followed.again[number]

    def _register(
        self,
        call: RepeatableCall,
        fresh: list[torch.Tensor],
        made: list[torch.Tensor],
        *,
        changed: bool,
        kept: Container[int],
    ) -> None:
        made = made[:1] if call.template.again is not None else made
        addresses = [tensor.untyped_storage()._cdata for tensor in made]
        places, sizes = [], []
        for slot, tensor in enumerate(fresh):
            storage = tensor.untyped_storage()
            if slot in kept or storage._cdata not in addresses:
                continue  # the latter are running statistics: not made again
            places.append(addresses.index(storage._cdata))
            sizes.append(storage.nbytes())
            # Autograd counts an in-place change after the operator returns to it.
            version = tensor._version + int(changed)
            again = _MadeAgain(call, len(places) - 1, version, StorageWeakRef(storage))
            self._made_again[storage._cdata] = again
        call.places, call.sizes = tuple(places), tuple(sizes)

    def _will_encode(self, tensor: torch.Tensor, encoding: str, changed: bool) -> None:
        storage = tensor.untyped_storage()
        self._to_encode[storage._cdata] = ToEncode(
            encoding,
            tensor._version + int(changed),
            StorageWeakRef(storage),
            Geometry.of(tensor),
        )

    def _forget(self, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage()._cdata
        self._made_again.pop(address, None)
        self._to_encode.pop(address, None)
        self._copies.forget(tensor)

    # what is held

    def _again(self, tensor: torch.Tensor) -> CallResult | None:
        known = self._made_again.get(tensor.untyped_storage()._cdata)
        if known is None or known.version != tensor._version:
            return None
        return CallResult(known.call, known.slot, Geometry.of(tensor))

    def _encoded(self, tensor: torch.Tensor) -> EncodedTensor | None:
        known = self._to_encode.get(tensor.untyped_storage()._cdata)
        if known is None or known.version != tensor._version:
            return None
        if known.tensor_geometry.dtype != tensor.dtype:
            return None
        if known.encoded is None:
            whole = known.tensor_geometry.on(tensor.detach())
            known.encoded = encode_value(known.encoding, whole)
            if known.encoded is not None and known.encoded.check is not None:
                known.encoded.check.keep_until_known(KeptTensor.of(tensor))
        if known.encoded is None:
            if is_capturing():
                self.report.uncaptured.add(described(known.encoding))
            return None
        return EncodedTensor(known.encoded, Geometry.of(tensor))

    # what backward keeps

    def pack(self, tensor: torch.Tensor) -> Any:
        number = self._packed
        return self._followed.at_point(number, self._held_for(tensor))

    def _held_for(self, tensor: torch.Tensor) -> Held:
        number, self._packed = self._packed, self._packed + 1
        self._busy = True
        try:
            held = self._pack(number, tensor)
        except Exception as error:  # the training goes on without us
            self.fails(error)
            held = None
        finally:
            self._busy = False
        held = held or KeptTensor.of(tensor)
        if self._count:
            self.report.held.append(held)
        return held

    def _pack(self, number: int, tensor: torch.Tensor) -> Held | None:
        if self.report.deviation is not None:
            return None
        use = self._uses[number] if number < len(self._uses) else None
        if use is None or not (
            use.after == self._ordinal
            and (use.shape is None or use.shape == tuple(tensor.shape))
            and use.dtype == str(tensor.dtype).removeprefix("torch.")
        ):
            self._deviates(
                f"saved tensor {number} ({tuple(tensor.shape)}, {tensor.dtype}) was not recorded"
            )
            return None
        if not is_plain(tensor):
            return None
        if use.action == RECOMPUTE:
            again = self._again(tensor)
            if again is not None and again.geometry.dtype == tensor.dtype:
                again.call.add_user()
                return again
        elif use.action == ENCODE and use.encoding and is_outcome(use.encoding):
            encoded = encode_use(use.encoding, tensor.detach())
            return None if encoded is None else EncodedTensor(encoded, None)
        elif use.action == ENCODE:
            return self._encoded(tensor)
        return None

    def fails(self, error: Exception) -> None:
        self.report.failure = error
        self._deviates("the plan could not be carried out")

    def _deviates(self, why: str) -> None:
        self.report.deviation = why
        self._forget_all()

    def _forget_all(self) -> None:
        self._made_again.clear()
        self._to_encode.clear()
        self._copies.clear()

    def finish(self, owned: frozenset[int] = _NOTHING) -> PassReport:
        """The pass is over; what it holds is in the graph now. `owned` storages are the model's,
        too: FSDP may have gathered parameters that stay."""
        self._owned |= owned
        if self.report.deviation is None and self._ordinal != len(self._operators):
            ended, expected = self._ordinal, len(self._operators)
            self.report.deviation = f"the pass ended after {ended} of {expected} operators"
        if self._count:
            self._count_held()
        self._forget_all()
        return self.report

    def _count_held(self) -> None:
        """Follow everything that the graph holds now, through repeatable calls."""
        report, sizes = self.report, dict[int, int]()
        waiting: list[Any] = list(report.held)
        for held in report.held:
            report.recomputed += isinstance(held, CallResult)
            report.encoded += isinstance(held, EncodedTensor)
            report.kept += isinstance(held, KeptTensor)
        met: set[int] = set()
        while waiting:
            held = waiting.pop()
            if isinstance(held, CallResult) and id(held.call) not in met:
                met.add(id(held.call))
                waiting.extend(held.call.inputs)
            elif isinstance(held, EncodedTensor):
                sizes[id(held.encoded)] = held.encoded.size_bytes
            elif isinstance(held, KeptTensor) and held.version is not None:
                storage = held.tensor.untyped_storage()
                if storage._cdata not in self._owned:
                    sizes[storage._cdata] = storage.nbytes()
        report.held_bytes = sum(sizes.values())
        report.held.clear()


# The hook that sees what autograd saves in this thread: put in place, taken away, put back.

_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_top = torch._C._autograd._top_saved_tensors_default_hooks
_THREAD = threading.local()  # `hook`: of the pass that is under way in this thread


class PackHook:
    """Of one pass. Where it rests, autograd saves tensors as if there were none.

    Thousands of small objects live from forward to backward: the collector would search all of them
    again and again, and find no garbage. It rests during the pass.
    """

    __slots__ = ("__weakref__", "_collects", "in_place")

    def __init__(self) -> None:
        self.in_place = False
        self._collects = False

    def begin(self) -> None:
        _THREAD.hook = weakref.ref(self)
        self._collects = gc.isenabled()
        gc.disable()

    def put(self, pack: Callable[[torch.Tensor], Any]) -> None:
        _push(pack, unpack_held)
        self.in_place = True

    def take_away(self) -> None:
        """Only where no other hook was put above it: by itself, or at the end."""
        if self.in_place:
            _pop()
            self.in_place = False

    def end(self) -> None:
        _THREAD.hook = None
        self.take_away()
        if self._collects:
            gc.enable()


def other_hooks_are_active() -> bool:
    return _top(False) is not None


def is_following() -> bool:
    """Whether a pass of this thread follows a plan, also where its hook rests."""
    reference = getattr(_THREAD, "hook", None)
    return reference is not None and reference() is not None
