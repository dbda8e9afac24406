"""Carry out a pinned plan: the pack hook does the work, operators run as they are, and every
node is checked once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.saved.encodings import Geometry, encode_use, offload
from stepscope.fix.saved.follower import (
    Held,
    PackHook,
    PassReport,
    PlanFollower,
    ToEncode,
    other_hooks_are_active,
)
from stepscope.fix.saved.operators import is_plain, tensors_in
from stepscope.fix.saved.pinned_plan import (
    VIEW_NODES,
    ComputedArgument,
    NodePattern,
    OwnedArgument,
    PinnedPlan,
    PinnedUse,
    Proof,
    SourceArgument,
    SourceKey,
    below_views,
    nodes_made,
)
from stepscope.fix.saved.replay import (
    CallResult,
    EncodedTensor,
    KeptTensor,
    RepeatableCall,
    calls_among,
)
from stepscope.fix.saved.save_plan import KEEP, RECOMPUTE

if TYPE_CHECKING:
    from stepscope.fix.saved.plan_load import ModuleCall, PassPlace

# A saved tensor is given up only when autograd's nodes prove that it is made as in the pass that
# was pinned, from values that are held by then; until then it is kept. Where nodes cannot prove it,
# the operators of one module are watched. Where all is kept, the hook rests.

_NOTHING = frozenset[int]()
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class _SourceMissingError(Exception):
    """What a call starts from has not been seen yet in this pass."""

    def __init__(self, source: SourceKey) -> None:
        super().__init__(source)
        self.source = source


@dataclass(slots=True)
class PackedUse:
    """What the graph holds, until it may be replaced by less."""

    held: Held

    def unpack(self) -> torch.Tensor:
        return self.held.unpack()


@dataclass(eq=False, slots=True)
class _Unproven:
    packed: PackedUse
    number: int
    tensor: torch.Tensor
    version: int


class PinnedFollower(PlanFollower):
    """Active during one forward pass, from `start` to `stop`."""

    def __init__(self, pinned: PinnedPlan, owned: frozenset[int], *, count: bool) -> None:
        super().__init__(pinned.followed, owned, count=count)
        self._pinned = pinned
        self._offloads = bool(pinned.followed.fetch_at)
        self._first = nodes_made()
        self._nodes = NodeChecks(pinned.patterns, self._first)
        self._sources: dict[SourceKey, Held] = {}
        self._calls: dict[int, RepeatableCall] = {}
        self._waiting: dict[SourceKey, list[_Unproven]] = defaultdict(list)
        self._unproven: dict[int, list[_Unproven]] = defaultdict(list)
        self._module_entries: dict[Any, int] = defaultdict(int)
        self._module_exits: dict[Any, int] = defaultdict(int)
        self._watching: list[ModuleCall] = []
        self._hook = PackHook()
        self._pauses = pinned.pauses
        if not pinned.settings_hold():
            self._deviates("a norm's eps was changed")

    # the hook

    def start(self) -> None:
        self._hook.begin()
        if self.report.deviation is None and (self._count or not self._pauses.begins_paused):
            self._hook.put(self.pack)

    def stop(self) -> None:
        """Also in the middle of a module, where an interrupt ended the pass."""
        if self._watching:
            self._watching.clear()
            self.__exit__(None, None, None)
        self._hook.end()

    def _resume_at(self, place: PassPlace) -> None:
        """The number of nodes says whether the pass is where it should be."""
        if self.report.deviation is not None:
            return
        if nodes_made() - self._first != place.nodes:
            self._deviates("a module ran more or fewer operators than recorded")
        elif self._hook.in_place:
            if self._packed != place.uses:
                self._deviates("a module saved more or fewer tensors than recorded")
        elif other_hooks_are_active():
            self._deviates("other saved-tensor hooks are active than in the recorded pass")
        else:
            self._packed = place.uses
            self._hook.put(self.pack)

    # saved tensors

    def pack(self, tensor: torch.Tensor) -> Any:
        number, self._packed = self._packed, self._packed + 1
        busy, self._busy = self._busy, True
        try:
            held = self._hold(number, tensor) if self.report.deviation is None else None
        except PassDiffersError as difference:
            self._deviates(str(difference))
            held = None
        except Exception as error:  # the training goes on without us
            self.fails(error)
            held = None
        finally:
            self._busy = busy
        if held is None:
            held = self._kept(tensor)
        if self._count:
            self.report.held.append(held)
        elif number in self._pauses.after or self.report.deviation is not None:
            self._hook.take_away()
        return self._followed.at_point(number, held) if self._offloads else held

    def _hold(self, number: int, tensor: torch.Tensor) -> Any:
        """None: keep it."""
        uses = self._pinned.uses
        use = uses[number] if number < len(uses) else None
        if use is None or nodes_made() - self._first != use.nodes_before:
            raise _unexpected(number, tensor)
        if not use.needs_hook:
            return None
        if tensor.dtype is not use.dtype or tensor.shape != use.shape:
            raise _unexpected(number, tensor)
        held: Any = None
        if use.action != KEEP:
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
        by_node = use.proven_by_node
        if by_node is not None:
            node = tensor.grad_fn
            if node is None or node._sequence_nr() - self._first != by_node:
                packed = PackedUse(self._kept(tensor))
                unproven = _Unproven(packed, number, tensor, tensor._version)
                self._unproven[by_node].append(unproven)
                return packed
            self._nodes.check_kind(node, by_node, number)
        if use.action == RECOMPUTE:
            if self._made_again and is_plain(tensor):
                again = PlanFollower._again(self, tensor)
                if again is not None:
                    again.call.add_user()
                    return again
            if use.computed is None:
                return None
            self._nodes.check_maker(tensor, use.computed[0])
            return self._linked(number, use, tensor, None)
        return self._encoded_use(number, use, tensor)

    def _encoded_use(self, number: int, use: PinnedUse, tensor: torch.Tensor) -> Held | None:
        if not is_plain(tensor):
            return None
        if use.outcome is not None:
            outcome = encode_use(use.outcome, tensor.detach())
            return None if outcome is None else EncodedTensor(outcome, None)
        if use.value_encoding is not None:
            address = tensor.untyped_storage()._cdata
            known = self._to_encode.get(address)
            if known is None or known.version != tensor._version:
                self._to_encode[address] = ToEncode.of(
                    tensor, use.value_encoding.encoding, use.value_encoding.geometry
                )
        held = self._encoded(tensor)
        if use.value_encoding is not None and use.value_encoding.encoding == "two-valued":
            # Only the content says that it is still a dropout's noise; no waiting for a GPU.
            if tensor.device.type != "cpu" or held is None:
                return None
            if not torch.equal(held.unpack(), tensor):
                raise PassDiffersError(f"saved tensor {number} has more than two values")
        return held

    def _linked(
        self, number: int, use: PinnedUse, tensor: torch.Tensor, packed: PackedUse | None
    ) -> Any:
        """The call that makes it again; as long as something for it is missing, the tensor."""
        computed, geometry = use.computed, use.geometry
        if computed is None or geometry is None:
            return None
        if tensor.stride() != geometry.stride or tensor.storage_offset() != geometry.offset:
            raise PassDiffersError(f"saved tensor {number} lies in memory in another way")
        try:
            call = self._calls.get(computed[0]) or self._call(computed[0])
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
            self._nodes.check_maker(tensor, number)
            return CallResult(self._call(number), slot, Geometry.of(tensor))
        except _SourceMissingError:
            return None
        except PassDiffersError as difference:
            self._deviates(str(difference))
            return None

    def _prove(self, start: Any, proofs: tuple[Proof, ...]) -> None:
        for proof in proofs:
            node = self._nodes.proven_node(start, proof)
            for unproven in self._unproven.pop(proof.node, ()):
                self._replace_proven(unproven, node, proof.node)

    def _replace_proven(self, unproven: _Unproven, node: Any, number: int) -> None:
        if unproven.tensor._version != unproven.version:
            return
        packed, use = unproven.packed, self._pinned.uses[unproven.number]
        if use.action == RECOMPUTE:
            self._nodes.check_node(node, number)
            held = self._linked(unproven.number, use, unproven.tensor, packed)
        else:
            held = self._encoded_use(unproven.number, use, unproven.tensor)
        if held is not None and held is not packed:
            packed.held = held

    # calls and what they start from

    def _call(self, number: int) -> RepeatableCall:
        """Made when first needed, after those that it depends on."""
        calls = self._calls
        waiting = [number]
        while waiting:
            current = waiting[-1]
            if current in calls:
                waiting.pop()
                continue
            pinned = self._pinned.calls[current]
            missing = [parent for parent in pinned.parents if parent not in calls]
            if missing:
                waiting.extend(missing)
                continue
            inputs = tuple(map(self._input, pinned.arguments))
            parents = calls_among(inputs)  # a source may be computed, too
            calls[current] = RepeatableCall(
                pinned.template, inputs, pinned.geometries, pinned.places, pinned.sizes, parents
            )
        return calls[number]

    def _input(self, argument: SourceArgument | ComputedArgument | OwnedArgument) -> Held:
        if type(argument) is SourceArgument:
            held = self._sources.get(argument.source)
            if held is None:
                raise _SourceMissingError(argument.source)
            return held
        if type(argument) is ComputedArgument:
            return CallResult(self._calls[argument.call], argument.slot, argument.geometry)
        assert isinstance(argument, OwnedArgument)
        if argument.copied:
            return self._copies.of(argument.tensor)
        return KeptTensor.to_start_from(argument.tensor)

    def _add_source(self, key: SourceKey, tensor: torch.Tensor, held: Any) -> None:
        if key in self._sources:
            return
        if key[0] != "use":
            node, output = below_views(tensor)
            if node is None or (node._sequence_nr() - self._first, output) != key:
                raise PassDiffersError(f"another operator than {key[0]} made a saved tensor")
        geometry = self._pinned.sources[key]
        if tensor.stride() != geometry.stride or tensor.storage_offset() != geometry.offset:
            raise PassDiffersError("what is recomputed from lies in memory in another way")
        if isinstance(held, PackedUse) or (isinstance(held, EncodedTensor) and not held.geometry):
            held = self._kept(tensor)  # what one consumer needs is not the value
        if key in self._pinned.copied:
            held = self._copies.of(tensor)
        self._sources[key] = held
        if key in self._waiting:
            self._link_waiting(self._waiting.pop(key))

    def _link_waiting(self, waiting: list[_Unproven]) -> None:
        for unproven in waiting:
            if unproven.tensor._version == unproven.version:
                use = self._pinned.uses[unproven.number]
                held = self._linked(unproven.number, use, unproven.tensor, unproven.packed)
                if held is not unproven.packed:
                    unproven.packed.held = held

    # modules

    def enter_module(self, module: Any) -> None:
        call = (module, self._module_entries[module])
        self._module_entries[module] += 1
        place = self._pauses.ends_at_entry.get(call)
        if place is not None:
            self._resume_at(place)
        ordinal = self._pinned.dispatched.get(call)
        if ordinal is not None and self.report.deviation is None and not self._watching:
            self._watching.append(call)
            self._ordinal = ordinal
            self.__enter__()

    def leave_module(self, module: Any, output: Any) -> None:
        """`output` is None where forward raised."""
        call = (module, self._module_exits[module])
        self._module_exits[module] += 1
        if self._watching and self._watching[-1] == call:
            self._watching.pop()
            self.__exit__(None, None, None)
        place = self._pauses.ends_at_exit.get(call)
        if place is not None:
            self._resume_at(place)
        wanted = self._pinned.results.get(call)
        if wanted is None or self.report.deviation is not None:
            return
        tensors = list(tensors_in(output))
        busy, self._busy = self._busy, True
        try:
            for result in wanted:
                if result.place >= len(tensors):
                    raise PassDiffersError(f"{type(module).__name__} returned fewer tensors")
                tensor = tensors[result.place]
                with torch.no_grad():
                    if result.proofs:
                        self._prove(tensor.grad_fn, result.proofs)
                    if result.source is not None:
                        held = PlanFollower._again(self, tensor) if self._made_again else None
                        self._add_source(result.source, tensor, held or self._kept(tensor))
        except PassDiffersError as difference:
            self._deviates(str(difference))
        finally:
            self._busy = busy

    # the end

    def _deviates(self, why: str) -> None:
        super()._deviates(why)
        self._clear()
        if self._offloads:
            offload.packed(len(self._pinned.uses))  # the hook may not see them leave any more

    def _clear(self) -> None:
        for table in (self._sources, self._calls, self._waiting, self._unproven):
            table.clear()

    def finish(self, owned: frozenset[int] = _NOTHING) -> PassReport:
        if self.report.deviation is None:
            made, expected = nodes_made() - self._first, self._pinned.nodes
            if made != expected:
                self._deviates(f"the pass ended with {made} nodes, {expected} were recorded")
            elif self._count and self._packed != len(self._pinned.uses):
                self._deviates(
                    f"the pass ended with {self._packed} saved tensors, "
                    f"{len(self._pinned.uses)} were recorded"
                )
        self._ordinal = len(self._operators)
        self.report.held = [h.held if isinstance(h, PackedUse) else h for h in self.report.held]
        self._clear()
        return super().finish(owned)


def _unexpected(number: int, tensor: torch.Tensor) -> PassDiffersError:
    return PassDiffersError(
        f"saved tensor {number} ({tuple(tensor.shape)}, {tensor.dtype}) was not recorded"
    )


# Whether the nodes of a pass are as they were pinned; every node is looked at once.


class PassDiffersError(Exception):
    """The pass is not like the pinned one."""


class NodeChecks:
    """Of one pass, whose first node has the number `first`. Raises PassDiffersError."""

    __slots__ = ("_first", "_like", "_patterns")

    def __init__(self, patterns: dict[int, NodePattern], first: int) -> None:
        self._patterns = patterns
        self._first = first
        self._like: set[int] = set()

    def check_maker(self, tensor: torch.Tensor, number: int) -> None:
        """This node made what lies in the tensor's storage."""
        node = tensor.grad_fn
        while node is not None and node.name() in VIEW_NODES:
            node = node.next_functions[0][0]
        if node is None or node._sequence_nr() - self._first != number:
            raise PassDiffersError(f"another operator than {number} made a saved tensor")
        if number not in self._like:
            self.check_node(node, number)

    def check_node(self, node: Any, number: int) -> None:
        """It and all before it, down to what is held, are as they were pinned."""
        patterns, like, first = self._patterns, self._like, self._first
        waiting = [(node, number)]
        while waiting:
            node, number = waiting.pop()
            pattern = patterns.get(number)
            if pattern is None or number in like:  # None: of a value that is held
                continue
            following = node.next_functions
            if not pattern.is_like(node) or len(following) != len(pattern.edges):
                raise PassDiffersError(
                    f"node {number} is {node.name()}, {pattern.name} was recorded"
                )
            for (before, output), edge in zip(following, pattern.edges, strict=True):
                if before is None:
                    if edge.made is not None or edge.parameter is not None:
                        raise PassDiffersError(f"node {number} has another input")
                elif edge.made is not None:
                    if before._sequence_nr() - first != edge.made or output != edge.output:
                        raise PassDiffersError(f"node {number} has another input")
                    if edge.made in patterns:
                        waiting.append((before, edge.made))
                elif edge.parameter is None:
                    raise PassDiffersError(f"node {number} has another input")
                elif getattr(before, "variable", None) is not edge.parameter:
                    raise PassDiffersError(f"node {number} has another parameter")
            like.add(number)

    def check_kind(self, node: Any, number: int, saved: int) -> None:
        """The node that saved tensor `saved` belongs to; what is before it does not matter."""
        if not self._patterns[number].is_like(node):
            raise PassDiffersError(f"saved tensor {saved} is made by {node.name()}")

    def proven_node(self, start: Any, proof: Proof) -> Any:
        """Follow the proof's edges."""
        node = start
        for place in proof.path:
            edges = () if node is None else node.next_functions
            node = edges[place][0] if place < len(edges) else None
        if node is None or node._sequence_nr() - self._first != proof.node:
            raise PassDiffersError(f"node {proof.node} was not met again")
        pattern = self._patterns[proof.node]
        if not pattern.is_like(node):
            raise PassDiffersError(f"node {proof.node} is {node.name()}, not {pattern.name}")
        return node
