"""Record one forward pass: operators below autograd, values, and what backward keeps."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.fix.saved import encodings
from stepscope.fix.saved.encodings import Geometry
from stepscope.fix.saved.encodings.encoded import same_bits
from stepscope.fix.saved.encodings.registry import EncodingTrials
from stepscope.fix.saved.operators import (
    OperatorClock,
    facts,
    is_plain,
    new_storages,
    plain_name,
    repeatable_arguments,
    tensors_in,
    written_tensors,
)
from stepscope.fix.saved.replay import KeptTensor, checked_weights, copied_bytes
from stepscope.fix.saved.step_record import (
    HoldingOption,
    RecordedCall,
    SavedUse,
    StepRecord,
    StepValue,
)

# Storages are followed by weak references: the recorded pass needs no more memory than a plain one.


@dataclass(frozen=True, slots=True)
class _RecordedTensor:
    """The mark that the pack hook leaves in the graph."""

    number: int
    kept: KeptTensor


class StepRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Active during one forward pass, together with its pack and unpack hooks."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        lossy: str | None = None,
        heavy: bool = False,
    ) -> None:
        super().__init__()
        self._heavy = heavy
        # By kind of operator: whether it gave the same bits when it was repeated.
        self._same_again: dict[tuple[Any, ...], torch.Tensor | None] = {}
        self._kinds: list[tuple[Any, ...]] = []  # of the operators
        self.failure: Exception | None = None  # of ours: the rest of the pass is not recorded
        parameters = list(model.parameters())
        held = [*parameters, *model.buffers()]
        plain = [tensor for tensor in held if is_plain(tensor)]
        owned = frozenset(tensor.untyped_storage()._cdata for tensor in plain)
        self._device = plain[0].device if plain else torch.device("cpu")
        self._values = RecordedValues(owned, checked_weights(parameters))
        self._calls: list[RecordedCall] = []
        self._uses: list[SavedUse] = []
        self._noise: set[int] = set()  # values that are 0 or one constant
        self._nodes: dict[int, Any] = {}
        self._clock = OperatorClock(self._device)
        self._trials = EncodingTrials(self._device, lossy)
        self._modules: list[str] = []
        self._handles: list[Any] = []
        self._busy = False
        self._met: list[_RecordedTensor] | None = None
        self._modules.append(type(model).__name__)
        for name, module in model.named_modules():
            if module is model:
                continue  # its hooks are running now
            entering = functools.partial(self._enter_module, name)
            self._handles.append(module.register_forward_pre_hook(entering, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave_module, always_call=True))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch would run compiled functions as they are written, for good."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, and asks it at every operator."""
        return False

    # modules

    def _enter_module(self, name: str, module: Any, args: Any) -> None:
        del module, args
        self._modules.append(name)

    def _leave_module(self, module: Any, args: Any, output: Any) -> None:
        del module, args, output
        self._modules.pop()

    @property
    def _module(self) -> str:
        return self._modules[-1]

    # operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._busy or self.failure is not None:
            return func(*args, **kwargs)
        self._clock.start()
        result = func(*args, **kwargs)
        self._clock.stop()
        self._busy = True
        try:
            self._note(func, args, kwargs, result)
        except Exception as error:  # the training goes on without us
            self.failure = error
        finally:
            self._busy = False
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        given = list(tensors_in([args, kwargs]))
        made = list(tensors_in(result))
        known = facts(func)
        refusal = known.refusal
        heavy = self._heavy and known.is_product
        if heavy:
            refusal = None
        if not all(map(is_plain, [*given, *made])):
            refusal = "not a plain tensor"
            given, made = [t for t in given if is_plain(t)], [t for t in made if is_plain(t)]
        if any(map(self._values.is_sharded, given)):
            refusal = refusal or "reads a sharded parameter"
        for tensor in given:
            if tensor.grad_fn is not None:
                self._nodes[id(tensor.grad_fn)] = tensor.grad_fn
        written = [t for t in written_tensors(func, args, kwargs) if is_plain(t)]
        fresh = new_storages(given, made, written)
        read = [t for t in tensors_in([repeatable_arguments(func, args), kwargs]) if is_plain(t)]
        copied = [self._is_copied(tensor, written) for tensor in read] if refusal is None else []
        if any(one and copied_bytes(t) is None for t, one in zip(read, copied, strict=False)):
            refusal = "reads a part of what the pass did not make"
        kind = (func, tuple(map(_layout, given)), _numbers(args), _numbers(kwargs))
        self._kinds.append(kind)
        if refusal is None and fresh and kind not in self._same_again:
            self._same_again[kind] = self._repeats(func, args, kwargs, result)
        inputs = tuple(
            self._values.copy_of(tensor)
            if refusal is None and copied[place]
            else self._values.of(tensor)
            for place, tensor in enumerate(read)
        )
        outputs = tuple(
            self._values.add(tensor, len(self._calls), self._module) for tensor in fresh
        )
        self._find_encodings(func, args, inputs, outputs, made)
        self._calls.append(
            RecordedCall(
                name=str(func),
                inputs=inputs,
                outputs=outputs,
                took_ns=0,
                refusal=refusal,
                heavy=heavy and refusal is None,
            )
        )

    def _is_copied(self, tensor: torch.Tensor, written: list[torch.Tensor]) -> bool:
        """Of an argument that the operator writes to, there is no copy: it was another before."""
        storages = {one.untyped_storage()._cdata for one in written}
        in_place = tensor.untyped_storage()._cdata in storages
        return not in_place and self._values.must_be_copied(tensor)

    def _repeats(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any
    ) -> torch.Tensor | None:
        """Run it once more: libraries may choose otherwise each time. `finish` asks for the answer,
        which comes from the device. An operator that writes to its argument can not be tried."""
        yes = torch.ones((), dtype=torch.bool)
        if facts(func).written:
            return yes
        try:
            with torch.no_grad():
                again = list(tensors_in(func(*repeatable_arguments(func, args), **kwargs)))
        except torch.OutOfMemoryError:
            return None
        first = list(tensors_in(result))
        if [_layout(one) for one in again] != [_layout(one) for one in first]:
            return None
        pairs = zip(again, first, strict=True)
        same = [same_bits(one.flatten(), other.detach().flatten()) for one, other in pairs]
        return torch.stack(same).all() if same else yes

    def _find_encodings(
        self,
        func: Any,
        args: Any,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        made: list[torch.Tensor],
    ) -> None:
        name = plain_name(func)
        tensors = {tensor.untyped_storage()._cdata: tensor for tensor in made}
        by_value = {self._values.of(tensor): tensor for tensor in tensors.values()}
        for value in outputs:
            if value in by_value and by_value[value].dtype == torch.bool:
                self._trials.try_value(value, "bits", by_value[value])
        window = encodings.pooling_spec(name, args)
        if window is not None and len(outputs) == 2:
            self._trials.try_value(outputs[1], window, made[1])
        elif self._makes_noise(name, args, inputs) and len(outputs) == 1:
            tensor = args[0]
            whole = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
            if whole and tensor.is_floating_point():
                self._noise.add(outputs[0])
                self._trials.try_value(outputs[0], "two-valued", tensor)

    def _makes_noise(self, name: str, args: Any, inputs: tuple[int, ...]) -> bool:
        """A dropout's mask, as torch composes it: bernoulli_, then div_ by a positive number."""
        if name == "bernoulli_":
            return not isinstance(args[1] if len(args) > 1 else None, torch.Tensor)
        if name not in ("div_", "mul_") or len(args) < 2:
            return False
        return bool(inputs) and inputs[0] in self._noise and _is_positive(args[1])

    # what backward keeps

    def pack(self, tensor: torch.Tensor) -> _RecordedTensor:
        kept = KeptTensor.of(tensor)
        if self.failure is None:
            try:
                self._note_use(tensor)
            except Exception as error:  # the training goes on without us
                self.failure = error
        return _RecordedTensor(len(self._uses) - 1, kept)

    def _note_use(self, tensor: torch.Tensor) -> None:
        self._busy = True
        try:
            value = self._values.of(tensor) if is_plain(tensor) else None
            if value is not None and self._values.records[value].producer is not None:
                self._trials.try_content(value, tensor)
            self._uses.append(
                SavedUse(
                    value=value,
                    after=len(self._calls),
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    consumer="",
                    order=None,
                )
            )
        finally:
            self._busy = False

    def unpack(self, recorded: _RecordedTensor) -> torch.Tensor:
        if self._met is not None:
            self._met.append(recorded)
        return recorded.kept.unpack()

    def detach(self) -> None:
        """The pass is over, or failed: leave the modules as they were."""
        for handle in self._handles:
            handle.remove()

    def finish(self, output: Any) -> StepRecord:
        """After the pass, still before backward; the graph says which node keeps what."""
        roots = [tensor.grad_fn for tensor in tensors_in(output)] + list(self._nodes.values())
        self._read_graph(node for node in roots if node is not None)
        self._nodes.clear()
        returned = [self._values.of(tensor) for tensor in tensors_in(output) if is_plain(tensor)]
        calls = list(self._proven_calls(returned))
        return StepRecord(
            operators=tuple(calls),
            values=tuple(self._values.with_options(self._trials.options(self._uses, calls))),
            uses=tuple(self._uses),
            outputs=tuple(dict.fromkeys(returned)),
            on_host=self._device.type == "cpu",
        )

    def _proven_calls(self, returned: list[int]) -> Iterator[RecordedCall]:
        """What the pass returns is the caller's, who may change it before backward: autograd allows
        that for what it does not keep itself."""
        unguarded = set(returned) - {use.value for use in self._uses}
        same = {kind: one is not None and bool(one) for kind, one in self._same_again.items()}
        for kind, call in zip(self._kinds, self._timed_calls(), strict=True):
            if call.refusal is None and not same.get(kind, True):
                yield replace(call, refusal="differs when it is repeated")
            elif call.refusal is None and not unguarded.isdisjoint(call.inputs):
                yield replace(call, refusal="reads what the pass returns")
            else:
                yield call

    def _timed_calls(self) -> list[RecordedCall]:
        """Operators of one kind and size took as long as the median of them: layers are alike."""
        measured = defaultdict[tuple[Any, ...], list[int]](list)
        for kind, took_ns in zip(self._kinds, self._clock.took_ns(), strict=True):
            measured[kind].append(took_ns)
        typical = {kind: round(median(times)) for kind, times in measured.items()}
        return [
            replace(call, took_ns=typical[kind])
            for kind, call in zip(self._kinds, self._calls, strict=True)
        ]

    def _read_graph(self, roots: Iterable[Any]) -> None:
        waiting, met = list(roots), {}
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in met:
                continue
            met[id(node)] = node
            waiting.extend(following for following, _ in node.next_functions)
            self._open(node)

    def _open(self, node: Any) -> None:
        """Reading a saved field calls the unpack hook, which says which use it is."""
        custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        kind: Any = type(node)
        fields = ("saved_tensors",) if custom else _saved_fields(kind)
        self._met = []
        for name in fields:
            try:
                getattr(node, name)
            except RuntimeError:  # freed, or changed in place: backward itself reports it
                continue
        for recorded in self._met:
            if isinstance(recorded, _RecordedTensor):
                use = self._uses[recorded.number]
                consumer = str(node.name())
                self._uses[recorded.number] = replace(
                    use,
                    consumer=consumer,
                    order=int(node._sequence_nr()),
                    options=self._options_for(node, use),
                )
        self._met = None

    def _options_for(self, node: Any, use: SavedUse) -> tuple[HoldingOption, ...]:
        """Return encodings that are enough for this node."""
        dtype = getattr(torch, use.dtype)
        spec = encodings.outcome_for(node, dtype)
        if spec is None:
            return ()
        count = math.prod(use.shape)
        held_bytes = encodings.outcome_bytes(spec, count)
        cost_ns = self._trials.use_cost_ns(spec, dtype, count)
        return (HoldingOption(encoding=spec, held_bytes=held_bytes, cost_ns=cost_ns),)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()


