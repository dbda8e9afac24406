"""Carry out a plan in one forward pass, with every operator watched and a hook on what
autograd saves.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
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
)
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
)
from stepscope.fix.saved.save_plan import ENCODE, RECOMPUTE, PlannedRepeat, SavePlan
from stepscope.fix.saved.step_record import described

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
    kept: dict[int, dict[int, str | None]]  # results by operator and slot: how they are encoded

    @classmethod
    def of(cls, plan: SavePlan) -> FollowedPlan:
        kept: dict[int, dict[int, str | None]] = {}
        for result in plan.results:
            kept.setdefault(result.operator, {})[result.slot] = result.encoding
        return cls(plan, {call.operator: call for call in plan.repeated}, kept)


@dataclass(slots=True)
class _MadeAgain:
    """A storage that a repeatable call filled."""

    call: RepeatableCall
    slot: int
    version: int
    alive: StorageWeakRef  # as long as it is held, no other storage gets this address


@dataclass(slots=True)
class _ToEncode:
    """A storage whose content is encoded when it is first asked for."""

    encoding: str
    version: int
    alive: StorageWeakRef
    tensor_geometry: Geometry
    encoded: Encoded | None = None


@dataclass(slots=True)
class PassReport:
    """The account of one pass; bytes are counted once a storage, without parameters."""

    deviation: str | None = None
    failure: Exception | None = None  # of ours: the rest of the pass was kept
    held_bytes: int = 0
    uncaptured: set[str] = field(default_factory=set)  # encodings that a CUDA graph cannot hold
    held: list[Held] = field(default_factory=list)


def unpack_held(held: Held) -> torch.Tensor:
    return held.unpack()


class PlanFollower(TorchDispatchMode):  # type: ignore[misc]
    """Active during one forward pass, together with its pack hook."""

    def __init__(self, followed: FollowedPlan, owned: frozenset[int] | None = None) -> None:
        """`owned` are the model's own storages; None: what is held is not counted."""
        super().__init__()
        self.report = PassReport()
        self._followed = followed
        self._operators = followed.plan.operators
        self._uses = followed.plan.uses
        self._owned = owned
        self._ordinal = 0
        self._packed = 0
        self._busy = False
        self._made_again: dict[int, _MadeAgain] = {}
        self._to_encode: dict[int, _ToEncode] = {}
        self._copies = PrivateCopies()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch would run compiled functions as they are written, for good."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, and asks it at every operator."""
        return False

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
        call = self._repeatable(func, args, kwargs) if repeats else None
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

    def _repeatable(self, func: Any, args: Any, kwargs: dict[str, Any]) -> RepeatableCall | None:
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
        return RepeatableCall(template, tuple(held))

    def _start(self, tensor: torch.Tensor, *, is_copy: bool | None) -> Held:
        """Return what a kept argument is taken from in backward."""
        if is_copy or (is_copy is None and tensor.grad_fn is None):
            return self._copies.of(tensor)
        return self._encoded(tensor) or KeptTensor.to_start_from(tensor)

    def _register(
        self,
        call: RepeatableCall,
        fresh: list[torch.Tensor],
        made: list[torch.Tensor],
        *,
        changed: bool,
        kept: Container[int],
    ) -> None:
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
        self._to_encode[storage._cdata] = _ToEncode(
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
        if known.encoded is None:
            if is_capturing():
                self.report.uncaptured.add(described(known.encoding))
            return None
        return EncodedTensor(known.encoded, Geometry.of(tensor))

    # what backward keeps

    def pack(self, tensor: torch.Tensor) -> Held:
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
        if self._owned is not None:
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
                again.call.add_user(again.slot)
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

    def finish(self, owned: frozenset[int] | None = None) -> PassReport:
        """The pass is over; what it holds is in the graph now. `owned` storages are the model's,
        too: FSDP may have gathered parameters that stay."""
        if self.report.deviation is None and self._ordinal != len(self._operators):
            ended, expected = self._ordinal, len(self._operators)
            self.report.deviation = f"the pass ended after {ended} of {expected} operators"
        if self._owned is not None:
            self._count_held(self._owned | (owned or _NOTHING))
        self._forget_all()
        return self.report

    def _count_held(self, owned: frozenset[int]) -> None:
        """Follow everything that the graph holds now, through repeatable calls."""
        report, sizes = self.report, dict[int, int]()
        waiting: list[Any] = list(report.held)
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
                if storage._cdata not in owned:
                    sizes[storage._cdata] = storage.nbytes()
        report.held_bytes = sum(sizes.values())
        report.held.clear()


def other_hooks_are_active() -> bool:
    """Whether somebody else's saved-tensor hooks, or ours of an outer model, are in place."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
