"""Carries out a pinned plan: the pack hook does the work, operators run as they are.

A saved tensor is given up only when autograd's nodes prove that it is made as in the pass that was
pinned, from values that are held by then; until then it is kept. Where nodes cannot prove it, the
operators of one module are watched.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.saved.encodings import Geometry
from stepscope.fix.saved.follower import Held, PassReport, PlanFollower, ToEncode
from stepscope.fix.saved.node_patterns import below_views, nodes_made
from stepscope.fix.saved.operators import is_plain, tensors_in
from stepscope.fix.saved.pinned_plan import (
    ComputedArgument,
    OwnedArgument,
    PinnedCall,
    PinnedPlan,
    PinnedUse,
    Proof,
    SourceArgument,
    SourceKey,
    ValueEncoding,
)
from stepscope.fix.saved.replay import (
    CallResult,
    EncodedTensor,
    KeptTensor,
    RepeatableCall,
)
from stepscope.fix.saved.save_plan import KEEP, RECOMPUTE

if TYPE_CHECKING:
    from stepscope.fix.saved.pinned_plan import ModuleCall


_NOTHING = frozenset[int]()
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class _SourceMissingError(Exception):
    """What a call starts from has not been seen yet in this pass."""

    def __init__(self, source: SourceKey) -> None:
        super().__init__(source)
        self.source = source


class _DiffersError(Exception):
    """The pass is not like the pinned one."""


@dataclass(slots=True)
class PackedUse:
    """What the graph holds, until it may be replaced by less."""

    held: Held

    def unpack(self) -> torch.Tensor:
        return self.held.unpack()


@dataclass(frozen=True, slots=True)
class _Unproven:
    packed: PackedUse
    number: int
    tensor: torch.Tensor
    version: int


class PinnedFollower(PlanFollower):
    """Active during one forward pass."""

    def __init__(self, pinned: PinnedPlan, owned: frozenset[int], *, count: bool) -> None:
        super().__init__(pinned.followed, owned, count=count)
        self._pinned = pinned
        self._offloads = bool(pinned.followed.fetch_at)
        self._first = nodes_made()
        self._like: set[int] = set()  # nodes that are like their patterns
        self._sources: dict[SourceKey, Held] = {}
        self._calls: dict[int, RepeatableCall] = {}
        self._waiting: dict[SourceKey, list[_Unproven]] = defaultdict(list)
        self._unproven: dict[int, list[_Unproven]] = defaultdict(list)
        self._module_calls: dict[Any, int] = defaultdict(int)
        self._watching: list[ModuleCall] = []
        if not pinned.settings_hold():
            self._deviates("a norm's eps was changed")

    # saved tensors

    def pack(self, tensor: torch.Tensor) -> Any:
        number, self._packed = self._packed, self._packed + 1
        busy, self._busy = self._busy, True
        try:
            held = self._hold(number, tensor) if self.report.deviation is None else None
        except _DiffersError as difference:
            self._deviates(str(difference))
            held = None
        finally:
            self._busy = busy
        if held is None:
            held = self._kept(tensor)
        if self._count:
            self.report.held.append(held)
        return self._followed.at_point(number, held) if self._offloads else held

    def _hold(self, number: int, tensor: torch.Tensor) -> Any:
        uses = self._pinned.uses
        use = uses[number] if number < len(uses) else None
        if (
            use is None
            or nodes_made() - self._first != use.nodes_before
            or tensor.dtype is not use.dtype
            or tensor.shape != use.shape
        ):
            raise _DiffersError(
                f"saved tensor {number} ({tuple(tensor.shape)}, {tensor.dtype}) was not recorded"
            )
        held: Any = None
        if use.action != KEEP and is_plain(tensor):
            held = self._replaced(number, use, tensor)
        if use.proofs:
            self._prove(tensor.grad_fn, use.proofs)
        if use.source is not None:
            held = self._kept(tensor) if held is None else held
            self._add_source(use.source, tensor, held)
        return held

    def _kept(self, tensor: torch.Tensor) -> KeptTensor:
        """A node's own result must go without its history: that would be a circle."""
        if self._watching or type(tensor) not in _PLAIN:
            return KeptTensor.of(tensor)
        node = tensor.grad_fn
        if node is not None and node._sequence_nr() + 1 == nodes_made():
            return KeptTensor(tensor.detach(), tensor._version)
        return KeptTensor(tensor, tensor._version)

    def _replaced(self, number: int, use: PinnedUse, tensor: torch.Tensor) -> Any:
        node = tensor.grad_fn
        if use.proven_by_node is not None:
            if node is None or node._sequence_nr() - self._first != use.proven_by_node:
                packed = PackedUse(self._kept(tensor))
                unproven = _Unproven(packed, number, tensor, tensor._version)
                self._unproven[use.proven_by_node].append(unproven)
                return packed
            if not self._pinned.patterns[use.proven_by_node].is_like(node):
                raise _DiffersError(f"saved tensor {number} is made by {node.name()}")
        if use.action == RECOMPUTE:
            return self._recomputed(number, use, tensor)
        return self._encoded_use(number, tensor)

    def _encoded_use(self, number: int, tensor: torch.Tensor) -> Held | None:
        use = self._pinned.uses[number]
        if use.value_encoding is not None:
            self._expect_encoding(tensor, use.value_encoding)
        # As if operators had been counted; inside a watched module they are, and go on.
        counted, self._ordinal = self._ordinal, use.after
        held = self._pack(number, tensor)
        self._ordinal = counted
        if use.value_encoding is not None and use.value_encoding.encoding == "two-valued":
            # Only the content says that it is still a dropout's noise; no waiting for a GPU.
            if tensor.device.type != "cpu" or held is None:
                return None
            if not torch.equal(held.unpack(), tensor):
                raise _DiffersError(f"saved tensor {number} has more than two values")
        return held

    def _expect_encoding(self, tensor: torch.Tensor, how: ValueEncoding) -> None:
        address = tensor.untyped_storage()._cdata
        known = self._to_encode.get(address)
        if known is None or known.version != tensor._version:
            self._to_encode[address] = ToEncode.of(tensor, how.encoding, how.geometry)

    def _recomputed(self, number: int, use: PinnedUse, tensor: torch.Tensor) -> Any:
        again = PlanFollower._again(self, tensor) if self._made_again else None
        if again is not None:
            again.call.add_user()
            return again
        if use.computed is None:
            return None
        self._check_maker(tensor, use.computed[0])
        return self._linked(number, tensor, None)

    def _linked(self, number: int, tensor: torch.Tensor, packed: PackedUse | None) -> Any:
        """The call that makes it again; as long as something for it is missing, the tensor."""
        use = self._pinned.uses[number]
        computed, geometry = use.computed, use.geometry
        if computed is None or geometry is None:
            return None
        if tensor.stride() != geometry.stride or tensor.storage_offset() != geometry.offset:
            raise _DiffersError(f"saved tensor {number} lies in memory in another way")
        try:
            call = self._call(computed[0])
        except _SourceMissingError as missing:
            packed = packed or PackedUse(self._kept(tensor))
            unproven = _Unproven(packed, number, tensor, tensor._version)
            self._waiting[missing.source].append(unproven)
            return packed
        call.add_user()
        return CallResult(call, computed[1], geometry)

    # what nodes prove

    def _again(self, tensor: torch.Tensor) -> CallResult | None:
        """For calls of a watched module."""
        again = super()._again(tensor)
        node, output = below_views(tensor)
        if again is not None or node is None:
            return again
        number = node._sequence_nr() - self._first
        slot = self._pinned.slots.get((number, output))
        if slot is None:
            return None
        try:
            self._check_maker(tensor, number)
            return CallResult(self._call(number), slot, Geometry.of(tensor))
        except _SourceMissingError:
            return None
        except _DiffersError as difference:
            self._deviates(str(difference))
            return None

    def _check_maker(self, tensor: torch.Tensor, number: int) -> None:
        node, _ = below_views(tensor)
        if node is None or node._sequence_nr() - self._first != number:
            raise _DiffersError(f"another operator than {number} made a saved tensor")
        self._check_node(node, number)

    def _check_node(self, node: Any, number: int) -> None:
        """It and all before it, down to what is held, are as they were pinned."""
        patterns, first = self._pinned.patterns, self._first
        waiting = [(node, number)]
        while waiting:
            node, number = waiting.pop()
            if number in self._like:
                continue
            pattern = patterns.get(number)
            if pattern is None:
                continue  # of a value that is held
            following = node.next_functions
            if not pattern.is_like(node) or len(following) != len(pattern.edges):
                raise _DiffersError(f"node {number} is {node.name()}, {pattern.name} was recorded")
            for (before, output), edge in zip(following, pattern.edges, strict=True):
                if edge.made is not None and before is not None:
                    if before._sequence_nr() - first != edge.made or output != edge.output:
                        raise _DiffersError(f"node {number} has another input")
                    waiting.append((before, edge.made))
                elif edge.parameter is not None and before is not None:
                    if getattr(before, "variable", None) is not edge.parameter:
                        raise _DiffersError(f"node {number} has another parameter")
                elif before is not None or edge.made is not None or edge.parameter is not None:
                    raise _DiffersError(f"node {number} has another input")
            self._like.add(number)

    def _prove(self, node: Any, proofs: tuple[Proof, ...]) -> None:
        for proof in proofs:
            found = node
            for place in proof.path:
                edges = () if found is None else found.next_functions
                found = edges[place][0] if place < len(edges) else None
            if found is None or found._sequence_nr() - self._first != proof.node:
                raise _DiffersError(f"node {proof.node} was not met again")
            pattern = self._pinned.patterns[proof.node]
            if not pattern.is_like(found):
                raise _DiffersError(f"node {proof.node} is {found.name()}, not {pattern.name}")
            for unproven in self._unproven.pop(proof.node, ()):
                self._replace_proven(unproven, found, proof.node)

    def _replace_proven(self, unproven: _Unproven, node: Any, number: int) -> None:
        if unproven.tensor._version != unproven.version:
            return
        packed = unproven.packed
        if self._pinned.uses[unproven.number].action == RECOMPUTE:
            self._check_node(node, number)
            held = self._linked(unproven.number, unproven.tensor, packed)
        else:
            held = self._encoded_use(unproven.number, unproven.tensor)
        if held is not None and held is not packed:
            packed.held = held

    # calls and what they start from

    def _call(self, number: int) -> RepeatableCall:
        """Made when first needed, after those that it depends on."""
        waiting = [number]
        while waiting:
            current = waiting[-1]
            if current in self._calls:
                waiting.pop()
                continue
            pinned = self._pinned.calls[current]
            missing = [parent for parent in pinned.parents if parent not in self._calls]
            if missing:
                waiting.extend(missing)
                continue
            self._calls[current] = self._repeatable_call(pinned)
        return self._calls[number]

    def _repeatable_call(self, pinned: PinnedCall) -> RepeatableCall:
        inputs = tuple(map(self._input, pinned.arguments))
        return RepeatableCall(
            pinned.template, inputs, pinned.geometries, pinned.places, pinned.sizes
        )

    def _input(self, argument: SourceArgument | ComputedArgument | OwnedArgument) -> Held:
        if type(argument) is ComputedArgument:
            return CallResult(self._calls[argument.call], argument.slot, argument.geometry)
        if type(argument) is SourceArgument:
            held = self._sources.get(argument.source)
            if held is None:
                raise _SourceMissingError(argument.source)
            return held
        assert isinstance(argument, OwnedArgument)
        return KeptTensor(argument.tensor, argument.tensor._version)

    def _add_source(self, key: SourceKey, tensor: torch.Tensor, held: Any) -> None:
        if key in self._sources:
            return
        if key[0] != "use":
            node, output = below_views(tensor)
            if node is None or (node._sequence_nr() - self._first, output) != key:
                raise _DiffersError(f"another operator than {key[0]} made a saved tensor")
        if isinstance(held, PackedUse) or (isinstance(held, EncodedTensor) and not held.geometry):
            held = self._kept(tensor)  # what one consumer needs is not the value
        self._sources[key] = held
        for unproven in self._waiting.pop(key, ()):
            if unproven.tensor._version == unproven.version:
                held = self._linked(unproven.number, unproven.tensor, unproven.packed)
                if held is not unproven.packed:
                    unproven.packed.held = held

    # modules

    def enter_module(self, module: Any) -> None:
        call = (module, self._module_calls[module])
        ordinal = self._pinned.dispatched.get(call)
        if ordinal is not None and self.report.deviation is None and not self._watching:
            self._watching.append(call)
            self._ordinal = ordinal
            self.__enter__()

    def leave_module(self, module: Any, output: Any) -> None:
        """`output` is None where forward raised."""
        call = (module, self._module_calls[module])
        self._module_calls[module] += 1
        if self._watching and self._watching[-1] == call:
            self._watching.pop()
            self.__exit__(None, None, None)
        wanted = self._pinned.results.get(call)
        if wanted is None or self.report.deviation is not None:
            return
        tensors = list(tensors_in(output))
        busy, self._busy = self._busy, True
        try:
            for result in wanted:
                if result.place >= len(tensors):
                    raise _DiffersError(f"{type(module).__name__} returned fewer tensors")
                self._use_result(tensors[result.place], result.source, result.proofs)
        except _DiffersError as difference:
            self._deviates(str(difference))
        finally:
            self._busy = busy

    def _use_result(
        self, tensor: torch.Tensor, source: SourceKey | None, proofs: tuple[Proof, ...]
    ) -> None:
        with torch.no_grad():
            if proofs:
                self._prove(tensor.grad_fn, proofs)
            if source is not None:
                held = PlanFollower._again(self, tensor) if self._made_again else None
                self._add_source(source, tensor, held or self._kept(tensor))

    # the end

    def _deviates(self, why: str) -> None:
        super()._deviates(why)
        self._clear()

    def _clear(self) -> None:
        for table in (self._sources, self._calls, self._waiting, self._unproven):
            table.clear()

    def stop_watching(self) -> None:
        """Also in the middle of a module, where an interrupt ended the pass."""
        if self._watching:
            self._watching.clear()
            self.__exit__(None, None, None)

    def finish(self, owned: frozenset[int] = _NOTHING) -> PassReport:
        self.stop_watching()
        if self.report.deviation is None:
            made = nodes_made() - self._first
            if self._packed != len(self._pinned.uses) or made != self._pinned.nodes:
                self._deviates(
                    f"the pass ended with {self._packed} saved tensors, "
                    f"{len(self._pinned.uses)} were recorded"
                )
        self._ordinal = len(self._operators)
        self.report.held = [h.held if isinstance(h, PackedUse) else h for h in self.report.held]
        self._clear()
        return super().finish(owned)