def _numbers(value: Any) -> Any:
    """Arguments without their tensors, to compare."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_numbers, value))
    if isinstance(value, dict):
        return tuple((name, _numbers(one)) for name, one in value.items())
    return None if isinstance(value, torch.Tensor) else repr(value)


def _is_positive(factor: Any) -> bool:
    """Also of a number that torch wrapped as a tensor without dimensions."""
    if isinstance(factor, torch.Tensor):
        return factor.device.type == "cpu" and factor.dim() == 0 and bool(factor > 0)
    return isinstance(factor, (int, float)) and factor > 0


@functools.cache
def _saved_fields(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


# Which content each storage of a recorded pass holds, and what operators may start from.


@dataclass(slots=True)
class RecordedValues:
    """Which value each storage holds now."""

    owned: frozenset[int]
    checked: set[int]  # of weights that operators start from without a copy
    records: list[StepValue] = field(default_factory=list)
    current: dict[int, int] = field(default_factory=dict)
    references: list[StorageWeakRef] = field(default_factory=list)  # keep addresses unique
    copies: dict[tuple[int, Geometry], int] = field(default_factory=dict)  # of a value's views
    given: set[int] = field(default_factory=set)  # storages that were there before the pass

    def of(self, tensor: torch.Tensor) -> int:
        known = self.current.get(tensor.untyped_storage()._cdata)
        known = self.add(tensor, None, "") if known is None else known
        if isinstance(tensor, torch.nn.Parameter) and not self.records[known].owned:
            self.records[known] = replace(self.records[known], owned=True)  # gathered by FSDP
        return known

    def add(self, tensor: torch.Tensor, producer: int | None, module: str) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        before = self.current.get(address)
        if before is None:
            self.references.append(StorageWeakRef(storage))
            number = len(self.references)
            if producer is None:
                self.given.add(number)
        else:
            self.records[before] = replace(self.records[before], overwritten=True)
            number = self.records[before].storage
            self.checked.discard(address)
        self.current[address] = len(self.records)
        self.records.append(
            StepValue(
                storage=number,
                size_bytes=storage.nbytes(),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                module=module,
                producer=producer,
                owned=address in self.owned,
                overwritten=False,
            )
        )
        return len(self.records) - 1

    def must_be_copied(self, tensor: torch.Tensor) -> bool:
        """Whether it may change until backward: the pass did not make it, and it is no weight that
        only an optimizer changes."""
        is_given = self.records[self.of(tensor)].storage in self.given
        return is_given and tensor.untyped_storage()._cdata not in self.checked

    def copy_of(self, tensor: torch.Tensor) -> int:
        """Return what followers start from instead."""
        value, geometry = self.of(tensor), Geometry.of(tensor)
        known = self.copies.get((value, geometry))
        if known is not None:
            return known
        self.references.append(StorageWeakRef(tensor.untyped_storage()))
        copy = replace(
            self.records[value],
            storage=len(self.references),
            size_bytes=copied_bytes(tensor) or 0,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            producer=None,
            owned=False,
            overwritten=False,
            copied=True,
        )
        self.copies[value, geometry] = len(self.records)
        self.records.append(copy)
        return self.copies[value, geometry]

    def with_options(self, options: dict[int, tuple[HoldingOption, ...]]) -> list[StepValue]:
        return [
            replace(record, options=options.get(number, ()))
            for number, record in enumerate(self.records)
        ]

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """A parameter that is only there during the pass: FSDP may free it before backward asks."""
        unknown = isinstance(tensor, torch.nn.Parameter) and tensor.numel() > 0
        return unknown and tensor.untyped_storage()._cdata not in self.owned
